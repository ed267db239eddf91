"""Launches of a local step as one: a function of tensors is captured as a CUDA graph once it has run, then replayed.

A graph repeats kernels on the memory that they were captured with. So a function may be captured that asks the device
for nothing, whose shapes do not change, and in which nothing but tensors differs from call to call; it may change
tensors that it holds, such as θ, in place. :class:`~qdsim.models.fast.cuda.Fused` keeps to that.

The first calls run as they are: they load kernels and are the first steps. A call with other shapes does so as well.
The bits are the same either way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from qdsim.errors import CannotPlace

FIRST_CALLS = 2
"""That run as they are."""
LEAST_CALLS = 8
"""Below that, capturing costs more than replaying saves: it takes the host as long as a call, and waits for the GPU."""
Function = Callable[..., Any]
"""Of tensors, to tensors in tuples and dicts."""


@dataclass
class Graphs:
    """Whether a process captures what it repeats."""

    wanted: Literal["off", "auto", "on"] = "off"
    why_not: str = ""
    """Why it does not, once capturing has failed."""

    def replayed(self, function: Function, calls: int) -> Function:
        """Return a function that does the same, by a graph where it is called so often; what it returns is overwritten
        by the next call."""
        if self.wanted == "off" or self.why_not or calls < LEAST_CALLS:
            return function
        return _Replayed(self, function)

    def try_out(self, function: Function, *inputs: Tensor) -> None:
        """Capture a function and replay it once: where that fails or gives other bits, do without graphs, or refuse."""
        if self.wanted == "off":
            return
        expected = [tensor.clone() for tensor in _tensors(function(*inputs))]
        captured = self.capture(function, *inputs)
        if captured is None:
            return
        captured[0].replay()
        found = _tensors(captured[1])
        if not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)):
            self._fail("a replayed graph gave other bits")

    def capture(self, function: Function, *inputs: Tensor) -> tuple[Any, Any] | None:
        """Return the graph of a function of these tensors, and what it leaves there; None where that fails."""
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                left = function(*inputs)
        except RuntimeError as error:
            self._fail((str(error) or type(error).__name__).splitlines()[0])
            return None
        return graph, left

    def _fail(self, reason: str) -> None:
        self.why_not = reason
        if self.wanted == "on":
            asked = 'cluster.cuda_graphs = "on"'
            raise CannotPlace(asked, f"that a step cannot be captured ({reason})", 'set it to "auto" or "off"')


class _Replayed:
    """A function that is replayed from the third call on."""

    def __init__(self, graphs: Graphs, function: Function):
        self._graphs, self._function = graphs, function
        self._calls = 0
        self._graph: Any = None
        self._inputs: list[Tensor] = []
        self._left: Any = None

    def __call__(self, *inputs: Tensor, **others: Any) -> Any:
        """``others`` are for the function as it is; nothing that a graph does depends on them."""
        self._calls += 1
        if self._calls <= FIRST_CALLS or self._graphs.why_not:
            return self._function(*inputs, **others)
        if self._graph is None:
            self._inputs = [tensor.clone() for tensor in inputs]
            captured = self._graphs.capture(partial(self._function, **others), *self._inputs)
            if captured is None:  # nothing was run: what the function changes is as it was
                return self._function(*inputs, **others)
            self._graph, self._left = captured
        if [tensor.shape for tensor in inputs] != [tensor.shape for tensor in self._inputs]:
            return self._function(*inputs, **others)
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._left


def _tensors(found: Any) -> list[Tensor]:
    """Return the tensors in tuples and dicts, in order."""
    if isinstance(found, Tensor):
        return [found]
    parts = found.values() if isinstance(found, dict) else found or ()
    return [tensor for part in parts for tensor in _tensors(part)]
