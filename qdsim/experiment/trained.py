"""Trained states that later runs reuse: ``<out>/.trained/<hash>``.

Training depends on seed, data, partition, model and training fields, with the synthetic fields where any method
distils: their hash names the state. Another run, method or point of a sweep that comes to the same hash takes the
model, the history, the clients' synthetic sets and the rows of the tables from there. Fine-tuning is a state of its
own, so a sweep over F trains once.

A state is there when its ``state.json`` is, which is written last. Two runs that store the same state at the same time
write the same files, clocks aside; trials of a search take turns instead. The files are numpy arrays, Parquet and JSON;
reading them executes nothing.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from qdsim.algorithms.history import History
from qdsim.algorithms.phase import Phase
from qdsim.algorithms.server import MEAN
from qdsim.errors import BadInput
from qdsim.experiment.plan import Plan, Task
from qdsim.federation.client_states import StateFolder, trained_file
from qdsim.federation.executor import Executor
from qdsim.models import params as P
from qdsim.models.device import are_gpus, join_devices
from qdsim.models.model import Model, check_params
from qdsim.models.params import Params
from qdsim.store import arrays, completeness, lock, run_directory, storage, tables
from qdsim.store.arrays import ArrayFile
from qdsim.store.storage import StoragePath

VERSION = 3
"""Of the algorithms that training consists of: another number, another hash."""
FORMAT = 2
"""Of the files of a state. Since 2 each says inside which training it is of."""
FOLDER = ".trained"
TURNS = "turns"
"""Inside it: whose turn it is to train what."""
POLL_S = 0.2
TABLES = ("rounds", "stages", "clients", "classes")
"""That a training writes rows of."""
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
        **({"compile": True} if cluster.compile and not are_gpus(device) else {}),
        **({"winograd": cluster.winograd} if cluster.winograd != "matching" else {}),
        **({"server": asdict(point.hyper.server)} if point.hyper.server != MEAN else {}),
    }


def check_same_training(path: StoragePath, described: dict[str, Any], *, mixed_devices: bool = False) -> str:
    """Refuse to resume with a training of other bits: what was served before started from another model.

    ``path`` holds what the training of this run was described as, and is written the first time. Returns the device
    that the training is of: with ``mixed_devices`` all that it was done on, before and now.
    """
    now = json.loads(json.dumps(described))
    if path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            if mixed_devices:
                now["device"] = join_devices([str(before.get("device")), now["device"]])
                before["device"] = now["device"]
            differing = [f"{k} (then {before.get(k)!r}, now {now[k]!r})" for k in now if before.get(k) != now[k]]
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise arrays.damaged(path, error, run_directory.START_ANEW) from None
        if differing:
            allowed = ", or set cluster.mixed_devices to true" if now["device"] != before.get("device") else ""
            why = f"its training had other settings: {', '.join(differing)}; {run_directory.START_ANEW}{allowed}"
            raise BadInput("--resume", str(path.parent.parent), why)
    storage.write(path, json.dumps(now, indent=2, sort_keys=True).encode())
    return str(now["device"])


class TrainedStore:
    """The states under one output directory."""

    def __init__(self, out: StoragePath):
        self._folder = out / FOLDER

    def path(self, described: dict[str, Any]) -> StoragePath:
        """Return where the state so described lies, or would."""
        text = json.dumps(described, sort_keys=True)
        return self._folder / hashlib.sha256(text.encode()).hexdigest()[:32]

    @contextmanager
    def turn(self, described: dict[str, Any], say_waiting: Callable[[], None]) -> Iterator[None]:
        """Train alone inside the block: who comes to the same training meanwhile waits, then finds it stored.

        One that dies meanwhile gives its turn up, as a run its lock.
        """
        place = self._folder / TURNS / self.path(described).name
        place.mkdir(parents=True, exist_ok=True)
        with ExitStack() as owned:
            while True:
                try:
                    owned.enter_context(lock.held(place))
                    break
                except BadInput:  # it is another's
                    say_waiting()
                while lock.is_held(place):
                    time.sleep(POLL_S)
            yield

    def load(self, described: dict[str, Any], model: Model, executor: Executor, clients: int) -> Trained | None:
        """Return the state if it is there and every node can access it; the owners read their clients' sets."""
        path = self.path(described)
        if not (path / "state.json").exists() or not all(executor.broadcast("can_access", path)):
            return None
        try:
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
            if not isinstance(state, dict):
                raise ValueError("state.json holds no object")
            unnamed = state.pop("format", 1) == 1
            if state != json.loads(json.dumps(described)):
                raise ValueError("state.json describes another training")
            params = P.from_numpy(arrays.read(_file(path, "params", unnamed), FIX))
            check_params(model, params, path / "params.npz", FIX)
            history = History.from_arrays(arrays.read(_file(path, "history", unnamed), FIX))
            rows = _read_rows(path, unnamed)
            if not rows["rounds"] or P.sha256(params) != rows["rounds"][-1]["params_sha256"]:
                raise ValueError("params.npz is not the model that the last row of tables/rounds.parquet is of")
        except (OSError, ValueError, KeyError, AttributeError, RecursionError, pa.ArrowException) as error:
            why = f"the trained state there cannot be read ({run_directory.first_line(error)}); {FIX}"
            raise BadInput("--out", str(path), why) from None
        executor.states.freeze(_clients(path, unnamed))
        executor.broadcast("load_states", executor.states.files(range(clients)), FIX)
        return Trained(params, history, rows)

    def clients_folder(self, described: dict[str, Any]) -> StateFolder:
        """Return where the synthetic sets of the state so described lie."""
        return _clients(self.path(described))

    def save(self, described: dict[str, Any], trained: Trained, executor: Executor, clients: int) -> bool:
        """Write the state; False where the owners' files are not here, on storage that nodes do not share."""
        path = self.path(described)
        if (path / "state.json").exists():
            return True
        for name in ("tables", "clients"):
            (path / name).mkdir(parents=True, exist_ok=True)
        folder = self.clients_folder(described)
        executor.broadcast("save_states", folder)
        if described["synthetic"] and not all(trained_file(folder, i).path.exists() for i in range(clients)):
            storage.remove(path)
            return False
        arrays.write(_file(path, "params"), P.to_numpy(trained.params))
        arrays.write(_file(path, "history"), trained.history.to_arrays())
        for table, rows in trained.rows.items():
            data = pa.Table.from_pylist(rows, schema=tables.schema(table, path.name))
            with storage.writing(path / "tables" / f"{table}.parquet") as file:
                pq.write_table(data, file, compression="zstd", write_page_checksum=True)
        state = {**described, "format": FORMAT}
        storage.write(path / "state.json", json.dumps(state, indent=2, sort_keys=True).encode())
        return True


def _file(path: StoragePath, name: str, unnamed: bool = False) -> ArrayFile:
    return ArrayFile(path / f"{name}.npz", path.name, name, unnamed)


def _clients(path: StoragePath, unnamed: bool = False) -> StateFolder:
    return StateFolder(path / "clients", path.name, unnamed)


def _read_rows(path: StoragePath, unnamed: bool) -> Rows:
    """Return the rows of a stored training; raise where a table is missing, another training's or not whole."""
    found: dict[str, pa.Table] = {}
    for table in TABLES:
        found[table] = run_directory.read_part(path / "tables" / f"{table}.parquet", table)
        of = (found[table].schema.metadata or {}).get(b"qdsim.run_id", b"").decode()
        if of != ("" if unnamed else path.name):
            raise ValueError(f"tables/{table}.parquet is of another training")
    for said in completeness.faults({"state": "interrupted"}, found):
        raise ValueError(said)
    return {table: data.to_pylist() for table, data in found.items()}
