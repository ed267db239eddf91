"""qdsim: federated unlearning with QuickDrop, simulated on Ray.

    import qdsim
    run = qdsim.run("quickstart", set={"train.rounds": 5})
    run.rounds        # every table as a DataFrame

An experiment is a list of phases; a phase is rounds of ``client_step`` then ``server_step``; both are plain functions
on values. Ray only decides where ``client_step`` runs. A package imports only those above it:

    errors, plugins, ranges, seeds, clocks
    store/        where runs lie: paths and URIs, arrays in files, the lock, the run directory, its tables
    models/       networks as functions of their parameters; fast/: the ConvNet's derivatives, written out
    data/         data sets, who holds which sample, what a request takes away, what a client owns
    algorithms/   one method a file; the phases, the settings and the registry of methods
    federation/   one round: client hosts, the executor, the round loop, evaluation, membership inference
    experiment/   a job from its file to its rows: settings, plan, runner, commits, stored trainings
    planning/     does a job fit, where are its clients placed, how long will it take
    ray_engine/   clients as Ray actors, the driver, jobs on a cluster
    tracking/     the rows of the tables in TensorBoard, W&B, MLflow and Trackio
    api/          what ``import qdsim`` offers; one run from job to directory; what a person sees of it
    tuning/       a search over keys of a job, with Ray Tune
    bench/        what ``qdsim bench`` measures
    cli/          the commands

Importing it brings nothing else with it: what it offers is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qdsim.api.functions import export, load, plan, report, resume, run, verify
    from qdsim.api.run import Run
    from qdsim.errors import QdsimError
    from qdsim.experiment.config import Job
    from qdsim.tuning.search import tune

__version__ = "0.1.0"
__all__ = [
    "Job",
    "QdsimError",
    "Run",
    "__version__",
    "export",
    "load",
    "plan",
    "report",
    "resume",
    "run",
    "tune",
    "verify",
]

_PLACES = {
    "Job": "qdsim.experiment.config",
    "QdsimError": "qdsim.errors",
    "Run": "qdsim.api.run",
    **dict.fromkeys(("export", "load", "plan", "report", "resume", "run", "verify"), "qdsim.api.functions"),
    "tune": "qdsim.tuning.search",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'qdsim' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
