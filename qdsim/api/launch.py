"""One run, from a checked job to a finished run directory.

Nothing here brings torch with it: on Ray, torch is imported and the data are read while Ray starts.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import TYPE_CHECKING, Any

from qdsim import __version__
from qdsim.data import datasets
from qdsim.errors import BadInput, ClientFailed, Interrupted, QdsimError, StorageFailed, TakenOver, as_toml
from qdsim.experiment.config import Job, in_todays_words, validate
from qdsim.experiment.progress import Event, Notice, Progress, Step
from qdsim.federation import attacks
from qdsim.federation.chaos import Chaos, Fault
from qdsim.ray_engine import environment
from qdsim.store import arrays, lock, run_directory, storage
from qdsim.store.arrays import ArrayFile
from qdsim.store.run_directory import part_name
from qdsim.store.storage import StoragePath

if TYPE_CHECKING:
    from qdsim.data.datasets import Dataset
    from qdsim.experiment.plan import Plan, SweepPoint
    from qdsim.federation.client_host import Images
    from qdsim.federation.executor import InlineExecutor
    from qdsim.planning.measured import Measured
    from qdsim.planning.planner import PlanReport

POLL_S = 0.1
IMPORTS_S = 10.0
"""Longer than importing torch takes: a process that ends in the middle of it may end in a crash."""
PACKAGES = ("torch", "torchvision", "ray", "numpy", "pandas", "pyarrow", "scikit-learn")


def stop_signals() -> list[signal.Signals]:
    """Return the signals that end a run in order; ``nohup`` has SIGHUP ignored, and so it stays."""
    found = [signal.SIGINT, signal.SIGTERM]
    return found if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [*found, signal.SIGHUP]


class Stop:
    """Whether SIGINT, SIGTERM or SIGHUP has arrived."""

    signum: int | None = None
    check_alive: Callable[[], None] | None = None
    """Raises where the cluster is gone."""

    def __getstate__(self) -> dict[str, Any]:
        """Ray Tune copies what it calls: in another process there is nothing to watch."""
        return {}

    def check(self) -> None:
        """Raise :class:`Interrupted` if one has."""
        if self.signum is not None:
            raise Interrupted(self.signum)
        if self.check_alive is not None:
            self.check_alive()


@contextmanager
def interruptible(*, at_once: bool) -> Iterator[Stop]:
    """Take these signals over inside the block, raising :class:`Interrupted` at once or when asked.

    An exception raised inside one of Ray's blocking calls comes out of it as SystemExit(1), so a run on Ray
    asks between calls. Outside of the main thread there are no signals to take over.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        stop.signum = signum
        if at_once:
            stop.check()

    before = {s: signal.signal(s, handle) for s in stop_signals()}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def run(
    job: Job,
    out: StoragePath,
    *,
    engine: str,
    address: str | None,
    origin: dict[str, Any],
    begin: Callable[[Plan, StoragePath], None],
    emit: Callable[[Event], None],
    resume: bool | StoragePath = False,
    faults: Sequence[Fault] = (),
    trained_in: StoragePath | None = None,
) -> StoragePath:
    """Check the job against its data, make the run directory, run, and return the directory.

    ``origin`` says in the manifest where the job came from; ``begin`` is told the plan before it starts. ``resume``
    resumes the newest run of the job, or the one given, from its last commit; a finished one is returned.
    ``trained_in`` is the folder whose trained states are shared, by default the one that the run lies in.
    """
    earlier = None if isinstance(resume, bool) else resume
    if resume is True:
        earlier = run_directory.newest_run(out, job.name)
    if faults and engine == "inline":
        raise BadInput("--chaos", engine, "faults strike actors: run with --engine ray")
    with ExitStack() as owned, ExitStack() as connection:
        if earlier is not None:
            owner = owned.enter_context(lock.held(earlier))
            manifest_before = run_directory.read_manifest(earlier)
            _check_same_settings(job, manifest_before, earlier)
            if manifest_before.get("state") == "done":
                _join_parts(earlier, partial(lock.check, earlier, owner))  # which a crash may have cut off
                return earlier
            from qdsim.store import completeness  # which brings pandas

            run_directory.check_folders(earlier)
            run_directory.clear_temporary(earlier)
            completeness.check_to_resume(earlier)
        datasets.check_there(job.data.dataset, job.data.root, download=job.data.download)
        stop = Stop()
        manifest: run_directory.Manifest | None = None

        def last_words(error: QdsimError) -> None:
            """Record and say that the cluster is gone, where this process waits for it and is about to be ended."""
            with suppress(QdsimError):
                if manifest is not None:
                    manifest.finish("failed", exit_code=error.exit_code, error=str(error))
            print(f"qdsim: {error}", file=sys.stderr, flush=True)

        reading = f"reading {job.data.dataset}"
        if engine == "inline":
            emit(Step(reading))
            plan, dataset = _check(job, faults)
        else:
            environment.prepare(address)  # before Ray is imported
            from qdsim.ray_engine import cluster  # and before the threads take turns: it would come second to torch

            stays = cluster.is_connected()
            cluster.check_reachable(address)
            where = address or os.environ.get("RAY_ADDRESS")
            emit(Step(f"joining the cluster at {where}, {reading}" if where else f"starting Ray, {reading}"))
            with _beside(lambda: _check(job, faults)) as checked:
                stop = connection.enter_context(on_ray(cluster.connected(job.cluster, address, last_words)))
                if not checked.done():
                    emit(Step(reading))
                while not wait([checked], timeout=POLL_S).done:
                    stop.check()
                plan, dataset = checked.result()
            del checked  # it holds the images, too
        from qdsim.experiment.status import Recorder
        from qdsim.federation.client_host import Images
        from qdsim.planning import estimate

        if earlier is None:
            storage.check_room(out, estimate.storage_bytes(plan))
        run_dir = earlier or run_directory.new_run_directory(out, job.name)
        if earlier is None:
            owner = owned.enter_context(lock.held(run_dir))
        else:
            lock.check(earlier, owner)
            run_directory.rewrite_older_parts(earlier)
        described = _describe(plan, run_dir, dataset.describe(), engine, origin)
        check_owner = partial(lock.check, run_dir, owner)
        manifest = (
            run_directory.Manifest.reopen(run_dir, check_owner, described)
            if earlier
            else run_directory.Manifest(run_dir, described, check_owner)
        )
        # handed over, not shared: on Ray the arrays lie in its store, and nowhere else
        images = [Images(dataset.train_images, dataset.test_images, dataset.test_labels, dataset.normalization)]
        del dataset
        recorder = Recorder(run_dir, len(plan.tasks()), partial(lock.owns, run_dir, owner))
        with _recorded(manifest, run_dir, check_owner), closing(recorder), closing(connection):
            check_owner()  # reading data and starting Ray took a while
            _save_partitions(plan, run_dir)
            begin(plan, run_dir)
            told = _telling(emit, recorder.take)
            if engine == "inline":
                from qdsim.experiment.runner import Experiment

                with interruptible(at_once=True):
                    executor = _inline_executor(plan, images.pop())
                    manifest.note("devices", {"model": "cpu"})
                    Experiment(plan, executor, run_dir, told, owner, trained_in).run()
            else:
                from qdsim.ray_engine.driver import run_on_ray

                told = _striking(told, Chaos(list(faults), run_dir))
                run_on_ray(
                    plan,
                    run_dir,
                    owner,
                    images.pop,
                    list(faults),
                    told,
                    lambda device: manifest.note("devices", device.as_dict()),
                    stop.check,
                    trained_in,
                    stays_connected=stays,
                )
        for fault in Chaos(list(faults), run_dir).spared():
            emit(
                Notice(
                    f"--chaos {str(fault)!r} never struck: that phase and round did not run, or not with that client"
                )
            )
        manifest.finish("done", exit_code=0)
        _join_parts(run_dir, check_owner)
    return run_dir


def _join_parts(run_dir: StoragePath, check_owner: Callable[[], None]) -> None:
    """Join the parts of long tables; where that fails the run is done all the same, in more files."""
    with suppress(QdsimError, OSError):
        run_directory.join_parts(run_dir, check_owner)


@contextmanager
def _recorded(
    manifest: run_directory.Manifest, run_dir: StoragePath, check_owner: Callable[[], None]
) -> Iterator[None]:
    """Have the end of a run in its manifest, and in ``failure.json`` which client failed where, if one did.

    Whoever has taken the run over meanwhile says there how it went on, and nobody else.
    """
    failure = run_dir / "failure.json"
    try:
        check_owner()
        failure.unlink(missing_ok=True)
        yield
    except Interrupted as stop:
        with suppress(QdsimError):
            manifest.finish("interrupted", exit_code=stop.exit_code)
        raise
    except BaseException as raised:
        error = storage.as_failure(raised) or raised
        code = error.exit_code if isinstance(error, QdsimError) else 1
        said = str(error).splitlines()[0] if str(error) else repr(error)
        try:
            check_owner()
            if isinstance(error, ClientFailed):
                names = ("client_id", "phase", "round_number", "where", "cause")
                content = {name: getattr(error, name) for name in names}
                storage.write(failure, json.dumps(content, indent=2).encode() + b"\n")
            manifest.finish("failed", exit_code=code, error=said)
        except TakenOver as lost:
            if isinstance(error, StorageFailed):  # what it missed, the other has deleted
                raise lost from raised
        except QdsimError:  # a full disk: what made the run fail is said all the same
            pass
        raise error from raised.__cause__


def _check_same_settings(job: Job, manifest: dict[str, Any], run_dir: StoragePath) -> None:
    """Refuse to resume a run with other settings; where its clients are placed may change."""
    now = json.loads(json.dumps(job.model_dump()))
    before = manifest.get("config") or {}
    if manifest.get("config_sha256", _config_sha256(before)) != _config_sha256(before):
        why = f"the configuration in its manifest.json is not the one it began with; {run_directory.START_ANEW}"
        raise BadInput("--resume", str(run_dir), why)
    # a key that the run's version knew nothing of had its default
    defaults = run_directory.flat(json.loads(json.dumps(validate({"name": job.name}).model_dump())))
    flat_now, flat_before = run_directory.flat(now), defaults | run_directory.flat(in_todays_words(before))
    differing = [k for k in sorted(flat_now | flat_before) if flat_now.get(k) != flat_before.get(k)]
    differing = [k for k in differing if not k.startswith("cluster.")]
    if differing:
        said = ", ".join(f"{k} (then {as_toml(flat_before.get(k))}, now {as_toml(flat_now.get(k))})" for k in differing)
        raise BadInput(
            "--resume", str(run_dir), f"it has other settings: {said}; run without --resume to start a new run"
        )


def _config_sha256(config: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


@contextmanager
def _beside(work: Callable[[], tuple[Plan, Dataset]]) -> Iterator[Future[tuple[Plan, Dataset]]]:
    """Have something done in a thread of its own, as a daemon: a download must not keep an interrupted command.

    Ray is not started there but in this thread: its processes die with the one that started them.
    """
    found: Future[tuple[Plan, Dataset]] = Future()

    def do() -> None:
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        thread.join(IMPORTS_S)


def _check(job: Job, faults: Sequence[Fault]) -> tuple[Plan, Dataset]:
    """Read the data and see what they allow of the job."""
    with environment.gc_paused():
        from qdsim.experiment.plan import build_plan

    dataset = datasets.load(
        job.data.dataset,
        job.data.root,
        verify=job.data.verify,
        download=job.data.download,
        size=job.data.size,
    )
    plan = build_plan(job, dataset)
    for fault in faults:
        if fault.client_id >= plan.max_clients:
            raise BadInput("--chaos", str(fault), f"clients are 0 to {plan.max_clients - 1}")
    return plan, dataset


def _inline_executor(plan: Plan, images: Images) -> InlineExecutor:
    import torch

    from qdsim.federation.client_host import ClientHost
    from qdsim.federation.executor import InlineExecutor
    from qdsim.models.compute import make_compute
    from qdsim.models.device import set_up

    numerics = plan.job.cluster.numerics()
    set_up(numerics)
    compute = make_compute(plan.points[0].model, torch.device("cpu"), numerics)
    return InlineExecutor(ClientHost(compute, images))


@contextmanager
def on_ray(connected: AbstractContextManager[Callable[[], None]]) -> Iterator[Stop]:
    """Have Ray inside the block, and be told of signals instead of being interrupted by them."""
    with (
        interruptible(at_once=False) as early,
        connected as check_alive,
        interruptible(at_once=False) as stop,  # again, since ray.init installs a handler of its own
    ):
        early.check()
        stop.check_alive = check_alive
        yield stop


def plan_on_cluster(job: Job, address: str, measured: Measured | None = None) -> PlanReport:
    """Plan a job for a running cluster, and measure one client's steps there, unless its GPUs have been measured."""
    environment.prepare(address)
    from qdsim.planning import planner
    from qdsim.ray_engine import cluster, probe

    with cluster.connected(job.cluster, address):
        nodes = cluster.nodes()
        described = f"the cluster at {address}: {len(nodes)} nodes"
        machines = planner.Machines(nodes, probe.gpu_memory(), described, cluster.most_gpus())
        return planner.plan_job(job, machines, probe.measured_on, measured=measured)


def _telling(*listeners: Callable[[Event], None]) -> Callable[[Event], None]:
    """Pass events on to several."""

    def tell(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return tell


def _striking(emit: Callable[[Event], None], chaos: Chaos) -> Callable[[Event], None]:
    """Pass events on; a fault that is meant for this process strikes when it hears of its round."""

    def heard(event: Event) -> None:
        emit(event)
        fault = chaos.due("command", event.phase, event.round_number) if isinstance(event, Progress) else None
        if fault is not None:
            fault.strike()

    return heard


def _save_partitions(plan: Plan, run_dir: StoragePath) -> None:
    (run_dir / "partitions").mkdir(exist_ok=True)
    for point, federation in plan.federations():
        name = run_directory.file_name(f"{point.label}-" if point.label else "") + f"seed-{federation.seed}.npz"
        content = f"the partition of {part_name(point.label, federation.seed, '', '', '')}"
        file = ArrayFile(run_dir / "partitions" / name, run_directory.identity(run_dir).run_id, content)
        arrays.write(file, federation.partition.to_arrays())


def _describe(
    plan: Plan, run_dir: StoragePath, dataset: dict[str, Any], engine: str, origin: dict[str, Any]
) -> dict[str, Any]:
    import torch

    from qdsim.models.device import cudnn_version, driver_version

    versions = {"qdsim": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "run_id": run_dir.name,
        "origin": origin,
        "engine": engine,
        "config": plan.job.model_dump(),
        "config_sha256": _config_sha256(plan.job.model_dump()),
        "cells": [_resolved(point) for point in plan.points],
        "data": dataset,
        # as the tables have them: those from outside are named otherwise in the job
        "method_names": list(plan.job.methods_by_name),
        "attack_names": [attacks.find(name).name for name in plan.job.membership],
        "methods": {name: method.declared() for name, method in plan.job.methods_by_name.items()},
        "versions": versions,
        "hardware": {
            "host": platform.node(),
            "machine": platform.machine(),
            "system": f"{sys.platform} {platform.release()}",
            "cpus": os.cpu_count(),
            "memory_bytes": memory,
            "gpus": gpus,
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "cudnn": cudnn_version(),
        },
    }


def _resolved(point: SweepPoint) -> dict[str, Any]:
    """What a point came to: the number behind ``auto``, and each seed's partition and requests."""
    max_loss = point.hyper.max_loss
    return {
        "cell": point.label,
        "max_loss": max_loss if math.isfinite(max_loss) else "none",
        "partitions": {str(s.seed): s.partition.sha256 for s in point.federations},
        "requests": {str(s.seed): [request.label for request in s.requests] for s in point.federations},
    }
