"""The trackers: each takes points of series and shows them in its own way. The packages are extras of qdsim.

None of them ever holds a point twice, however often a run is resumed or exported: what a tracker keeps in files is made
anew from the tables, what a server keeps is asked for first. Where these trackers send to is theirs to say, by the
environment variables that each documents.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from qdsim.store import run_directory, tables
from qdsim.tracking.series import Points, Series, by_series

PROJECT = "qdsim"
MLFLOW_BATCH = 500
"""Points in a request; a server takes 1000."""
MLFLOW_PARAMS = 100
"""Settings in a request: as many as a server takes."""


@dataclass(frozen=True)
class Target:
    """The run that is tracked."""

    run_id: str
    folder: Path
    """Where a tracker that writes files puts its own folder."""
    config: Mapping[str, Any]
    """The job, as its manifest has it."""

    def settings(self, series: Series) -> dict[str, Any]:
        """Return the job's keys with their values, and whose series it is."""
        named = {"cell": series.cell, "seed": series.seed, "method": series.method, "request": series.request}
        return run_directory.flat(self.config) | named | {"run_id": self.run_id}


class Tracker(Protocol):
    """What takes points."""

    @property
    def where(self) -> str:
        """A line that says where to look."""
        ...

    def log(self, points: Sequence[Points]) -> None:
        """Take points; those of one round may come in several calls."""
        ...

    def close(self) -> None:
        """Have everything sent or written."""
        ...


class TensorBoard:
    """Event files under ``<run>/tensorboard``, a folder for each series."""

    def __init__(self, target: Target):
        self._folder = target.folder / "tensorboard"
        self._series: Series | None = None
        self._writer: Any = None
        self.where = f"tensorboard --logdir {self._folder}"
        for path in self._folder.rglob("events.out.tfevents.*"):  # of an earlier attempt
            path.unlink()

    def log(self, points: Sequence[Points]) -> None:
        """Write values in double precision: a series equals the table's column."""
        for series, own in by_series(points).items():
            self._open(series)
            for point in own:
                for name, value in point.values.items():
                    self._writer.add_scalar(
                        name, value, point.round_number, point.time_s, new_style=True, double_precision=True
                    )
        if self._writer is not None:
            self._writer.flush()

    def _open(self, series: Series) -> None:
        if series == self._series:
            return
        from torch.utils.tensorboard import SummaryWriter

        self.close()  # hundreds of series would be as many open files and threads
        self._writer, self._series = SummaryWriter(str(self._folder / series.name)), series

    def close(self) -> None:
        """Have the last of it on disk."""
        if self._writer is not None:
            self._writer.close()
        self._writer, self._series = None, None


class Wandb:
    """Weights & Biases: a run for each series, grouped by the run's id; ``WANDB_MODE=offline`` keeps files alone."""

    def __init__(self, target: Target):
        import wandb

        self._target, self._wandb = target, wandb
        self._series: Series | None = None
        self._run: Any = None
        self._known: set[Series] = set()
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self.where = (
            f"group {target.run_id} of the project {project}; offline: wandb sync {target.folder}/wandb/*-run-*"
        )

    def log(self, points: Sequence[Points]) -> None:
        """Take points; W&B has one count of steps for a run, so each phase has its round as a metric, and as x axis."""
        for series, own in by_series(points).items():
            self._open(series)
            for point in own:
                if point.step >= self._begins:
                    self._run.log(point.values | {f"{point.phase}/round": point.round_number}, step=point.step)

    def _open(self, series: Series) -> None:
        if series == self._series:
            return
        self.close()
        run_id = hashlib.sha256(f"{self._target.run_id}/{series.name}".encode()).hexdigest()[:16]
        if series not in self._known:  # what an earlier attempt wrote offline is written anew
            for folder in (self._target.folder / "wandb").glob(f"offline-run-*-{run_id}"):
                shutil.rmtree(folder, ignore_errors=True)
        self._target.folder.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run_id,
            name=series.name,
            group=self._target.run_id,
            job_type=series.method,
            config=self._target.settings(series),
            dir=str(self._target.folder),
            resume="allow",
            reinit="create_new",
            settings=self._wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True),
        )
        self._begins = self._run.step if self._run.resumed else 0
        self._known.add(series)
        self._series = series
        for phase in tables.PHASES:
            self._run.define_metric(f"{phase}/round", hidden=True)
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/round")

    def close(self) -> None:
        """Have the series' rows sent."""
        if self._run is not None:
            self._run.finish()
        self._run, self._series = None, None


class Mlflow:
    """MLflow: a run for each series, below one with the run's id."""

    def __init__(self, target: Target):
        from mlflow import MlflowClient

        self._target, self._client = target, MlflowClient()
        self._runs: dict[Series, str] = {}
        self._logged: dict[Series, set[tuple[str, int]]] = {}
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        self._experiment = found.experiment_id if found else self._client.create_experiment(name)
        self._parent, _ = self._find("", target.run_id, {})
        self.where = f"run {target.run_id} of the experiment {name}, at {self._client.tracking_uri}"

    def log(self, points: Sequence[Points]) -> None:
        """Send points that are not there yet, each with its round as step."""
        from mlflow.entities import Metric

        for series, own in by_series(points).items():
            self._open(series)
            logged = self._logged[series]
            new = [
                Metric(name, value, round(point.time_s * 1000), point.round_number)
                for point in own
                for name, value in point.values.items()
                if (name, point.round_number) not in logged
            ]
            for i in range(0, len(new), MLFLOW_BATCH):
                self._client.log_batch(self._runs[series], metrics=new[i : i + MLFLOW_BATCH])
            logged |= {(metric.key, metric.step) for metric in new}

    def _open(self, series: Series) -> None:
        if series in self._runs:
            return
        from mlflow.entities import Param

        run_id, is_new = self._find(series.name, series.name, {"mlflow.parentRunId": self._parent})
        if is_new:
            settings = [Param(key, str(value)[:500]) for key, value in self._target.settings(series).items()]
            for i in range(0, len(settings), MLFLOW_PARAMS):
                self._client.log_batch(run_id, params=settings[i : i + MLFLOW_PARAMS])
        names = [] if is_new else [*self._client.get_run(run_id).data.metrics]
        self._logged[series] = {(name, m.step) for name in names for m in self._client.get_metric_history(run_id, name)}
        self._runs[series] = run_id

    def _find(self, series: str, name: str, tags: dict[str, str]) -> tuple[str, bool]:
        """Return MLflow's run of a series, made now where there is none, and whether it was."""
        tags = {"qdsim.run_id": self._target.run_id, "qdsim.series": series or "all"} | tags
        asked = " and ".join(f"tags.`{tag}` = '{tags[tag]}'" for tag in ("qdsim.run_id", "qdsim.series"))
        found = self._client.search_runs([self._experiment], asked, max_results=1)
        if found:
            return found[0].info.run_id, False
        made = self._client.create_run(self._experiment, tags=tags, run_name=name)
        return made.info.run_id, True

    def close(self) -> None:
        """Mark the runs as finished."""
        for run_id in (self._parent, *self._runs.values()):
            self._client.set_terminated(run_id)


class Trackio:
    """Trackio: a run for each series, grouped by the run's id."""

    def __init__(self, target: Target):
        import trackio

        self._target, self._trackio = target, trackio
        self._project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._series: Series | None = None
        self._run: Any = None
        self._known: set[Series] = set()
        self.where = f"trackio show --project {self._project}, group {target.run_id}"

    def log(self, points: Sequence[Points]) -> None:
        """Take points; Trackio has one count of steps for a run, so each phase has its round as a metric."""
        for series, own in by_series(points).items():
            self._open(series)
            for point in own:
                self._run.log(point.values | {f"{point.phase}/round": point.round_number}, step=point.step)

    def _open(self, series: Series) -> None:
        if series == self._series:
            return
        self.close()
        name = f"{self._target.run_id}/{series.name}"
        if series not in self._known:  # what an earlier attempt wrote is written anew
            with suppress(ValueError):  # no such project yet
                for run in [run for run in self._trackio.Api().runs(self._project) if run.name == name]:
                    run.delete()
        self._run = self._trackio.init(
            project=self._project,
            name=name,
            group=self._target.run_id,
            config=self._target.settings(series),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._known.add(series)
        self._series = series

    def close(self) -> None:
        """Have the series' rows written."""
        if self._run is not None:
            self._run.finish()
        self._run, self._series = None, None


TRACKERS: dict[str, Callable[[Target], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
}
"""By the names of the packages, which are those of the extras as well."""
