"""``qdsim tune``: Ray Tune proposes values of a job's keys, each trial is a run, and all share trained states."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from qdsim.api import functions, launch
from qdsim.api.functions import JobLike
from qdsim.api.run import Run
from qdsim.data import datasets
from qdsim.errors import BadInput, Interrupted, QdsimError
from qdsim.experiment.config import Job, Overrides
from qdsim.ray_engine import environment
from qdsim.store import storage
from qdsim.store.storage import StoragePath
from qdsim.tuning.space import EXAMPLE, Metric, Range

if TYPE_CHECKING:
    import pandas as pd

SEARCHES = ("random", "optuna")
FIXED = ("name", "cluster", "sweep")
"""Keys that no search may vary: they move no number, or make several runs of one."""
HELD_BYTES = 1_000_000
SETTINGS_OF_TUNE = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # which shows each failure as a page
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # which would end a search as if it were done
}
TUNE_FOLDER = "ray_tune"
"""Where Ray Tune keeps its own files, inside the folder of the search."""


@dataclass(frozen=True)
class Search:
    """A search that has ended."""

    path: StoragePath
    """Its folder: the runs of its trials, ``trials.csv`` and Ray Tune's own files."""
    metric: str
    trials: pd.DataFrame
    """One row for each trial, the best first: its values, the metric, its run, and why it failed if it did."""
    best: dict[str, Any]
    """The values of the best trial, as ``set`` takes them."""

    @property
    def best_run(self) -> Run:
        """The run of the best trial."""
        return Run(self.path / str(self.trials.iloc[0]["run"]))


def tune(
    job: JobLike,
    *,
    over: Mapping[str, str] | Sequence[str],
    metric: str,
    mode: str = "max",
    trials: int = 10,
    search: str = "random",
    concurrent: int = 1,
    seed: int = 0,
    set: Overrides | None = None,
    profile: str | None = None,
    out: str | os.PathLike[str] = "runs",
    engine: str = "ray",
    address: str | None = None,
    tell: Callable[[str], None] | None = None,
) -> Search:
    """Search over keys of a job for the best metric.

    ``over`` gives each key its range, ``{"train.lr": "loguniform(0.001, 0.1)"}``. A trial is a run in the folder of the
    search; trainings are taken from and stored in ``<out>/.trained``, so trials that differ in unlearning alone train
    once. ``concurrent`` trials run at a time, and take turns at the same training. A trial that fails (a learning rate
    too high) is one that is not chosen.
    """
    texts = [f"{key}={text}" for key, text in over.items()] if isinstance(over, Mapping) else list(over)
    ranges = [Range.parse(text) for text in texts]
    loaded = functions.job_of(job, set=set, profile=profile)
    _check(ranges, loaded, search=search, mode=mode, engine=engine)
    wanted = Metric.parse(metric, loaded)
    parent = storage.folder(str(out)).absolute()
    datasets.check_there(loaded.data.dataset, loaded.data.root, download=loaded.data.download)
    environment.prepare(address)
    os.environ |= SETTINGS_OF_TUNE
    from ray import tune as ray_tune

    from qdsim.ray_engine import cluster

    cluster.check_reachable(address)
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # why a trial failed is said in a line
    folder = parent / f"{loaded.name}-tune-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    folder.mkdir(parents=True)
    values = json.loads(json.dumps(loaded.model_dump()))
    values["data"]["root"] = os.path.abspath(loaded.data.root)  # a trial has a folder of its own
    trial = partial(_trial, values=values, folder=folder, trained_in=parent, engine=engine, metric=wanted)
    # an inline run computes in the process of its trial; on Ray its clients have their own reservations, and the
    # trial, which must hold something, holds none of their cores
    held: dict[str, float] = {"CPU": loaded.cluster.threads} if engine == "inline" else {"memory": HELD_BYTES}
    try:
        with launch.on_ray(cluster.connected(loaded.cluster, address)) as stop:
            tuner = ray_tune.Tuner(
                ray_tune.with_resources(trial, held),
                param_space={} if search == "optuna" else {r.key: r.of_tune() for r in ranges},
                tune_config=ray_tune.TuneConfig(
                    metric="metric",
                    mode=mode,
                    num_samples=trials,
                    search_alg=_searcher(search, ranges, mode, concurrent, seed),
                ),
                run_config=ray_tune.RunConfig(
                    name=TUNE_FOLDER,
                    storage_path=str(folder),
                    verbose=0,
                    callbacks=[_watching(stop.check, tell, metric, trials)],
                ),
            )
            found = tuner.fit()
    except Interrupted as stopped:
        signal.raise_signal(stopped.signum)  # to whom it belongs, as of a run
        raise
    return _result(found, folder, [r.key for r in ranges], metric, mode)


def _check(ranges: Sequence[Range], job: Job, *, search: str, mode: str, engine: str) -> None:
    """Refuse what no trial could run with, before any does."""
    for option, value, allowed in (("--search", search, SEARCHES), ("--mode", mode, ("max", "min"))):
        if value not in allowed:
            raise BadInput(option, value, f"allowed: {', '.join(allowed)}")
    if engine not in functions.ENGINES:
        raise BadInput("engine", engine, f"allowed: {', '.join(functions.ENGINES)}")
    for name in ("optuna",) if search == "optuna" else ():
        if find_spec(name) is None:
            raise BadInput("--search", name, "it is not installed: pip install 'qdsim[tune]'")
    if not ranges:
        raise BadInput("--over", None, EXAMPLE)
    keys = [r.key for r in ranges]
    for r in ranges:
        if keys.count(r.key) > 1:
            raise BadInput("--over", r.key, "each key may be given once")
        if r.key.partition(".")[0] in FIXED:
            raise BadInput("--over", r.key, f"a search varies none of {', '.join(FIXED)}")
        if r.key in job.sweep:
            raise BadInput("--over", r.key, "the job sweeps it already: give it one value, or take it out of sweep")
        for value in r.ends():
            functions.job_of(job, set={r.key: value})


def _trial(
    config: dict[str, Any],
    *,
    values: dict[str, Any],
    folder: StoragePath,
    trained_in: StoragePath,
    engine: str,
    metric: Metric,
) -> None:
    """Run one trial, in a process of Ray Tune's."""
    from ray import tune as ray_tune

    done = functions.run(values, set=config, out=str(folder), engine=engine, trained_in=str(trained_in), progress=False)
    ray_tune.report({"metric": metric.value(done.stages), "run": done.path.name})


def _searcher(search: str, ranges: Sequence[Range], mode: str, concurrent: int, seed: int) -> Any:
    if search == "optuna":
        import optuna
        from ray.tune.search import ConcurrencyLimiter
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        space = {r.key: r.of_tune() for r in ranges}
        return ConcurrencyLimiter(OptunaSearch(space, metric="metric", mode=mode, seed=seed), concurrent)
    from ray.tune.search.basic_variant import BasicVariantGenerator

    return BasicVariantGenerator(max_concurrent=concurrent, random_state=seed)


def _watching(check: Callable[[], None], tell: Callable[[str], None] | None, metric: str, total: int) -> Any:
    """Return what tells a line for each trial that has ended, and may raise between the steps of a search."""
    from ray import tune as ray_tune

    class Watching(ray_tune.Callback):
        ended = 0

        def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
            check()

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            self._say(trial, f"{metric} = {trial.last_result.get('metric', float('nan')):.6g}")

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            self._say(trial, "failed")  # why, Ray Tune knows when all have ended

        def _say(self, trial: Any, said: str) -> None:
            self.ended += 1
            if tell is not None:
                tell(f"trial {self.ended} of {total}: {_shown(trial.config)}: {said}")

    return Watching()


def _shown(config: Mapping[str, Any]) -> str:
    return " ".join(
        f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}" for key, value in config.items()
    )


def _why(error: BaseException | None) -> str:
    """Return the line that the run ended with: Ray wraps it."""
    cause = getattr(error, "cause", None) or error
    return str(cause).splitlines()[-1] if str(cause) else type(cause).__name__


def _result(found: Any, folder: StoragePath, keys: Sequence[str], metric: str, mode: str) -> Search:
    import pandas as pd

    rows = []
    for result in found:
        measured = result.metrics or {}
        row = {key: (result.config or {}).get(key) for key in keys}
        why = _why(result.error) if result.error is not None else ""
        rows.append({**row, metric: measured.get("metric"), "run": measured.get("run", ""), "error": why})
    frame = pd.DataFrame(rows, columns=[*keys, metric, "run", "error"])
    frame = frame.sort_values(metric, ascending=mode == "min", na_position="last").reset_index(drop=True)
    storage.write(folder / "trials.csv", frame.to_csv(index=False).encode())
    if frame[metric].isna().all():
        raise QdsimError(f"all {len(frame)} trials failed, the first with: {frame.iloc[0]['error']}; see {folder}")
    first = frame.iloc[0]
    best = {key: first[key].item() if hasattr(first[key], "item") else first[key] for key in keys}
    return Search(folder, metric, frame, best)
