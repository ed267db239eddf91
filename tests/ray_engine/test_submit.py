"""What ``qdsim submit`` sends, and what it refuses before it sends anything."""

import os
import subprocess
import sys

import pytest

from qdsim.ray_engine import environment, jobs
from tests.conftest import PROJECT

NOBODY = "http://127.0.0.1:9"  # the discard port: nothing listens there


def qdsim(*arguments):
    command = [sys.executable, "-m", "qdsim", *map(str, arguments)]
    env = {**os.environ, "no_proxy": "*", "RAY_ADDRESS": "auto"}
    return subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=100)


def test_a_job_file_and_the_package_are_sent_and_nothing_else(tmp_path):
    """No data, runs, caches or history, whatever lies beside them; a job's name may hold anything."""
    job = tmp_path / "-my job's.toml"
    job.write_text('name = "mine"\n')
    (tmp_path / "into").mkdir()
    name, files, size = jobs.pack(job, tmp_path / "into")
    sent = {str(path.relative_to(tmp_path / "into")) for path in (tmp_path / "into").rglob("*") if path.is_file()}
    sources = {str(path.relative_to(PROJECT)) for path in (PROJECT / "qdsim").rglob("*.py")} | {"qdsim/py.typed"}
    assert name == "jobs/-my job's.toml"
    assert sent == sources | {name}
    assert files == len(sent)
    assert 100_000 < size < 2_000_000


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--set", "train.rouns=3", "--address", NOBODY], 2, "train.rouns = 3: unknown key"),
        (["--address", "auto"], 2, "--address = 'auto': the URL of the cluster's dashboard"),
        (["--address", NOBODY, "--out", "s3://me:secret@b/runs"], 2, "storage = 's3://b/runs': a URI ends up in logs"),
        (["--address", NOBODY], 3, f"cannot reach the cluster at {NOBODY}: no answer ([Errno 111] Connection refused)"),
    ],
    ids=["key", "address", "secret", "nobody there"],
)
def test_what_cannot_be_sent_gets_one_line(arguments, code, said):
    """A user's mistake 2, a cluster out of reach 3; ``RAY_ADDRESS`` does not stand in for the address given."""
    done = qdsim("submit", "jobs/quickstart.toml", *arguments)
    assert done.returncode == code
    assert done.stderr.startswith(f"qdsim: {said}")
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize(("job", "code", "said"), [("quickstart", 3, "cannot reach"), ("quikstart", 2, "JOB = 'quik")])
def test_a_job_may_be_submitted_by_its_stem(job, code, said):
    """The stem of a job that comes with qdsim gets as far as the cluster; another is refused before."""
    done = qdsim("submit", job, "--address", NOBODY)
    assert done.returncode == code
    assert done.stderr.startswith(f"qdsim: {said}")


@pytest.mark.parametrize(
    ("mode", "name", "said"),
    [
        ("disabled", "RAY_AUTH_TOKEN", "'disabled' here, with the token from RAY_AUTH_TOKEN: set RAY_AUTH_MODE=token"),
        (
            "token",
            "RAY_AUTH_TOKEN",
            "'token' here, with the token from RAY_AUTH_TOKEN: copy the head's",
        ),
        (
            "token",
            "RAY_AUTH_TOKEN_PATH",
            "'token' here, with no token (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~",
        ),
    ],
)
def test_the_hint_says_where_a_token_was_found_and_what_to_set(monkeypatch, tmp_path, mode, name, said):
    """Never the token; a path that names no file holds none."""
    for other in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setenv(name, str(tmp_path / "secret"))
    hint = environment.how_to_authenticate()
    assert hint.startswith(f"RAY_AUTH_MODE is {said}")
    assert "secret" not in hint


def test_only_code_is_sent(tmp_path):
    """What else lies in the package's folder stays here: data, keys, notes, caches, hidden files."""
    for name in (
        "a.py",
        "jobs/b.toml",
        "py.typed",
        "secret.key",
        "data.npz",
        ".env.py",
        "__pycache__/a.py",
        "x/.h/c.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert [str(path) for path in jobs.code_in(tmp_path)] == ["a.py", "jobs/b.toml", "py.typed"]
