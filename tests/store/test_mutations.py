"""Job files, run directories and data files that something happened to: taken, or refused in one line. Never worse."""

import json
import random
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qdsim.data import datasets
from qdsim.errors import BadInput
from qdsim.experiment import config, plan, sharing
from tests import mutate
from tests.conftest import PROJECT

DIGITS = datasets.load("digits", "")
QUICKSTART = (PROJECT / "jobs" / "quickstart.toml").read_bytes()


def examples(count: int) -> settings:
    """Return settings for so many examples, the same in every test run: a failure is one for everybody."""
    checks = list(HealthCheck)
    return settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=checks)


NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.integers(-3, 300), st.floats(), st.floats(0, 2))
WORDS = st.one_of(
    st.text(max_size=8), st.sampled_from(["auto", "none", "random", "class", "client", "quickdrop", "s2u"])
)
VALUES = st.recursive(
    st.one_of(NUMBERS, WORDS, st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(min_size=1, max_size=6), inner)),
    max_leaves=4,
)
SECTIONS = {name: field.annotation for name, field in config.Job.model_fields.items() if name not in ("sweep", "data")}
KEYS = [
    key
    for name, kind in SECTIONS.items()
    for key in ([f"{name}.{inner}" for inner in kind.model_fields] if hasattr(kind, "model_fields") else [name])
]


def as_toml(value) -> str:
    """Write a value as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {as_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return json.dumps(value) if isinstance(value, str | bool) else repr(value)


def one_line(error: BadInput, named: str = "") -> None:
    """Hold an error to what a user sees of it; it names what the user has to look at."""
    assert named in str(error)
    assert error.exit_code == 2
    assert "\n" not in str(error), str(error)
    assert len(str(error)) < 2000


def try_job(path) -> bool:
    """Do what ``qdsim run`` does before anything starts; tell whether the job was taken."""
    try:
        job = config.load(path)
        if job.data.dataset == "digits":
            list(sharing.computed(plan.build_plan(job, DIGITS)))
        return True
    except BadInput as error:
        one_line(error)
        return False


@examples(60)
@given(draws=st.randoms(use_true_random=False))
def test_job_files_with_bytes_changed(tmp_path_factory, draws):
    """Bytes of the quickstart are overwritten, cut out or doubled: TOML, UTF-8 or the checks notice, or it is valid."""
    path = tmp_path_factory.getbasetemp() / "bytes.toml"
    path.write_bytes(mutated(QUICKSTART, draws))
    try_job(path)


@examples(140)
@given(key=st.sampled_from(KEYS), value=VALUES)
def test_job_files_with_values_changed(tmp_path_factory, key, value):
    """Any key of the quickstart set to any value of any type."""
    content = tomllib.loads(QUICKSTART.decode())
    config._assign(content, key, value)
    path = tmp_path_factory.getbasetemp() / "values.toml"
    path.write_text("\n".join(f"{k} = {as_toml(v)}" for k, v in content.items()), encoding="utf-8")
    try_job(path)


def mutated(content: bytes, draws: random.Random) -> bytes:
    """Return the content with one accident: bytes overwritten, cut out, doubled, cut off at the end, or all gone."""
    if not content:
        return bytes(draws.randrange(256) for _ in range(8))
    at = draws.randrange(len(content))
    length = min(draws.choice([1, 2, 16, 4096]), len(content) - at)
    piece = content[at : at + length]
    kind = draws.choice(["overwrite", "flip", "cut", "double", "truncate", "empty"])
    if kind == "overwrite":
        return content[:at] + bytes(draws.randrange(256) for _ in range(length)) + content[at + length :]
    if kind == "flip":
        return content[:at] + bytes([content[at] ^ (1 << draws.randrange(8))]) + content[at + 1 :]
    if kind == "double":
        return content[: at + length] + piece + content[at + length :]
    return {"cut": content[:at] + content[at + length :], "truncate": content[:at], "empty": b""}[kind]


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Finished runs, and runs that were stopped in training and while they retrained."""
    with mutate.tables_joined_early():
        yield mutate.Stock.make(tmp_path_factory.mktemp("stock"), commits=(1, 5))


@pytest.mark.parametrize("mutation", range(len(mutate.MUTATIONS)), ids=lambda i: mutate.MUTATIONS[i].__name__)
def test_files_of_runs_that_something_happened_to(tmp_path, stock, mutation):
    """Three files of each kind of accident, the same in every test run: named in one line, or harmless.

    ``python -m tests.mutate`` does the same hundreds of times.
    """
    draws = random.Random(mutation)
    for name in stock.names():
        told, outcome = mutate.strike(stock, name, tmp_path / "work", draws, mutation)
        assert outcome.verdict != "silent", f"{told}: {outcome.said}"


def write_idx(path, array):
    """Write an array in MNIST's format."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    path.write_bytes(head + array.astype(np.uint8).tobytes())


@examples(60)
@given(draws=st.randoms(use_true_random=False))
def test_data_files_with_bytes_changed(tmp_path_factory, draws):
    """Files in the formats of MNIST and SVHN, one of them changed: refused, or read as images with labels 0 to 9."""
    from scipy.io import savemat

    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    kind = draws.choice(["mnist", "svhn"])
    for split, count in (("train", 20), ("t10k", 10), ("test", 10)):
        if kind == "mnist" and split != "test":
            (root / "MNIST" / "raw").mkdir(parents=True, exist_ok=True)
            write_idx(root / "MNIST" / "raw" / f"{split}-images-idx3-ubyte", rng.integers(0, 256, (count, 28, 28)))
            write_idx(root / "MNIST" / "raw" / f"{split}-labels-idx1-ubyte", np.arange(count) % 10)
        if kind == "svhn" and split != "t10k":
            images = rng.integers(0, 256, (32, 32, 3, count), dtype=np.uint8)
            savemat(root / f"{split}_32x32.mat", {"X": images, "y": np.arange(1, count + 1)[:, None] % 10 + 1})
    victim = draws.choice(sorted(path for path in root.rglob("*") if path.is_file()))
    victim.write_bytes(mutated(victim.read_bytes(), draws))
    try:
        found = datasets.load(kind, str(root), verify=False)
    except BadInput as error:
        one_line(error)
        return
    for images, labels in ((found.train_images, found.train_labels), (found.test_images, found.test_labels)):
        assert len(images) == len(labels)
        assert images.dtype == np.uint8
        assert images.ndim == 4
        assert 0 <= labels.min() <= labels.max() <= 9


COMMANDS = {
    "not TOML": (b"name = ", "is not TOML"),
    "another encoding": ("name = 'jöb'".encode("latin-1"), "cannot be read as UTF-8 text"),
    "UTF-16": ('name = "job"'.encode("utf-16"), "cannot be read as UTF-8 text"),
    "empty": (b"", "name"),
    "an unknown key": (QUICKSTART + b"\n[trian]\nrounds = 2\n", "did you mean train?"),
    "a wrong type": (QUICKSTART.replace(b"rounds = 20", b'rounds = "20"'), "train.rounds = '20'"),
    "out of range": (QUICKSTART.replace(b"rounds = 20", b"rounds = -1"), "train.rounds = -1"),
    "no such class": (QUICKSTART.replace(b"target = 9", b"target = 12"), "classes of digits are numbered 0 to 9"),
    "a request that leaves no data": (
        QUICKSTART.replace(b"clients = 10", b"clients = 1").replace(b'"class", target = 9', b'"client", target = 0'),
        "leaves no data",
    ),
    "clients without data": (QUICKSTART.replace(b"clients = 10", b"clients = 2000"), "partition.clients = 2000"),
    "no such data": (QUICKSTART.replace(b'"digits"', b'"svhn"'), "data.download=true"),
    "no such method": (QUICKSTART.replace(b'"retrain"', b'"magic"'), "'magic': no such method"),
}


ONE_AFTER_THE_OTHER = """
import contextlib, io, json, sys
from qdsim.cli import commands
ended = []
for line in json.loads(sys.argv[1]):
    sys.argv = line
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            commands.main()
            code = 0
        except SystemExit as end:
            code = end.code
    ended.append([code, errors.getvalue()])
print(json.dumps(ended))
"""


@pytest.mark.slow
def test_a_dozen_wrong_jobs_as_a_user_would_run_them(tmp_path):
    """Exit code 2, one line on the error stream, no traceback, no run directory.

    Each is a command line of its own; the interpreter, which takes seconds to import torch, is one for all.
    """
    jobs = []
    for number, (content, _) in enumerate(COMMANDS.values()):
        jobs.append(tmp_path / f"{number}.toml")
        jobs[-1].write_bytes(content)
    asked = ["--out", str(tmp_path / "runs"), "--set", f"data.root={tmp_path}"]
    lines = [["qdsim", "run", str(job), *asked] for job in jobs]
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_THE_OTHER, json.dumps(lines)], capture_output=True, text=True, timeout=120
    )
    ended = json.loads(done.stdout.splitlines()[-1])
    assert len(ended) == len(COMMANDS)
    for (name, (_, said)), (code, errors) in zip(COMMANDS.items(), ended, strict=True):
        assert code == 2, (name, errors)
        assert said in errors, (name, errors)
        assert len(errors.strip().splitlines()) == 1, (name, errors)
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "runs").exists()
