"""``qdsim.run``, ``resume``, ``load``, ``verify``, ``report`` and others: what the commands do, with values in and out.

A user's mistake raises the error whose one line the command prints.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from qdsim import __version__
from qdsim.api import launch
from qdsim.api import report as reports
from qdsim.api.display import Display
from qdsim.api.log import RunLog
from qdsim.api.run import Run
from qdsim.errors import BadInput, Interrupted, as_toml
from qdsim.experiment import config, job_files
from qdsim.experiment.config import Job, Overrides
from qdsim.experiment.progress import Event, Notice
from qdsim.federation.chaos import Fault
from qdsim.store import run_directory, storage
from qdsim.store.run_directory import first_line
from qdsim.store.storage import StoragePath
from qdsim.tracking import follow
from qdsim.tracking.follow import Follower, check_trackers

if TYPE_CHECKING:
    from qdsim.api.plan_report import JobPlan
    from qdsim.experiment.plan import Plan

ENGINES = ("ray", "inline")
IN_PYTHON = "(given in Python)"
"""Where a job came from that is no file."""
NO_CHANGE = ("about", "data.root", "data.download")
"""Keys in which a job may differ from the one of its name, and be the same experiment."""
WORD = re.compile(r"(?!(?:true|false|nan|inf)$)[A-Za-z][A-Za-z0-9_./:-]*")
"""A text that --set takes as it is, without quotes."""
JobLike = str | Path | Mapping[str, Any] | Job


def run(
    job: JobLike,
    *,
    set: Overrides | None = None,
    profile: str | None = None,
    out: str | Path = "runs",
    engine: str = "ray",
    address: str | None = None,
    resume: bool = False,
    track: str | Iterable[str] = (),
    chaos: Iterable[str] = (),
    trained_in: str | Path | None = None,
    progress: bool = True,
) -> Run:
    """Run a job and return its run.

    ``job`` is the name of a job that comes with qdsim, the path of a job file, the content of one as a dict, or a
    :class:`~qdsim.experiment.config.Job`; ``set`` changes keys of it, ``{"train.rounds": 5}``. Trained states are found
    and stored in ``.trained`` of ``out``, or of ``trained_in``. The rest is as of ``qdsim run``; with
    ``progress=False`` nothing is shown.
    """
    loaded = job_of(job, set=set, profile=profile)
    named = str(job) if isinstance(job, str | Path) else IN_PYTHON
    origin = {"job": named, "profile": profile, "set": as_texts(set), "changed": _changed(loaded, profile)}
    return _launched(
        loaded,
        storage.folder(str(out)),
        origin=origin,
        engine=engine,
        address=address,
        resume=resume,
        track=track,
        chaos=chaos,
        trained_in=None if trained_in is None else storage.folder(str(trained_in)),
        progress=progress,
    )


def resume(
    run: str | StoragePath | Run,
    *,
    engine: str = "ray",
    address: str | None = None,
    track: str | Iterable[str] = (),
    chaos: Iterable[str] = (),
    progress: bool = True,
) -> Run:
    """Resume a run from its last commit, with the settings it has; a finished one is returned as it is."""
    run_dir = load(run).path.resolve()
    manifest = run_directory.read_manifest(run_dir)
    return _launched(
        config.of_manifest(manifest, run_dir),
        run_dir.parent,
        origin=manifest.get("origin") or {},
        engine=engine,
        address=address,
        resume=run_dir,
        track=track,
        chaos=chaos,
        progress=progress,
    )


def load(run: str | StoragePath | Run) -> Run:
    """Return the run in a directory: a path or a URI. It may be finished, going on, or of an older version.

    ``latest`` is the newest in the folder ``runs``, ``DIR/latest`` that in another.
    """
    return run if isinstance(run, Run) else Run(run)


def report(runs: str | StoragePath | Run | Iterable[str | StoragePath | Run], *, out: str | Path = "report") -> Path:
    """Make every table and figure that runs cover, and one HTML page of them; return the page.

    ``runs`` are runs, run directories, ``latest``, or folders that hold them; they may be going on.
    """
    given = [runs] if isinstance(runs, str | StoragePath | Run) else list(runs)
    paths = [run.path if isinstance(run, Run) else run for run in given]
    return reports.write(paths, Path(out), most_workers=1).page


def verify(first: str | StoragePath | Run, second: str | StoragePath | Run) -> str | None:
    """Compare two runs value by value, clocks and places aside: None if they are equal, else the first difference."""
    from qdsim.store.verify import difference

    return difference(_path_of(first), _path_of(second))


def export(
    run: str | StoragePath | Run, *, to: str | Iterable[str], out: str | os.PathLike[str] | None = None
) -> list[str]:
    """Send the rows of a run, finished or not, to trackers; nothing is there twice, however often it is done.

    ``to``: ``tensorboard``, ``wandb``, ``mlflow`` or ``trackio``, or several. ``out`` is where TensorBoard's and W&B's
    files go, by default the run directory. Returns a line for each tracker that says where the rows are.
    """
    trackers = check_trackers([to] if isinstance(to, str) else to, "--to")
    return follow.export(_path_of(run), trackers, None if out is None else Path(out))


def _path_of(run: str | StoragePath | Run) -> StoragePath:
    """Return a run's directory, which need not be readable."""
    if isinstance(run, Run):
        return run.path
    return run_directory.find_run(run) if isinstance(run, str) else run


def plan(
    job: JobLike,
    *,
    set: Overrides | None = None,
    profile: str | None = None,
    address: str | None = None,
    gpus: int | None = None,
    gpu: str | None = None,
    gpu_memory: str | None = None,
    cpus: int | None = None,
    memory: str | None = None,
    doctor: str | Path | None = None,
) -> JobPlan:
    """Say whether a job fits, where its clients are placed and how long it will take; only a probe is run.

    It is planned for the cluster at ``address`` (or ``$RAY_ADDRESS``), for an imagined machine with ``gpus`` GPUs (one,
    where only ``gpu``, its model, is given), or for this machine. ``doctor``: a file of ``qdsim doctor --out``, whose
    measurements of a GPU's speed and memory are then used. A job that does not fit raises
    :class:`~qdsim.errors.CannotPlace`.
    """
    loaded = job_of(job, set=set, profile=profile)
    gpus = 1 if gpu and gpus is None else gpus
    if gpu and not gpus:
        raise BadInput("--gpus", gpus, f"--gpu {gpu} names what a machine has one or more of: leave one of them out")
    if gpus is None and (gpu_memory or cpus or memory):
        raise BadInput(
            "--gpus", None, "--gpu-memory, --cpus and --memory describe a machine with so many GPUs: give it"
        )
    if gpus is not None and address is not None:
        raise BadInput("--address", address, "plan for a running cluster, or with --gpus for another machine")
    from qdsim.api.plan_report import JobPlan
    from qdsim.planning import measured as measurements
    from qdsim.planning import planner

    measured = measurements.read(doctor) if doctor is not None else None
    where = address or os.environ.get("RAY_ADDRESS")
    if gpus is not None:
        machines = planner.imagined(gpus, gpu_memory, cpus, memory, gpu)
        assumed = partial(planner.assumed, model=machines.model)
        report = planner.plan_job(loaded, machines, assumed, planner.ASSUMED, measured)
    elif where:
        report = launch.plan_on_cluster(loaded, where, measured)
    else:
        report = planner.plan_job(loaded, planner.this_machine(), planner.measured_here, measured=measured)
    return JobPlan(report, is_assumed=bool(gpus and report.layout.gpus and measured is None))


def job_of(job: JobLike, *, set: Overrides | None = None, profile: str | None = None) -> Job:
    """Return the checked job: file, dict or Job, with a profile and changed keys."""
    overrides = {key: _plain(value) for key, value in set.items()} if isinstance(set, Mapping) else set
    if isinstance(job, str | Path):
        return config.load(job_files.find(Path(job)), profile=profile, overrides=overrides)
    values = job.model_dump() if isinstance(job, Job) else {key: _plain(value) for key, value in job.items()}
    return config.build(values, profile=profile, overrides=overrides)


def _launched(
    job: Job,
    out: StoragePath,
    *,
    origin: dict[str, Any],
    engine: str,
    address: str | None,
    resume: bool | StoragePath,
    track: str | Iterable[str],
    chaos: Iterable[str],
    progress: bool,
    trained_in: StoragePath | None = None,
) -> Run:
    if engine not in ENGINES:
        raise BadInput("engine", engine, f"allowed: {', '.join(ENGINES)}")
    trackers = check_trackers([track] if isinstance(track, str) else track)
    faults = [Fault.parse(text) for text in chaos]
    began: list[StoragePath] = []
    log = RunLog()
    try:
        with Display(Console(quiet=not progress)) as screen:

            def warn(text: str) -> None:
                log.take(Notice(text))
                if progress:
                    screen.emit(Notice(text))
                else:
                    warnings.warn(text, stacklevel=2)

            follower = Follower(trackers, warn)

            def begin(plan: Plan, run_dir: StoragePath) -> None:
                began.append(run_dir)
                log.begin(run_dir, f"qdsim {__version__} begins, engine {engine}")
                for line in screen.begin(plan, run_dir):
                    log.say(line)
                follower.begin(run_dir)

            def emit(event: Event) -> None:
                log.take(event)
                screen.emit(event)
                follower.take(event)

            with follower:
                run_dir = launch.run(
                    job,
                    out,
                    engine=engine,
                    address=address,
                    origin=origin,
                    begin=begin,
                    emit=emit,
                    resume=resume,
                    faults=faults,
                    trained_in=trained_in,
                )
            if not began:  # it was done before
                screen.say_where(run_dir)
    except Interrupted as stop:
        known = [resume] if not isinstance(resume, bool) else began
        stop.resume = _how_to_resume(known, engine, address)
        log.end(f"interrupted by signal {stop.signum}; {stop.resume} continues")
        try:
            signal.raise_signal(stop.signum)  # by now to whom it belongs: in a notebook it is a KeyboardInterrupt
        except Interrupted:  # to the command line, which says how to go on
            raise stop from None
        raise
    except Exception as error:
        log.end(f"failed: {first_line(error)}")
        raise
    log.end("done")
    return Run(run_dir)


def _how_to_resume(began: list[StoragePath], engine: str, address: str | None) -> str:
    """Return the command that resumes a run, with what cannot be read from its files."""
    chosen = [*(["--engine", engine] if engine != ENGINES[0] else []), *(["--address", address] if address else [])]
    return shlex.join(["qdsim", "resume", str(began[0]), *chosen]) if began else ""


def _plain(value: Any) -> Any:
    """Return a value as a job file would have it: a number of numpy's as a number, a path as text."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if getattr(value, "shape", None) == ():  # of numpy or torch
        return value.item()
    return value


def _changed(job: Job, profile: str | None) -> list[str] | None:
    """Return in what a job differs from the one of its name that comes with qdsim, with the profile on both.

    None where there is no such job.
    """
    file = job_files.shipped().get(job.name)
    if file is None:
        return None
    jobs = config.load(file, profile=profile), job
    before, now = (run_directory.flat(json.loads(json.dumps(each.model_dump()))) for each in jobs)
    keys = [key for key in dict.fromkeys([*now, *before]) if key not in NO_CHANGE and now.get(key) != before.get(key)]
    return [f"{key} left out" if now.get(key) is None else f"{key} = {as_toml(now[key])}" for key in keys]


def as_texts(overrides: Overrides | None) -> list[str]:
    """Return overrides as they would be typed, for the manifest."""
    if not isinstance(overrides, Mapping):
        return list(overrides or [])
    plain = {key: _plain(value) for key, value in overrides.items()}
    return [f"{key}={v if isinstance(v, str) and WORD.fullmatch(v) else as_toml(v)}" for key, v in plain.items()]
