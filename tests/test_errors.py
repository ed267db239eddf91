"""Errors name what is wrong and travel between processes."""

import pickle
import tomllib

import pytest

from qdsim.errors import (
    BadInput,
    CannotPlace,
    CannotReach,
    ClientFailed,
    ClusterLost,
    Diverged,
    MissingData,
    OtherDevice,
    OutOfMemory,
    QdsimError,
    StorageFailed,
    TakenOver,
    UnusableGpu,
    as_toml,
)

EXAMPLES = [
    (QdsimError("broken"), 1, "broken"),
    (BadInput("train.rounds", -1, "must be positive"), 2, "train.rounds = -1: must be positive"),
    (
        MissingData("train.mat is not there", "data", "fetch it"),
        2,
        "data.root = 'data': train.mat is not there; fetch it",
    ),
    (
        CannotPlace("5 actors of 0.4 GPU", "2 GPUs", "lower it"),
        3,
        "the cluster cannot host this run: asked for 5 actors of 0.4 GPU, found 2 GPUs; lower it",
    ),
    (
        CannotReach("http://head:8265", "no answer", "make a tunnel"),
        3,
        "cannot reach the cluster at http://head:8265: no answer; make a tunnel",
    ),
    (
        ClusterLost("raylet", "it ended with -9", "resume"),
        3,
        "Ray on this machine has lost its raylet (it ended with -9); resume",
    ),
    (
        UnusableGpu("0", "no driver"),
        3,
        "the cluster cannot host this run: asked for GPU 0, found that torch cannot use it (no driver); mend that, or "
        "set cluster.cpu_fallback to true: clients then run on the CPU",
    ),
    (
        OtherDevice("A100", "V100", "node a"),
        3,
        "other device, other bits: asked for A100, on which the run began, found V100 on node node a; set "
        "cluster.mixed_devices to true to allow it, or resume where there is the former",
    ),
    (
        OutOfMemory(7, "train", 3, "node a", "2 GiB asked for", "set cluster.micro_batch lower"),
        3,
        "client 7 ran out of memory in train, round 3, on node a: 2 GiB asked for; set cluster.micro_batch lower",
    ),
    (
        ClientFailed(7, "train", 3, "node a", "out of memory"),
        4,
        "client 7 failed in train, round 3, on node a: out of memory",
    ),
    (
        StorageFailed("runs/x", "No space left on device", "free some"),
        3,
        "storage fails at runs/x: No space left on device; free some",
    ),
    (
        TakenOver("mnist_10-1", "process 7 on node b"),
        3,
        "mnist_10-1 has been taken over by process 7 on node b: nothing more is written from here",
    ),
    (Diverged("loss is infinite"), 4, "loss is infinite"),
]


@pytest.mark.parametrize(("error", "code", "text"), EXAMPLES, ids=lambda v: type(v).__name__)
def test_errors_survive_pickling_with_text_and_code(error, code, text):
    """A copy that went through another process says the same and exits the same."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error) == text
    assert copy.exit_code == code
    assert "\n" not in text
    assert vars(copy) == vars(error)


def test_every_error_class_has_an_example_here():
    """A new error class must be added to the examples above."""

    def below(cls):
        own = [sub for sub in cls.__subclasses__() if sub.__module__.startswith("qdsim")]  # Ray makes some as well
        return {cls}.union(*(below(sub) for sub in own))

    assert below(QdsimError) == {type(error) for error, _, _ in EXAMPLES}


def test_a_value_is_written_as_toml_reads_it():
    """Keys with dots in quotes, a backslash, both kinds of quotes, a line break, nested lists and tables."""
    value = {"sweep": {"train.lr": [0.1, 2]}, "a-b": "C:\\new", "c": ["it's", 'a "b"', "\n\x7f"], "d": {"e": True}}
    assert tomllib.loads(f"value = {as_toml(value)}")["value"] == value
    assert as_toml(value["sweep"]) == '{"train.lr" = [0.1, 2]}'
