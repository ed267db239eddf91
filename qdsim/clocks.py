"""The clock behind ``compute_s`` and ``matching_s``.

On the CPU it is the process's CPU time, so that a figure does not depend on how many actors share a
core. On a GPU it is device time between CUDA events, which cost no synchronisation while they run. Where several
processes share a GPU, the turns of the others pass between the events as well: CUDA tells no process of its own alone.
"""

import time
from types import TracebackType

import torch


class Stopwatch:
    """Adds up the time spent inside ``with`` blocks."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._cpu_s = 0.0
        self._started_s = 0.0
        self._events: list[tuple[torch.cuda.Event, ...]] = []

    def __enter__(self) -> "Stopwatch":
        """Start."""
        if self._cuda:
            pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            pair[0].record()
            self._events.append(pair)
        else:
            self._started_s = time.process_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        if self._cuda:
            self._events[-1][1].record()
        else:
            self._cpu_s += time.process_time() - self._started_s

    @property
    def seconds(self) -> float:
        """Return the sum so far; on a GPU this waits for the device."""
        if not self._cuda:
            return self._cpu_s
        if self._events and not self._events[-1][1].query():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        return float(sum(start.elapsed_time(end) for start, end in self._events)) / 1000
