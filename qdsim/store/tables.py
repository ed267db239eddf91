"""The result tables: one explicit, versioned schema each. Accuracies are fractions; ``_s`` is seconds.

Every row carries ``run_id, seed, cell, method, request, phase, round``. ``docs`` of a column say what a figure
means; they are stored in the Parquet schema as well.
"""

import pyarrow as pa

SCHEMA_VERSION = 3

_KEYS = [
    ("run_id", pa.string(), "the run directory's name"),
    ("seed", pa.int64(), "run seed"),
    ("cell", pa.string(), "point of a sweep, empty without one"),
    ("method", pa.string(), "`shared` for the training that all methods start from"),
    ("request", pa.string(), "`class:9`, `client:3`, in a sequence `2:class:8`; empty in training"),
    ("phase", pa.string(), "train, finetune, unlearn, recover or relearn"),
    ("round", pa.int64(), "counts from 1 within its phase; 0 where a row belongs to no round"),
]
_CLOCKS = [
    (
        "wall_s",
        pa.float64(),
        "from the choice of participants to the new global model, without what evaluation beside it has added",
    ),
    ("client_compute_s", pa.float64(), "sum of the clients' compute_s"),
    ("critical_path_s", pa.float64(), "largest compute_s of a round"),
    (
        "evaluation_s",
        pa.float64(),
        "time spent on accuracies, outside wall_s; beside the next round: the least that it takes on the actors",
    ),
    ("aggregation_s", pa.float64(), "time in the server step without waiting for clients"),
    ("wait_s", pa.float64(), "time the driver waited for clients"),
    (
        "busy_s",
        pa.float64(),
        "the least of it that the steps take on the actors and slots there are; the rest is moving",
    ),
    (
        "samples",
        pa.int64(),
        "samples that went into gradients with respect to the model, or into FU-MP's statistics",
    ),
    ("data_size", pa.int64(), "|Z|: distinct samples that the phase works on, over all clients"),
    ("gradients", pa.int64(), "mini-batch gradients with respect to the model on Z; matching not counted"),
    ("bytes_up", pa.int64(), "updates sent to the driver"),
    ("bytes_down", pa.int64(), "global model sent to participants"),
    ("participants_expected", pa.int64(), "clients chosen"),
    ("participants_received", pa.int64(), "updates in the average; a run stops rather than let them differ"),
]
_SCORES = [
    ("test_accuracy", pa.float64(), "on the whole test set"),
    ("forget_accuracy", pa.float64(), "F-Set: test samples of the class, or the forgotten client's own data"),
    ("retain_accuracy", pa.float64(), "R-Set: test samples of the remaining classes; client level: all of them"),
    ("forget_accuracy_train", pa.float64(), "on D_f, at the end of a phase"),
    ("retain_accuracy_train", pa.float64(), "on D without D_f, at the end of a phase"),
]

COLUMNS: dict[str, list[tuple[str, pa.DataType, str]]] = {
    "rounds": [
        *_KEYS,
        *_SCORES,
        (
            "start_loss",
            pa.float64(),
            "mean loss of the participants' first mini-batches: of the model that the round began with",
        ),
        *_CLOCKS,
        ("params_sha256", pa.string(), "hash of the global model's bits after the round"),
        ("reused", pa.bool_(), "copied from an earlier run's training"),
    ],
    "stages": [
        *_KEYS,
        ("rule", pa.string(), "what ended the phase: `rounds`, a fixed number of them, or the rule of convergence"),
        ("rounds_run", pa.int64(), "rounds of the phase"),
        ("rounds_most", pa.int64(), "rounds after which it would have ended at the latest"),
        ("converged_round", pa.int64(), "first round within 1 point of the last one's R-Set (training: test set)"),
        (
            "forget_accuracy_start",
            pa.float64(),
            "F-Set before the phase; retraining: of the model that it replaces",
        ),
        ("retain_accuracy_start", pa.float64(), "R-Set of that model"),
        *_SCORES,
        *_CLOCKS,
        ("storage_bytes", pa.int64(), "kept for unlearning, over all clients and the server"),
        ("storage_bytes_nominal", pa.int64(), "the same by the accounting of the method's paper"),
        ("reused", pa.bool_(), "copied from an earlier run's training"),
    ],
    "classes": [
        *_KEYS,
        ("class", pa.int64(), ""),
        ("accuracy", pa.float64(), "on the test samples of the class"),
        ("reused", pa.bool_(), "copied from an earlier run's training"),
    ],
    "clients": [
        *_KEYS,
        ("client_id", pa.int64(), ""),
        ("num_samples", pa.int64(), "|Z_i|"),
        ("loss", pa.float64(), "mean over the step's mini-batches"),
        ("compute_s", pa.float64(), "CPU time of the process, on a GPU device time"),
        ("matching_s", pa.float64(), "the part of it spent on synthetic gradients and the update of pixels"),
        ("step_s", pa.float64(), "wall-clock time of the step where it ran"),
        ("node_id", pa.string(), "Ray node"),
        ("gpu_id", pa.string(), "GPU that the actor is pinned to, empty without one"),
        ("peak_memory_bytes", pa.int64(), "of the process; on a GPU of its allocator"),
        ("reused", pa.bool_(), "copied from an earlier run's training"),
    ],
    "partitions": [
        *_KEYS,
        ("client_id", pa.int64(), ""),
        ("class", pa.int64(), ""),
        ("num_samples", pa.int64(), "|D_i^c|"),
        ("num_synthetic", pa.int64(), "|S_i^c|, 0 where no method of the run distils"),
    ],
    "membership": [
        *_KEYS,
        ("attack", pa.string(), "`balanced` or `literal`, see qdsim/federation/membership.py"),
        ("subset", pa.string(), "`forget` or `retain`: training samples of D_f, or of the rest"),
        ("member_rate", pa.float64(), "share of the subset that the attack takes for members"),
        ("auc", pa.float64(), "the subset against non-members of its kind"),
        (
            "tpr_at_1pct_fpr",
            pa.float64(),
            "share of the subset found when 1 % of the non-members are taken for members",
        ),
    ],
    "images": [
        *_KEYS,
        ("client_id", pa.int64(), ""),
        ("class", pa.int64(), ""),
        ("synthetic", pa.binary(), "PNG of an image of the client's synthetic set"),
        ("real", pa.binary(), "PNG of the real sample it began as; null where it began as noise"),
    ],
}
"""``membership`` is empty unless a job asks for an attack; its model has forgotten and not relearnt.
``images`` is empty unless ``synthetic.gallery`` asks for it."""


def schema(table: str, run_id: str) -> pa.Schema:
    """Return a table's schema with its version and the run in the metadata."""
    fields = [pa.field(name, kind, metadata={"about": about}) for name, kind, about in COLUMNS[table]]
    return pa.schema(fields, metadata={"qdsim.schema_version": str(SCHEMA_VERSION), "qdsim.run_id": run_id})
