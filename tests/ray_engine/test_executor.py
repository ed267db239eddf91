"""The same clients as Ray actors: the same bits, pinned, and never left out in silence."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qdsim.errors import ClientFailed
from qdsim.experiment.config import validate
from qdsim.store.run_directory import read_manifest
from qdsim.store.verify import difference
from tests.conftest import PROJECT
from tests.crash import descendants
from tests.runs import granted_gpus, run, table

KEYS = ["method", "request", "phase", "round"]
EXACT = ["params_sha256", "test_accuracy", "forget_accuracy", "retain_accuracy", "samples", "bytes_up", "data_size"]


@pytest.fixture(scope="module")
def inline_rounds(tmp_path_factory) -> pd.DataFrame:
    """The yardstick: the tiny job without Ray."""
    return table(run(tmp_path_factory.mktemp("inline")), "rounds").set_index(KEYS).sort_index()


@pytest.mark.ray
@pytest.mark.parametrize("clients_per_actor", [10, 1])
def test_one_and_ten_actors_give_the_bits_of_inline(clients_per_actor, inline_rounds, cluster_address, tmp_path):
    """Parameter hashes, accuracies and counts are equal in every round; ten actors sit on two logical GPUs."""
    events = []
    found = run(
        tmp_path,
        engine="ray",
        address=cluster_address,
        cluster={"clients_per_actor": clients_per_actor},
        emit=events.append,
    )
    rounds = table(found, "rounds").set_index(KEYS).sort_index()
    pd.testing.assert_frame_equal(rounds[EXACT], inline_rounds[EXACT], check_exact=True)
    assert read_manifest(found)["state"] == "done"
    clients = table(found, "clients")
    assert set(clients["gpu_id"]) == {""}, "the CPU computes in the place of logical GPUs, which is said"
    assert clients["node_id"].nunique() == 1
    if clients_per_actor == 1:
        assert Counter(granted_gpus(events).values()) == {"0": 5, "1": 5}
    assert (clients["compute_s"] > 0).all()
    training = clients[clients["phase"] == "train"]
    assert ((training["matching_s"] > 0) & (training["matching_s"] < training["compute_s"])).all()


RESNET = {
    "methods": ["quickdrop"],
    "model": {"kind": "resnet", "options": {"width": 4}},
    "partition": {"kind": "iid", "clients": 5},
    "train": {"rounds": 2, "steps": 2},
    "recover": {"rounds": 1},
}


@pytest.fixture(scope="module")
def inline_resnet(tmp_path_factory) -> Path:
    """A residual network by autograd, without Ray."""
    return run(tmp_path_factory.mktemp("resnet"), **RESNET)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("clients_per_actor", "chaos"),
    [(5, []), (3, ["kill client 1 at train:2"]), (1, [])],
    ids=["1 actor", "2 actors, one killed", "5 actors"],
)
def test_another_network_has_the_bits_of_inline(clients_per_actor, chaos, inline_resnet, cluster_address, tmp_path):
    """A ResNet on one, two and five actors: all that the tables hold. Of two, one is killed in training."""
    on_ray = {"engine": "ray", "address": cluster_address, "cluster": {"clients_per_actor": clients_per_actor}}
    found = run(tmp_path, chaos=chaos, **on_ray, **RESNET)
    assert difference(inline_resnet, found) is None
    assert len(list(found.glob("chaos/*"))) == len(chaos), "every fault has struck"


@pytest.mark.ray
def test_client_requests_and_partial_participation_are_the_same_on_ray(cluster_address, tmp_path):
    """All client-level methods; F-Set is counted by the owning actor; a third of the clients take part in training."""
    methods = ["quickdrop", "retrain", "sga", "federaser", "s2u"]
    settings = {"requests": [{"kind": "client", "target": 4}], "train": {"participation": 0.3}, "methods": methods}
    ours = run(tmp_path / "inline", **settings)
    on_ray = {"engine": "ray", "address": cluster_address, "cluster": {"clients_per_actor": 5}}
    theirs = run(tmp_path / "ray", **on_ray, **settings)
    first, second = (table(r, "rounds").set_index(KEYS).sort_index() for r in (ours, theirs))
    columns = [*EXACT, "forget_accuracy_train", "retain_accuracy_train"]
    pd.testing.assert_frame_equal(first[columns], second[columns], check_exact=True)
    assert (second.loc["shared", "participants_received"] == 3).all()


@pytest.mark.ray
def test_all_class_methods_attacks_and_sweeps_are_the_same_on_ray(cluster_address, tmp_path):
    """Five methods, both attacks, 4 and 6 clients on two actors: equal hashes, counts and rates."""
    methods = ["quickdrop", "retrain", "sga", "federaser", "fump"]
    settings = {
        "methods": methods,
        "membership": ["loss_threshold", "entropy_svm"],
        "sweep": {"partition.clients": [4, 6]},
    }
    on_ray = {"engine": "ray", "address": cluster_address, "cluster": {"clients_per_actor": 3}}
    here, there = run(tmp_path / "inline", **settings), run(tmp_path / "ray", **on_ray, **settings)
    keys = ["cell", *KEYS]
    first = table(here, "rounds").set_index(keys).sort_index()
    attacks = table(here, "membership").set_index([*keys, "attack", "subset"]).sort_index()
    second = table(there, "rounds").set_index(keys).sort_index()
    pd.testing.assert_frame_equal(first[EXACT], second[EXACT], check_exact=True)
    other = table(there, "membership").set_index([*keys, "attack", "subset"]).sort_index()
    figures = ["member_rate", "auc", "tpr_at_1pct_fpr"]
    pd.testing.assert_frame_equal(attacks[figures], other[figures], check_exact=True)


@pytest.mark.ray
def test_a_failing_client_stops_the_run_with_its_name(cluster_address, tmp_path):
    """A learning rate of 1e30: client, phase, round, node and cause in one line; the manifest has it too."""
    with pytest.raises(
        ClientFailed, match=r"client \d+ failed in train, round 1, on node \w+: Diverged: loss"
    ) as caught:
        run(tmp_path, engine="ray", address=cluster_address, cluster={"clients_per_actor": 5}, train={"lr": 1e30})
    assert "\n" not in str(caught.value)
    manifest = read_manifest(next(tmp_path.iterdir()))
    assert (manifest["state"], manifest["exit_code"]) == ("failed", 4)
    assert manifest["error"] == str(caught.value)


@pytest.mark.ray
def test_shards_and_synthetic_sets_stay_with_their_actor():
    """A host hands out updates, counts, sizes and two figures of a sample; pixels for the gallery alone.

    Its actor calls these methods and has no others that return anything of a client.
    """
    from qdsim.algorithms.phase import ClientUpdate
    from qdsim.federation.client_host import ClientHost, ImagePair
    from qdsim.federation.measures import Counts
    from qdsim.ray_engine.client_actor import ClientActor

    actor = ClientActor.__ray_metadata__.modified_class
    assert {m for m in vars(actor) if not m.startswith("_")} == {"place", "call", "step"}
    returns = {m: f.__annotations__["return"] for m, f in vars(ClientHost).items() if not m.startswith("_")}
    assert returns == {
        "assign_clients": None,
        "warm_up": None,
        "step": ClientUpdate,
        "test_counts": Counts,
        "client_counts": tuple[Counts, Counts],
        "test_features": np.ndarray,
        "client_features": np.ndarray,
        "can_access": bool,
        "save_states": None,
        "load_states": None,
        "image_pair": ImagePair,
        "storage_bytes": int,
    }
    with pytest.raises(ValueError, match="_clients"):
        actor.call(object(), "_clients", None)
    numbers = (int, float, str, float | None)
    fields = {name: kind for name, kind in ClientUpdate.__annotations__.items() if kind not in numbers}
    assert set(fields) == {"delta"}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code", "engine"), [(signal.SIGINT, 130, "inline"), (signal.SIGTERM, 143, "ray")])
def test_an_interrupted_run_says_so_and_leaves_no_process(tmp_path, signum, code, engine):
    """The command ends with the signal's code, the manifest says interrupted, rows written so far can be read.

    Meanwhile its cluster listens on this machine alone, and afterwards nothing of it is left.
    """
    arguments = ["run", "jobs/quickstart.toml", "--out", str(tmp_path), "--engine", engine]
    command = [sys.executable, "-m", "qdsim", *arguments]
    process = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    rounds: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        rounds += [line] if " shared train " in line else []
        if len(rounds) == 2:
            break
    places = _listening({process.pid, *descendants(process.pid)})
    assert len(places) >= (5 if engine == "ray" else 0)
    assert set(places) <= LOOPBACK
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    (found,) = tmp_path.iterdir()
    options = " --engine inline" if engine == "inline" else ""
    assert errors.strip().splitlines()[-1] == f"qdsim: interrupted; qdsim resume {found}{options} continues"
    assert read_manifest(found)["state"] == "interrupted"
    assert len(table(found, "rounds")) >= 2
    assert _descendants_gone(process.pid)
    assert not list(Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray").glob(f"session_*_{process.pid}"))


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""127.0.0.1, the same as an IPv6 address, and ::1, in the words of /proc/net."""


def _listening(pids: set[int]) -> list[str]:
    """Return the addresses that processes listen on, one for each socket."""
    own = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                own.add(os.readlink(link))
            except OSError:
                continue
    found = []
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                found.append(words[1].partition(":")[0])
    return found


def _descendants_gone(pid: int) -> bool:
    """Ray's processes of that session are gone within half a minute."""
    for _ in range(60):
        if not _processes_of(pid):
            return True
        time.sleep(0.5)
    return False


def _processes_of(pid: int) -> list[str]:
    """Processes whose command line names the Ray session that process ``pid`` started."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    text = file.read().decode(errors="replace")
            except OSError:
                continue
            if f"_{pid}/" in text and "session_" in text:
                found.append(text)
    return found


@pytest.mark.ray
def test_rows_can_be_read_while_the_run_goes_on(cluster_address, tmp_path):
    """Every time a round is reported, pandas reads at least that many whole rows."""
    from qdsim.api import launch
    from qdsim.experiment.progress import Progress
    from tests.runs import TINY

    seen: list[tuple[int, int]] = []
    where = []

    def emit(event):
        if isinstance(event, Progress) and event.row is not None and not event.finished:
            seen.append((len(seen) + 1, len(table(where[0], "rounds"))))

    launch.run(
        validate({**TINY, "cluster": {"clients_per_actor": 5, "cpu_fallback": True}}),
        tmp_path,
        engine="ray",
        address=cluster_address,
        origin={},
        begin=lambda plan, run_dir: where.append(run_dir),
        emit=emit,
    )
    assert len(seen) == 11
    assert all(rows >= reported for reported, rows in seen)
    assert np.all(np.diff([rows for _, rows in seen]) >= 0)
