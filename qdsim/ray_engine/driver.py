"""The driver actor, which schedules and aggregates, and the command's watch over it."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from qdsim.errors import QdsimError
from qdsim.experiment.plan import Plan
from qdsim.experiment.progress import Event, Notice, Progress, Step
from qdsim.experiment.runner import Experiment
from qdsim.federation.chaos import Chaos, Fault
from qdsim.federation.client_host import Images
from qdsim.models.device import DeviceInfo, set_up
from qdsim.planning.estimate import layout_of
from qdsim.ray_engine import cluster
from qdsim.ray_engine.executor import RayExecutor
from qdsim.ray_engine.metrics import Gauges
from qdsim.ray_engine.probe import gpu_memory
from qdsim.ray_engine.reservation import release
from qdsim.ray_engine.worker_group import WorkerGroup, start_workers
from qdsim.ray_engine.workers import first_line
from qdsim.store import storage
from qdsim.store.storage import StoragePath

PROGRESS_EVERY_S = 0.2
POLL_S = 0.1


@ray.remote(num_cpus=0, concurrency_groups={"watch": 1})  # type: ignore[call-overload]
class DriverActor:
    """Aggregates, schedules phases and writes the tables; the command line only watches it."""

    def __init__(self) -> None:
        self._events: deque[Event | DeviceInfo] = deque()
        self._lock = threading.Lock()
        self._reported_s = 0.0
        self._gauges: Gauges | None = None

    def run(
        self,
        plan: Plan,
        run_dir: StoragePath,
        owner: str,
        group: WorkerGroup,
        faults: list[Fault],
        trained_in: StoragePath | None,
    ) -> None:
        """Run the whole plan. Of the images there are references only: they never come into this process."""
        set_up(plan.job.cluster.numerics())
        self._gauges = Gauges(run_dir.name)
        chaos = Chaos(faults, run_dir)
        executor = RayExecutor(plan.job.cluster, group, chaos, self._emit)
        Experiment(plan, executor, run_dir, partial(self._strike_or_emit, chaos), owner, trained_in).run()

    def _strike_or_emit(self, chaos: Chaos, event: Event) -> None:
        """Pass an event on; a fault that is meant for this process strikes when its round begins."""
        if isinstance(event, Progress):
            fault = chaos.due("driver", event.phase, event.round_number)
            if fault is not None:
                fault.strike()
        self._emit(event)

    def _emit(self, event: Event | DeviceInfo) -> None:
        now_s = time.monotonic()
        if isinstance(event, Progress):
            if event.row is None and event.round_number and now_s - self._reported_s < PROGRESS_EVERY_S:
                return
            self._reported_s = now_s
        if self._gauges is not None and not isinstance(event, DeviceInfo):
            self._gauges.record(event)
        with self._lock:
            self._events.append(event)

    @ray.method(concurrency_group="watch")
    def events(self) -> list[Event | DeviceInfo]:
        """Return what has happened since the last call, and on which devices the clients are."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events


def run_on_ray(
    plan: Plan,
    run_dir: StoragePath,
    owner: str,
    take_images: Callable[[], Images],
    faults: list[Fault],
    emit: Callable[[Event], None],
    note_device: Callable[[DeviceInfo], None],
    check: Callable[[], None],
    trained_in: StoragePath | None = None,
    *,
    stays_connected: bool = False,
) -> None:
    """Start the driver actor on this node and the clients' actors, and watch it to its end; ``check`` may raise.

    A driver that is lost is replaced, with all of its clients, and resumes from the last commit: the images are owned
    by this process, in Ray's store. Where the process stays connected to the cluster afterwards, the run's actors and
    reservations are ended here; elsewhere they end with the connection.
    """
    # what can be told at once is told before anything is moved or started
    memory = gpu_memory()
    layout = layout_of(plan, cluster.nodes(), cluster.most_gpus(), memory)
    emit(Step(f"starting a driver and {len(layout.clients)} client processes"))
    images = take_images()
    normalization = images.normalization
    refs = [ray.put(array) for array in (images.train, images.test, images.test_labels)]
    del images

    def notify(text: str) -> None:
        emit(Notice(text))

    attempts = 0
    while True:
        check()
        driver = _start_driver()
        rounds = 0
        try:
            group = start_workers(plan, run_dir.name, refs, normalization, notify, check, memory)
            stored = trained_in.resolve() if trained_in is not None else None
            running = driver.run.remote(plan, run_dir.resolve(), owner, group, faults, stored)
            for event in _watch(driver, running, check):
                if isinstance(event, DeviceInfo):
                    note_device(event)
                    continue
                rounds += isinstance(event, Progress) and event.row is not None
                emit(event)
            return
        except RayTaskError as error:
            if isinstance(error.cause, QdsimError):
                raise error.cause from None
            failure = storage.as_failure(error.cause)
            if failure is not None:
                raise failure from None
            raise QdsimError(
                f"the driver failed with {type(error.cause).__name__}: {first_line(error.cause)}"
            ) from error
        except RayError as error:
            check()  # where the cluster is gone nothing can be asked of it
            with contextlib.suppress(RayError, ValueError):
                ray.kill(driver)  # it may have been out of reach only
            attempts = 1 if rounds else attempts + 1  # in a row, without a round between them
            if attempts == plan.job.cluster.attempts:
                raise QdsimError(f"the driver actor was lost {attempts} times: {first_line(error)}") from error
            notify(f"the driver was lost: {first_line(error)}; resuming from the last commit")
        finally:
            if stays_connected:
                with contextlib.suppress(RayError, ValueError):
                    ray.kill(driver)
                with contextlib.suppress(RayError):
                    release(run_dir.name)


def _start_driver() -> Any:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    cls: Any = DriverActor
    return cls.options(scheduling_strategy=here).remote()


def _watch(driver: Any, running: Any, check: Callable[[], None]) -> Iterator[Event | DeviceInfo]:
    """Yield what the driver says until it is done."""
    while True:
        done, _ = ray.wait([running], timeout=POLL_S)
        check()
        yield from ray.get(driver.events.remote())
        if done:
            ray.get(running)
            return
