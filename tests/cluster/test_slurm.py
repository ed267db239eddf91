"""``cluster/slurm.sbatch``, run as Slurm would, with programs that stand in for Slurm's."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import runs
from tests.cluster import slurm_nodes
from tests.conftest import PROJECT

SCRIPT = PROJECT / "cluster" / "slurm.sbatch"
# a `ray symmetric-run` that starts nothing, and one that fails as the real one does when Ray does not start
WITHOUT_NODES = 'while [ "$1" != -- ]; do shift; done; shift; "$@"'
BROKEN = 'echo "Failed to start Ray" >&2; exit 0'
JOB = """
name = "tiny"
methods = ["quickdrop"]
requests = [{ kind = "class", target = 9 }]
membership = []
data = { dataset = "digits" }
partition = { clients = 2 }
model = { width = 4, depth = 2 }
train = { rounds = 1, steps = 1, batch_size = 16 }
unlearn = { steps = 1 }
recover = { rounds = 1, steps = 1 }
relearn = { rounds = 1, steps = 1 }
synthetic = { scale = 10 }
cluster = { gpus_per_client = 1.0, cpu_fallback = true }
seeds = [0]
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder with a short path, since Ray's sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="qd", ignore_cleanup_errors=True) as folder:
        slurm_nodes.install(Path(folder))
        yield Path(folder)


@pytest.fixture
def sbatch(shared: Path) -> Iterator[Start]:
    """Start the script on two nodes, with the programs given by name instead of the usual ones."""
    started = []

    def start(*args: str, restarts: int = 0, **programs: str) -> subprocess.Popen[str]:
        for name, body in programs.items():
            (shared / "bin" / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        slurm = {
            "SLURM_SUBMIT_DIR": str(shared),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node1,node2",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_CPUS_ON_NODE": "1",
            "SLURM_GPUS_ON_NODE": "1",
            "SLURM_RESTART_COUNT": str(restarts),
        }
        # what a user may have set: the script must not let it decide
        theirs = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "of somebody else", "RAY_ADDRESS": "192.0.2.1:6379"}
        ours = {
            "PATH": f"{shared / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(PROJECT),
            "RAY_TMPDIR": str(shared),
            "STAND_IN_LOG": str(slurm_nodes.log_of(shared)),
        }
        process = subprocess.Popen(
            ["bash", str(SCRIPT), *args],
            env={**os.environ, **slurm, **theirs, **ours},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            slurm_nodes.end([process.pid])
        process.communicate()


def test_it_is_a_script_that_bash_reads():
    """And its options to Slurm are whole nodes, one task on each, and a signal to itself before the time is up."""
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    options = {
        line.split()[1] for line in SCRIPT.read_text(encoding="utf-8").splitlines() if line.startswith("#SBATCH")
    }
    assert {"--exclusive", "--ntasks-per-node=1", "--requeue", "--open-mode=append"} <= options
    assert "--signal=B:USR1@120" in options


@pytest.mark.ray
def test_a_job_runs_on_the_nodes_that_slurm_gives(shared, sbatch):
    """Two real nodes that ask for a token, a client on each; the token is the owner's alone, and gone at the end."""
    (shared / "job.toml").write_text(JOB, encoding="utf-8")
    process = sbatch("job.toml")
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    said = {words[0]: words[1:] for words in slurm_nodes.said(shared)}
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=1"} <= set(said["srun"])
    options = said["ray"][: said["ray"].index("--")]
    assert options[:5] == ["symmetric-run", "--address", "node1:6379", "--min-nodes", "2"]
    assert {"--num-cpus=1", "--num-gpus=1", "--dashboard-host=127.0.0.1"} <= set(options)
    assert said["token"] == ["0o600", "0o700"]
    assert {"RAY_AUTH_MODE=token", "RAY_USAGE_STATS_ENABLED=0"} <= set(said["environment"])
    assert not [name for name in said["environment"] if name.startswith(("RAY_AUTH_TOKEN=", "RAY_ADDRESS="))]
    assert not list(shared.glob(".qdsim-*"))

    (run,) = (shared / "runs").glob("tiny-*")
    assert output.count("tables: ") == 2, "the result is repeated below what Ray says at its end"
    assert output.rstrip().splitlines()[-1] == f"report: qdsim report runs/{run.name}"
    assert json.loads((run / "manifest.json").read_text(encoding="utf-8"))["state"] == "done"
    assert runs.table(run, "clients")["node_id"].nunique() == 2


SHUTS_DOWN = WITHOUT_NODES + """; code=$?; for i in $(seq 40); do echo "Ray shuts down $i"; done; exit $code"""


@pytest.mark.parametrize(
    ("qdsim", "last"),
    [
        (
            'if [ "$1" = show ]; then echo "the table of $2"; else echo "results in runs/a-1"; fi',
            "the table of runs/a-1",
        ),
        ('echo "qdsim: train.lr = 0: must be more than 0" >&2; exit 2', "qdsim: train.lr = 0: must be more than 0"),
    ],
)
def test_the_result_is_the_last_thing_one_reads(sbatch, qdsim, last):
    """Below the forty lines of Ray: the table of the run that was made, or the line in which it failed."""
    process = sbatch("job.toml", ray=SHUTS_DOWN, qdsim=qdsim)
    output, _ = process.communicate(timeout=60)
    lines = output.rstrip().splitlines()
    assert "Ray shuts down 40" in lines
    assert lines[-1] == last


def test_the_exit_code_is_that_of_the_run(shared, sbatch):
    """So that Slurm knows of a failed run; the job is not queued again for it."""
    process = sbatch("job.toml", "--profile", "laptop", ray=WITHOUT_NODES, qdsim='echo "$@"; exit 4')
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 4
    assert "run --address auto --out runs job.toml --profile laptop" in output
    assert not [words for words in slurm_nodes.said(shared) if "requeue" in words]


def test_ray_that_did_not_start_is_a_failure(sbatch):
    """Though ``ray symmetric-run`` ends with 0."""
    process = sbatch("job.toml", ray=BROKEN)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "Ray did not start" in output


@pytest.mark.parametrize(("wanted", "code"), [("on", 3), ("auto", 0)])
def test_cuda_mps_comes_before_ray(sbatch, monkeypatch, wanted, code):
    """On each node, where QDSIM_MPS asks for it; here there is none: ``on`` ends the job, ``auto`` goes on without."""
    monkeypatch.setenv("QDSIM_MPS", wanted)
    process = sbatch("job.toml", ray=WITHOUT_NODES, qdsim='echo "$@"')
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert "nvidia-cuda-mps-control is not installed" in output
    assert ("run --address auto" in output) == (code == 0)


def test_a_restarted_job_resumes(sbatch):
    """After a node's failure, preemption, or the end of its time."""
    process = sbatch("job.toml", restarts=1, ray=WITHOUT_NODES, qdsim='echo "$@"')
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "--out runs --resume job.toml" in output


@pytest.mark.parametrize(("signum", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_signal_stops_the_run_and_not_ray(shared, sbatch, signum, requeued):
    """It gets SIGTERM and the time it needs. Out of time, the job goes back into the queue; cancelled, it does not."""
    waits = 'trap "sleep 0.2; echo committed; exit 143" TERM; touch started; while :; do sleep 0.05; done'
    process = sbatch("job.toml", ray=WITHOUT_NODES, qdsim=waits)
    until = time.monotonic() + 60
    while not (shared / "started").exists() and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "committed" in output
    assert (["scontrol", "requeue", "7"] in slurm_nodes.said(shared)) == requeued
    assert not list(shared.glob(".qdsim-*"))
