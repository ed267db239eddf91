"""The result tables: one explicit, versioned schema each. Accuracies are fractions; ``_s`` is seconds.

A column is declared here and nowhere else: its name, its type, what it means (stored in the Parquet schema as well, and
on the page of the schema, ``analysis/README.md``), and whether a phase's row is the sum of its rounds' rows in it.
Every row carries :data:`KEYS`.
"""

from typing import NamedTuple

import pyarrow as pa

SCHEMA_VERSION = 4
RENAMED_COLUMNS = {"stages": {"rule": "stop_reason", "rounds_most": "max_rounds"}}
"""Of each table the columns that had other names before version 4, with those that they have now."""
RENAMED_ATTACKS = {"balanced": "loss_threshold", "literal": "entropy_svm"}
"""The attacks of membership inference that had other names before version 4, in jobs, too."""
RENAMED_VALUES = {"membership": {"attack": RENAMED_ATTACKS}}
"""Of each table and column the values that had other names before version 4."""


class Column(NamedTuple):
    """One column of a table."""

    name: str
    type: pa.DataType
    about: str
    """What a value means, in a line."""
    summed: bool = False
    """A phase's row in ``stages`` has the sum over the rounds of the phase."""


KEYS = (
    Column("run_id", pa.string(), "the run directory's name"),
    Column("seed", pa.int64(), "seed of the federation: partition, model and every random draw follow from it"),
    Column("cell", pa.string(), "point of the sweep, for example `synthetic.scale=10`; empty without a sweep"),
    Column("method", pa.string(), "`shared` in the training that all methods start from"),
    Column("request", pa.string(), "`class:9` or `client:3`, in a sequence `2:class:8`; empty in training"),
    Column("phase", pa.string(), "train, finetune, unlearn, recover or relearn"),
    Column("round", pa.int64(), "counts from 1 within its phase; 0 where a row belongs to no round"),
)
"""What every row carries: whose it is."""
PHASES = ("train", "finetune", "unlearn", "recover", "relearn")
"""In the order in which they run."""
SCORES = (
    Column("test_accuracy", pa.float64(), "on the whole test set"),
    Column("forget_accuracy", pa.float64(), "F-Set: test samples of the class, or the forgotten client's own data"),
    Column(
        "retain_accuracy", pa.float64(), "R-Set: test samples of the other classes; for a client request all of them"
    ),
    Column(
        "forget_accuracy_train", pa.float64(), "on D_f, the training samples to forget; only after a phase's last round"
    ),
    Column("retain_accuracy_train", pa.float64(), "on D without D_f; only after a phase's last round"),
)
"""Accuracies of the global model after a round; a phase's row has those of its last round."""
_COSTS = (
    Column(
        "wall_s",
        pa.float64(),
        "from the choice of participants to the new global model; evaluation that ran meanwhile is taken off",
        summed=True,
    ),
    Column("client_compute_s", pa.float64(), "sum of the clients' compute_s", summed=True),
    Column("critical_path_s", pa.float64(), "largest compute_s of a client in the round", summed=True),
    Column(
        "evaluation_s",
        pa.float64(),
        "time spent on accuracies, not part of wall_s; beside the next round: a lower bound on these workers",
        summed=True,
    ),
    Column("aggregation_s", pa.float64(), "time in the server step, without waiting for clients", summed=True),
    Column("wait_s", pa.float64(), "time the driver waited for clients", summed=True),
    Column("busy_s", pa.float64(), "lower bound of wait_s on these workers; the rest is transfer", summed=True),
    Column(
        "samples",
        pa.int64(),
        "samples that went into gradients of the model, or into FU-MP's statistics; repeated ones count again",
        summed=True,
    ),
    Column("data_size", pa.int64(), "|Z|: distinct samples that the phase works on, over all clients"),
    Column(
        "gradients", pa.int64(), "mini-batch gradients of the model on Z; those of matching not counted", summed=True
    ),
    Column("bytes_up", pa.int64(), "size of the updates that clients sent to the driver", summed=True),
    Column("bytes_down", pa.int64(), "size of the global models that participants were sent", summed=True),
    Column("participants_expected", pa.int64(), "clients chosen", summed=True),
    Column(
        "participants_received",
        pa.int64(),
        "clients whose updates are in the average; a run stops rather than leave one out",
        summed=True,
    ),
)
_REUSED = Column(
    "reused",
    pa.bool_(),
    "true where it was not run but copied: a training of an earlier run, a baseline of an earlier cell",
)
_CLIENT = Column("client_id", pa.int64(), "number of the client, from 0")
_CLASS = Column("class", pa.int64(), "number of the class, from 0")

COLUMNS: dict[str, tuple[Column, ...]] = {
    "rounds": (
        *KEYS,
        *SCORES,
        Column(
            "start_loss",
            pa.float64(),
            "mean loss of the participants' first mini-batches: of the model that the round began with",
        ),
        *_COSTS,
        Column("params_sha256", pa.string(), "hash of the global model's bits after the round"),
        _REUSED,
    ),
    "stages": (
        *KEYS,
        Column(
            "stop_reason",
            pa.string(),
            "`rounds`: it ran all of them; `converged: RULE`: by this rule; `rounds, not converged: RULE`: not by it",
        ),
        Column("rounds_run", pa.int64(), "rounds that the phase took"),
        Column("max_rounds", pa.int64(), "rounds after which it would have ended at the latest"),
        Column(
            "converged_round",
            pa.int64(),
            "first round whose R-Set accuracy (training: test accuracy) is within 1 point of the last round's",
        ),
        Column(
            "forget_accuracy_start",
            pa.float64(),
            "F-Set accuracy before the phase; of retraining: of the model that it replaces",
        ),
        Column("retain_accuracy_start", pa.float64(), "R-Set accuracy of the same model"),
        *SCORES,
        *_COSTS,
        Column("storage_bytes", pa.int64(), "what is kept for unlearning, over all clients and the server"),
        Column("storage_bytes_nominal", pa.int64(), "the same as the method's own paper counts it"),
        _REUSED,
    ),
    "classes": (
        *KEYS,
        _CLASS,
        Column("accuracy", pa.float64(), "on the test samples of the class"),
        _REUSED,
    ),
    "clients": (
        *KEYS,
        _CLIENT,
        Column("num_samples", pa.int64(), "|Z_i|: samples of the client that the phase works on, its weight"),
        Column("loss", pa.float64(), "mean over the step's mini-batches"),
        Column(
            "compute_s",
            pa.float64(),
            "CPU time of the step; on a GPU from its start there to its end, with the turns of others that share it",
        ),
        Column(
            "matching_s",
            pa.float64(),
            "part of compute_s: gradients on synthetic samples and the update of their pixels",
        ),
        Column("step_s", pa.float64(), "wall-clock time of the step where it ran"),
        Column("node_id", pa.string(), "Ray node"),
        Column("gpu_id", pa.string(), "GPU that the actor is pinned to, empty without one"),
        Column(
            "peak_memory_bytes", pa.int64(), "peak of the process so far; on a GPU its allocator's peak in the step"
        ),
        _REUSED,
    ),
    "partitions": (
        *KEYS,
        _CLIENT,
        _CLASS,
        Column("num_samples", pa.int64(), "|D_i^c|: training samples of the class that the client owns"),
        Column("num_synthetic", pa.int64(), "|S_i^c|: its synthetic samples; 0 where no method of the run distils"),
    ),
    "membership": (
        *KEYS,
        Column("attack", pa.string(), "`loss_threshold` or `entropy_svm`, see qdsim/federation/attacks.py"),
        Column("subset", pa.string(), "`forget` or `retain`: training samples of D_f, or of the rest"),
        Column("member_rate", pa.float64(), "share of the subset that the attack takes for members"),
        Column("auc", pa.float64(), "area under the ROC curve, of the subset against non-members of its kind"),
        Column(
            "tpr_at_1pct_fpr",
            pa.float64(),
            "share of the subset found when 1 % of the non-members are taken for members",
        ),
    ),
    "images": (
        *KEYS,
        _CLIENT,
        _CLASS,
        Column("synthetic", pa.binary(), "PNG of an image of the client's synthetic set"),
        Column("real", pa.binary(), "PNG of the real sample it began as; null where it began as noise"),
    ),
}
"""``membership`` is empty unless a job asks for an attack; its model has forgotten and not relearned.
``images`` is empty unless ``synthetic.gallery`` asks for it."""


def names(table: str) -> list[str]:
    """Return the names of a table's columns, in order."""
    return [column.name for column in COLUMNS[table]]


def schema(table: str, run_id: str) -> pa.Schema:
    """Return a table's schema with its version and the run in the metadata."""
    fields = [pa.field(column.name, column.type, metadata={"about": column.about}) for column in COLUMNS[table]]
    return pa.schema(fields, metadata={"qdsim.schema_version": str(SCHEMA_VERSION), "qdsim.run_id": run_id})


def version(data: pa.Table) -> int:
    """Return the schema version that a part was written with; 0 where it does not say, as somebody else's table."""
    return int((data.schema.metadata or {}).get(b"qdsim.schema_version", b"0"))


def upgrade(table: str, data: pa.Table) -> pa.Table:
    """Return a part of an older version in today's words; its metadata still says which version that is."""
    if not 0 < version(data) < SCHEMA_VERSION:
        return data
    renamed, metadata = RENAMED_COLUMNS.get(table, {}), data.schema.metadata
    data = data.rename_columns([renamed.get(name, name) for name in data.column_names])
    data = data.replace_schema_metadata(metadata)  # which renaming drops
    for name, words in RENAMED_VALUES.get(table, {}).items():
        if name in data.column_names:
            place = data.column_names.index(name)
            values = [words.get(value, value) for value in data[name].to_pylist()]
            data = data.set_column(place, data.schema.field(place), pa.array(values, data[name].type))
    return data
