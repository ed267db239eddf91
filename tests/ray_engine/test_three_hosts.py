"""A cluster of three real hosts, and a user on a fourth who has nothing but its address and its token."""

import json
import re
import shutil
import subprocess
import sys
import time

import pytest

from qdsim.api import launch
from qdsim.data import datasets
from qdsim.experiment import config
from qdsim.store.run_directory import read_manifest
from qdsim.store.verify import difference
from tests import examples
from tests.conftest import PROJECT
from tests.ray_engine.three_hosts import NoNamespaces, environment, make_home, three_hosts, until
from tests.runs import ignore, table

pytestmark = [pytest.mark.ray, pytest.mark.slow]

JOB = PROJECT / "jobs" / "quickstart.toml"
CLIENTS = "partition.clients=8"
SETTINGS = ["--profile", "smoke", "--set", CLIENTS]
TWO_ACTORS = ["--set", "cluster.clients_per_actor=4"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Head, worker1 and worker2, for all tests of this file."""
    try:
        with three_hosts(tmp_path_factory.mktemp("hosts")) as found:
            yield found
    except NoNamespaces as why:
        pytest.skip(str(why))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same job here, without Ray."""
    job = config.load(JOB, profile="smoke", overrides=[CLIENTS])
    out = tmp_path_factory.mktemp("undisturbed")
    return launch.run(job, out, engine="inline", address=None, origin={}, begin=ignore, emit=ignore)


@pytest.fixture(scope="module")
def changed_code(tmp_path_factory):
    """The package in another version than the hosts have installed."""
    folder = tmp_path_factory.mktemp("code")
    shutil.copytree(PROJECT / "qdsim", folder / "qdsim")
    with open(folder / "qdsim" / "__init__.py", "a") as file:
        file.write('__version__ = "as sent"\n')
    return folder


def qdsim(*arguments, home, code=PROJECT, path=""):
    """Run a command as the user does: of Ray's settings only what the home holds, of qdsim what lies in the folder."""
    command = [sys.executable, "-m", "qdsim", *map(str, arguments)]
    env = environment(home) | {"PYTHONPATH": str(path)}
    return subprocess.run(command, cwd=code, env=env, capture_output=True, text=True, timeout=280)


def only_run(out):
    (found,) = out.glob("quickstart-*")
    return found


def test_a_job_over_http_runs_on_both_workers_and_equals_the_local_run(cluster, undisturbed, changed_code, tmp_path):
    """Half of the clients on each worker and none on the head; the images reach a host once, for both of its actors.

    The hosts run the code that was sent. The log comes here, and the token is in nothing that is kept.
    """
    before = {name: cluster.received_bytes(name) for name in cluster.nodes}
    done = qdsim(
        "submit", JOB, *SETTINGS, "--set", "cluster.clients_per_actor=2",
        "--address", cluster.address, "--out", tmp_path, "--follow", home=cluster.home, code=changed_code,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert re.search(r"^sending .*quickstart.toml and the code that lies here: \d+ files, \d+ kB$", done.stdout, re.M)
    assert done.stdout.count(" shared train ") == 2
    assert done.stdout.rstrip().endswith("succeeded, exit code 0")
    found = only_run(tmp_path)
    assert difference(undisturbed, found) is None

    hosts = {node_id: name for name, node_id in cluster.nodes.items()}
    clients = table(found, "clients").groupby("node_id")["client_id"].nunique()
    assert {hosts[node_id]: count for node_id, count in clients.items()} == {"worker1": 4, "worker2": 4}
    manifest = read_manifest(found)
    assert (manifest["hardware"]["host"], manifest["versions"]["qdsim"]) == ("head", "as sent")

    digits = datasets.load("digits", "", verify=True, download=False, size=None)
    images = digits.train_images.nbytes + digits.test_images.nbytes + digits.test_labels.nbytes
    for name in ("worker1", "worker2"):
        until(lambda name=name: cluster.received_bytes(name) - before[name] >= images, "the images are counted")
    time.sleep(3)  # what came later is counted as well: every second
    for name in ("worker1", "worker2"):
        assert cluster.received_bytes(name) - before[name] < 1.6 * images, "more than the images and small models"

    kept = [cluster.get("/api/jobs/"), done.stdout, *(path.read_text() for path in found.glob("*.json"))]
    assert "RAY_JOB_STOP_WAIT_TIME_S" in kept[0]
    assert not any(cluster.token in text for text in kept)


def test_a_job_that_is_stopped_is_interrupted_in_order_and_resumes_to_the_same_result(cluster, undisturbed, tmp_path):
    """Stopped in the middle of a round; whoever stops it is told, and so is who stops it twice."""
    at = ["--address", cluster.address]
    submit = ["submit", JOB, *SETTINGS, *TWO_ACTORS, *at, "--out", tmp_path]
    begun = qdsim(*submit, "--chaos", "slow client 3 by 100 at train:2", home=cluster.home)
    assert begun.returncode == 0, begun.stderr
    job_id = re.search(r"qdsim stop (\S+)", begun.stdout)[1]
    until(lambda: list(tmp_path.glob("quickstart-*/chaos/*")), "round 2 has begun")

    stopped = qdsim("stop", job_id, *at, home=cluster.home)
    assert stopped.returncode == 0, stopped.stderr
    assert f"{job_id} stopped in order; submit the job with --resume" in stopped.stdout
    manifest = read_manifest(only_run(tmp_path))
    assert (manifest["state"], manifest["exit_code"]) == ("interrupted", 143)
    again = qdsim("stop", job_id, *at, home=cluster.home)
    assert again.stdout == f"{job_id} had ended before: stopped, exit code 143\n"

    resumed = qdsim(*submit, "--resume", "--wait", home=cluster.home)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert difference(undisturbed, only_run(tmp_path)) is None


def test_a_package_of_the_users_own_travels_with_the_job(cluster, tmp_path):
    """The example's method, network, data set, attack and server rule, which no host has installed."""
    installed = examples.install(tmp_path)
    short = ["--set", "train.rounds=2", "--set", "train.steps=2", "--set", 'methods=["drift", "retrain"]']
    where = ["--address", cluster.address, "--out", tmp_path / "out", "--wait"]
    done = qdsim("submit", examples.JOB, *short, *where, home=cluster.home, path=installed)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = (tmp_path / "out").glob("forgetful-*")
    assert set(table(found, "stages")["method"]) == {"shared", "drift", "retrain"}
    assert set(table(found, "membership")["attack"]) == {"confidence"}
    hosts = {node_id: name for name, node_id in cluster.nodes.items()}
    assert {hosts[node_id] for node_id in table(found, "clients")["node_id"]} == {"worker1", "worker2"}


def test_the_exit_code_is_that_of_the_job(cluster, tmp_path):
    """A mistake that shows only beside the data, which lie there: 2, where Ray's own command says 1."""
    wrong = ["--set", 'requests=[{kind="class", target=12}]', "--out", tmp_path]
    done = qdsim("submit", JOB, *wrong, "--address", cluster.address, "--wait", home=cluster.home)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "qdsim: requests[0].target = 12: classes of digits are numbered 0 to 9\n" in done.stdout
    assert done.stdout.rstrip().endswith("failed, exit code 2")
    unknown = qdsim("stop", "nobody", "--address", cluster.address, home=cluster.home)
    assert unknown.returncode == 2
    assert "SUBMISSION_ID = 'nobody': no such job at" in unknown.stderr


@pytest.mark.parametrize(
    ("token", "said"),
    [
        (None, "it asks for a token, and none was sent; RAY_AUTH_MODE is 'disabled' here, with no token"),
        ("of another cluster", "it refused the token that was sent; RAY_AUTH_MODE is 'token' here, with the token"),
    ],
    ids=["none", "another"],
)
def test_without_the_clusters_token_a_job_is_refused(cluster, tmp_path, token, said):
    """Exit code 3 and one line that says what was found here and what to set; the token itself is not in it."""
    jobs = json.loads(cluster.get("/api/jobs/"))
    home = make_home(tmp_path / "home", token)
    done = qdsim("submit", JOB, "--address", cluster.address, home=home)
    assert done.returncode == 3
    assert done.stderr.startswith(f"qdsim: cannot reach the cluster at {cluster.address}: {said}")
    assert "copy the head's ~/.ray/auth_token to this machine, mode 0600" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "of another cluster" not in done.stderr
    assert done.stdout == ""
    assert len(json.loads(cluster.get("/api/jobs/"))) == len(jobs)
