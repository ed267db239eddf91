"""Trained states that later runs reuse: ``<out>/.trained/<hash>``.

Training depends on seed, data, partition, model and training fields, with the synthetic fields where any method
distils: their hash names the state. Another run, method or point of a sweep that comes to the same hash takes the
model, the history, the clients' synthetic sets and the rows of the tables from there. Fine-tuning is a state of its
own, so a sweep over F trains once.

A state is there when its ``state.json`` is, which is written last. Two runs that store the same state at the same time
write the same files, clocks aside. They are numpy arrays, Parquet and JSON; reading them executes nothing.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from qdsim.algorithms.history import History
from qdsim.algorithms.phase import Phase
from qdsim.algorithms.server import MEAN
from qdsim.errors import BadInput
from qdsim.experiment.plan import Plan, Task
from qdsim.federation.executor import Executor
from qdsim.models import params as P
from qdsim.models.model import Model, check_params
from qdsim.models.params import Params
from qdsim.store import arrays, run_directory, storage, tables
from qdsim.store.storage import StoragePath

VERSION = 3
"""Of the algorithms that training consists of: another number, another hash."""
FOLDER = ".trained"
FIX = "delete the folder under .trained to train again"
Rows = dict[str, list[dict[str, Any]]]
"""Rows of the training phases, by table."""


@dataclass(frozen=True)
class Trained:
    """What training leaves at the server; the synthetic sets stay with their owners."""

    params: Params
    history: History
    rows: Rows


def description(plan: Plan, training: Task, phases: list[Phase], device: str) -> dict[str, Any]:
    """Return all that the state after these phases depends on."""
    point, federation = training.point, training.federation
    cluster = point.job.cluster
    synthetic = asdict(point.hyper.synthetic) if point.distils else None
    if synthetic is not None:
        del synthetic["gallery"]
    if synthetic is not None and not any(phase.name == "finetune" for phase in phases):
        synthetic["finetune"] = 0
    train = asdict(point.hyper.train)
    if not train["proximal"]:
        del train["proximal"]
    return {
        "version": VERSION,
        "seed": federation.seed,
        "data": plan.data_sha256,
        "partition": federation.partition.sha256,
        "model": point.model.describe(),
        "train": train,
        "synthetic": synthetic,
        "device": device,
        "threads": cluster.threads,
        "micro_batch": cluster.micro_batch,
        # named where they are not what they were before there was a choice
        **({"precision": cluster.precision} if cluster.precision != "float32" else {}),
        **({"compile": True} if cluster.compile else {}),
        **({"winograd": cluster.winograd} if cluster.winograd != "matching" else {}),
        **({"server": asdict(point.hyper.server)} if point.hyper.server != MEAN else {}),
    }


def check_same_training(path: StoragePath, described: dict[str, Any]) -> None:
    """Refuse to resume with a training of other bits: what was served before started from another model.

    ``path`` holds what the training of this run was described as, and is written the first time.
    """
    now = json.loads(json.dumps(described))
    if path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            differing = [f"{k} (then {before.get(k)!r}, now {now[k]!r})" for k in now if before.get(k) != now[k]]
        except (OSError, ValueError, AttributeError) as error:
            raise arrays.damaged(path, error, run_directory.START_ANEW) from None
        if differing:
            why = f"its training had other settings: {', '.join(differing)}; {run_directory.START_ANEW}"
            raise BadInput("--resume", str(path.parent.parent), why)
    storage.write(path, json.dumps(now, indent=2, sort_keys=True).encode())


class TrainedStore:
    """The states under one output directory."""

    def __init__(self, out: StoragePath):
        self._folder = out / FOLDER

    def path(self, described: dict[str, Any]) -> StoragePath:
        """Return where the state so described lies, or would."""
        text = json.dumps(described, sort_keys=True)
        return self._folder / hashlib.sha256(text.encode()).hexdigest()[:32]

    def load(self, described: dict[str, Any], model: Model, executor: Executor, clients: int) -> Trained | None:
        """Return the state if it is there and every node can access it; the owners read their clients' sets."""
        path = self.path(described)
        if not (path / "state.json").exists() or not all(executor.broadcast("can_access", path)):
            return None
        try:
            if json.loads((path / "state.json").read_text(encoding="utf-8")) != json.loads(json.dumps(described)):
                raise ValueError("state.json describes another training")
            params = P.from_numpy(arrays.read(path / "params.npz", FIX))
            check_params(model, params, path / "params.npz", FIX)
            history = History.from_arrays(arrays.read(path / "history.npz", FIX))
            stored = storage.inside(path / "tables", "[!.]*.parquet")
            rows = {file.stem: run_directory.read_part(file, file.stem).to_pylist() for file in stored}
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            why = f"the trained state there cannot be read ({str(error).splitlines()[0]}); {FIX}"
            raise BadInput("--out", str(path), why) from None
        executor.states.freeze(path / "clients")
        executor.broadcast("load_states", executor.states.files(range(clients)), FIX)
        return Trained(params, history, rows)

    def save(self, described: dict[str, Any], trained: Trained, executor: Executor, clients: int) -> bool:
        """Write the state; False where the owners' files are not here, on storage that nodes do not share."""
        path = self.path(described)
        if (path / "state.json").exists():
            return True
        for folder in ("tables", "clients"):
            (path / folder).mkdir(parents=True, exist_ok=True)
        executor.broadcast("save_states", path / "clients")
        if described["synthetic"] and len(storage.inside(path / "clients", "[!.]*.npz")) < clients:
            storage.remove(path)
            return False
        arrays.write(path / "params.npz", P.to_numpy(trained.params))
        arrays.write(path / "history.npz", trained.history.to_arrays())
        for table, rows in trained.rows.items():
            data = pa.Table.from_pylist(rows, schema=tables.schema(table, ""))
            with storage.writing(path / "tables" / f"{table}.parquet") as file:
                pq.write_table(data, file, compression="zstd", write_page_checksum=True)
        storage.write(path / "state.json", json.dumps(described, indent=2, sort_keys=True).encode())
        return True
