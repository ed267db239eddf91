"""Actors, drivers and nodes are lost: the run goes on by itself, with the bits of one that nothing happened to."""

import json
import re
from dataclasses import replace

import pytest
import torch

from qdsim.data import datasets
from qdsim.errors import BadInput, CannotPlace, ClientFailed, OutOfMemory
from qdsim.experiment import config
from qdsim.experiment import plan as plans
from qdsim.experiment.progress import Notice
from qdsim.federation.chaos import Chaos, Fault
from qdsim.models.device import gpu_failure
from qdsim.ray_engine.reservation import release
from qdsim.ray_engine.worker_group import start_workers
from qdsim.ray_engine.workers import Workers
from qdsim.store.run_directory import read_manifest
from qdsim.store.verify import difference
from tests.runs import TINY, run, table

SETTINGS = {"train": {"participation": 0.8}}
PACKED = {"clients_per_actor": 5, "cpu_fallback": True}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The run that nothing happened to, without Ray."""
    return run(tmp_path_factory.mktemp("undisturbed"), **SETTINGS)


@pytest.mark.ray
def test_lost_actors_and_a_lost_driver_change_nothing(cluster_address, tmp_path, undisturbed):
    """Killed: an actor of five clients in training, the driver two rounds on, a client in each phase of a request.

    The packed actor's other clients may have had their step of the round already, or not. One hangs: no answer for ten
    seconds, which the job says is too long, and one's GPU fails, of which torch tells by its own exception.
    """
    chaos = [
        "kill client 2 at train:1",
        "kill client 9 at train:2",
        "kill driver at train:3",
        "kill client 0 at recover:2",
        "slow client 1 by 0.5 at relearn:1",
        "kill driver at recover:1",
        "hang client 7 at recover:2",
        "break GPU of client 4 at recover:1",
    ]
    notes = []
    found = run(
        tmp_path,
        engine="ray",
        address=cluster_address,
        cluster=PACKED | {"step_timeout_s": 10.0},
        emit=lambda event: notes.append(event.text) if isinstance(event, Notice) else None,
        chaos=chaos,
        **SETTINGS,
    )
    assert difference(undisturbed, found) is None
    assert sum("the driver was lost" in note for note in notes) == 2, notes
    assert sum("the actor of clients" in note for note in notes) >= 3
    assert any("no answer for 10 s (cluster.step_timeout_s)" in note for note in notes)
    assert any("Error: CUDA error: device-side assert triggered; started again" in note for note in notes)
    assert len(list((found / "chaos").iterdir())) == 8, "every fault has struck"


@pytest.mark.ray
def test_an_actor_that_is_lost_as_it_starts_is_started_again(cluster_address):
    """Killed before it has answered: with two attempts it comes back, with one the run cannot be hosted."""
    import ray

    job = config.validate({**TINY, "cluster": {"clients_per_actor": 10, "gpus_per_client": 0, "attempts": 2}})
    dataset = datasets.load("digits", "")
    ray.init(address=cluster_address, namespace="starts")
    try:
        refs = [ray.put(array) for array in (dataset.train_images, dataset.test_images, dataset.test_labels)]
        group = start_workers(plans.build_plan(job, dataset), "starts", refs, dataset.normalization, print)
        ray.kill(group.actors[0])
        told = []
        workers = Workers(job.cluster, group, told.append)
        replaced = [event.text for event in told if isinstance(event, Notice) and event.actor_replaced]
        assert len(replaced) == 1
        assert replaced[0].startswith("the actor of clients 0, 1, 2, 3, 4, 5 more was lost as it started (")
        assert ray.get(workers.handles[0].place.remote()).node_id == workers.places[0].node_id
        ray.kill(group.actors[0])
        once = replace(job.cluster, attempts=1)
        with pytest.raises(CannotPlace, match=r"asked for 1 actors, found its actor was lost"):
            Workers(once, group, told.append)
    finally:
        release("starts")
        ray.shutdown()


@pytest.mark.ray
def test_a_run_that_gives_up_says_who_failed_and_resumes(cluster_address, tmp_path, undisturbed):
    """A programming error is not tried again; a lost actor as often as allowed: once. Resumed, it is whole."""
    on_ray = {"engine": "ray", "address": cluster_address, "cluster": PACKED | {"attempts": 1}, **SETTINGS}
    chaos = ["raise client 9 at train:2", "kill client 9 at train:3"]
    with pytest.raises(ClientFailed, match=r"client 9 failed in train, round 2, on node \w+: RuntimeError: raised on"):
        run(tmp_path, chaos=chaos, **on_ray)
    (stopped,) = tmp_path.glob("tiny-*")
    failure = json.loads((stopped / "failure.json").read_text())
    assert (failure["client_id"], failure["phase"], failure["round_number"]) == (9, "train", 2)
    assert read_manifest(stopped)["exit_code"] == 4
    with pytest.raises(ClientFailed, match=r"client 9 failed in train, round 3, on node \w+: its actor was lost"):
        run(tmp_path, chaos=chaos, resume=True, **on_ray)
    assert run(tmp_path, chaos=chaos, resume=True, **on_ray) == stopped
    assert difference(undisturbed, stopped) is None
    assert not (stopped / "failure.json").exists()


@pytest.mark.ray
def test_a_client_without_memory_ends_the_run_with_what_helps(cluster_address, tmp_path):
    """Torch is asked for a petabyte: no attempt is made again, and the error has the number and the settings."""
    with pytest.raises(OutOfMemory) as caught:
        run(tmp_path, engine="ray", address=cluster_address, cluster=PACKED, chaos=["fill GPU of client 3 at train:1"])
    said = str(caught.value)
    assert re.match(
        r"client 3 ran out of memory in train, round 1, on node \w+: 1125899906842624 bytes asked for; ", said
    )
    for setting in ("cluster.clients_per_actor lower (now 5)", "cluster.micro_batch lower", "model.width smaller"):
        assert setting in said
    manifest = read_manifest(next(tmp_path.glob("tiny-*")))
    assert (manifest["exit_code"], manifest["error"]) == (3, said)


@pytest.mark.ray
def test_torchs_own_errors_in_a_step_and_in_an_evaluation(cluster_address, tmp_path):
    """A network raises them in an actor: without memory for a step, the run ends with torch's numbers, exit code 3.

    Where a GPU fails in an evaluation, the actor is replaced and the evaluation done again: the run is whole.
    """

    def of(when):
        options = {"when": when, "mark": str(tmp_path / f"{when}.struck")}
        return {
            "model": {"kind": "tests.failing_network:failing", "options": options},
            "train": {"rounds": 1},
            "recover": {"rounds": 1},
            "relearn": {"rounds": 0},
            "methods": ["retrain"],
            "engine": "ray",
            "address": cluster_address,
            "cluster": PACKED,
        }

    with pytest.raises(OutOfMemory) as caught:
        run(tmp_path / "step", **of("step"))
    assert re.match(
        r"client \d ran out of memory in train, round 1, on node \w+: 2.00 GiB asked for, ", str(caught.value)
    )
    assert caught.value.exit_code == 3
    notes = []
    found = run(
        tmp_path / "evaluation",
        emit=lambda event: notes.append(event.text) if isinstance(event, Notice) else None,
        **of("evaluation"),
    )
    assert any("RuntimeError: CUDA error: an illegal memory access was encountered; started again" in n for n in notes)
    assert read_manifest(found)["state"] == "done"
    assert table(found, "rounds")["test_accuracy"].notna().all()


@pytest.mark.ray
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "out_of_memory"),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors"), "gpu_failed"),
        (ValueError("CUDA error: said by somebody else"), None),
    ],
    ids=["out of memory", "CUDA error", "another"],
)
def test_torchs_errors_are_known_on_the_other_side(cluster_address, error, kind):
    """What a task raises arrives with its type and its words: a GPU's failure stays one."""
    import ray

    def strike():
        raise error

    ray.init(address=cluster_address, namespace="errors")
    try:
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            ray.get(ray.remote(strike).options(num_cpus=0).remote())
        assert gpu_failure(caught.value.cause) == kind
    finally:
        ray.shutdown()


@pytest.mark.ray
@pytest.mark.slow
def test_a_node_that_is_lost_in_mid_round(tmp_path, undisturbed):
    """Two nodes, half of the clients on each: one is removed while a round is going on; the other takes them over.

    Each step of round 2 takes 2 s longer. Eight of ten clients take part, so that at least three are on each node, and
    once the first is done the node that goes has work for 4 s or more: twice what it takes to see that it is gone.
    """
    from ray.cluster_utils import Cluster

    config = {"health_check_period_ms": 500, "health_check_timeout_ms": 500, "health_check_failure_threshold": 3}
    config["health_check_initial_delay_ms"] = 0
    args = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False, "_system_config": config}
    cluster = Cluster(initialize_head=True, head_node_args=args)
    try:
        worker = cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20)
        done_then, notes = [], []

        def watch(event):
            if isinstance(event, Notice):
                notes.append(event.text)
            elif event.phase == "train" and event.round_number == 2 and event.clients_done >= 1 and not done_then:
                done_then.append(event.clients_done)
                cluster.remove_node(worker, allow_graceful=False)

        slow = [f"slow client {i} by 2 at train:2" for i in range(10)]
        on_ray = {"engine": "ray", "address": cluster.address, "cluster": PACKED}
        found = run(tmp_path, emit=watch, chaos=slow, **on_ray, **SETTINGS)
    finally:
        cluster.shutdown()
    assert 1 <= done_then[0] < 8, "the node was removed in the middle of round 2"
    clients = table(found, "clients")
    in_training = clients[clients.phase == "train"].groupby("round").node_id.nunique()
    assert in_training[1] == 2, "both nodes had clients"
    assert in_training[3] == 1, "one node has all of them"
    assert any("its actor was lost" in note for note in notes)
    assert difference(undisturbed, found) is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill client 7 at train:3", Fault("kill", "client", 7, "train", 3)),
        ("slow client 0 by 2.5 at relearn:1", Fault("slow", "client", 0, "relearn", 1, 2.5)),
        ("drop node of client 12 at unlearn:1", Fault("drop", "client", 12, "unlearn", 1)),
        ("break GPU of client 1 at train:2", Fault("break", "client", 1, "train", 2)),
        ("fill GPU of client 1 at train:2", Fault("fill", "client", 1, "train", 2)),
        ("kill driver at recover:2", Fault("kill", "driver", -1, "recover", 2)),
        (" kill  command at finetune:1 ", Fault("kill", "command", -1, "finetune", 1)),
    ],
)
def test_faults_are_read(text, fault):
    """As the help says."""
    assert Fault.parse(text) == fault
    assert Fault.parse(str(fault)) == fault


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kill client at train:3",
        "kill client 7 at train:0",
        "kill client 7 at training:1",
        "slow client 7 at train:1",
        "kill client 7 by 3 at train:1",
        "hang driver at train:1",
        "drop client 7 at train:1",
        "kill node of client 7 at train:1",
        "break client 7 at train:1",
        "drop GPU of client 7 at train:1",
    ],
)
def test_what_is_no_fault_is_refused_with_the_grammar(text):
    """One line each."""
    with pytest.raises(BadInput, match=r"--chaos.*: one of: kill\|hang\|raise client N at PHASE:ROUND"):
        Fault.parse(text)


def test_a_fault_strikes_once_in_a_runs_life(tmp_path):
    """The mark outlives the process, and is another fault's not."""
    faults = [Fault.parse("kill client 7 at train:3")]
    assert [str(fault) for fault in Chaos(faults, tmp_path).spared()] == ["kill client 7 at train:3"]
    assert Chaos(faults, tmp_path).due("client", "train", 2, 7) is None
    assert Chaos(faults, tmp_path).due("client", "train", 3, 6) is None
    assert Chaos(faults, tmp_path).due("client", "train", 3, 7) == faults[0]
    assert Chaos(faults, tmp_path).due("client", "train", 3, 7) is None
    assert Chaos(faults, tmp_path).spared() == []
    other = [Fault.parse("kill driver at train:3")]
    assert Chaos(other, tmp_path).due("driver", "train", 3) == other[0]


def test_faults_need_actors(tmp_path):
    """Inline there are none to kill but this process."""
    with pytest.raises(BadInput, match="--engine ray"):
        run(tmp_path, chaos=["kill client 7 at train:3"])


def test_faults_need_clients_that_there_are(tmp_path):
    """Ten clients are 0 to 9."""
    with pytest.raises(BadInput, match=r"kill client 10 at train:3.*clients are 0 to 9"):
        run(tmp_path, engine="ray", chaos=["kill client 10 at train:3"])
