"""A cluster that has no room says so, at once or when the time is up, with a change that works; and what it tells."""

import os
import re
import signal
import time
import urllib.request

import pytest

from qdsim.errors import CannotPlace, Interrupted
from qdsim.experiment.progress import Notice, Progress
from qdsim.planning import gpus
from qdsim.ray_engine.metrics import METRICS, Gauges
from qdsim.store.run_directory import read_manifest
from tests.runs import granted_gpus, run

PATIENT = {"placement_timeout_s": 3600.0}
"""Longer than any test may take: whoever waits, fails."""


@pytest.mark.ray
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"gpus_per_client": 0.4}, r"asked for 5 actors of 0\.4 GPU.*found 2 GPUs.*which hold 4"),
        ({"memory_per_actor_gb": 500.0}, r"5 actors of .*500 GB each.*which hold 0"),
        ({"cpus_per_actor": 1.0, "gpus_per_client": 0.0}, r"5 actors of 1 CPU.*2 CPUs.*which hold 2"),
        ({"cpus_per_actor": 64.0}, r"5 actors of .*64 CPU.*which hold 0"),
    ],
)
def test_asks_that_cannot_be_met_end_at_once(cluster_address, tmp_path, asked, said):
    """Five clients on two CPUs and two GPUs; nothing waits for the hour that the job would allow."""
    clients = {"clients": 5}
    with pytest.raises(CannotPlace, match=said) as refused:
        run(tmp_path, engine="ray", address=cluster_address, cluster=PATIENT | asked, partition=clients)
    assert "set cluster." in refused.value.fix
    assert len(refused.value.nodes) == 1
    assert read_manifest(next(tmp_path.iterdir()))["exit_code"] == 3


@pytest.mark.ray
def test_the_advised_change_works(cluster_address, tmp_path):
    """Five clients of 0.4 on two GPUs: packed in pairs, three actors sit on them, each on one."""
    settings = {"partition": {"clients": 5}, "methods": ["quickdrop"], "relearn": {"rounds": 0}}
    on_ray = {"engine": "ray", "address": cluster_address}
    with pytest.raises(CannotPlace) as refused:
        run(tmp_path / "refused", cluster={"gpus_per_client": 0.4}, **settings, **on_ray)
    packed = int(re.findall(r"clients_per_actor to (\d+)", refused.value.fix)[0])
    events = []
    fixed = {"gpus_per_client": 0.4, "clients_per_actor": packed}
    run(tmp_path / "done", cluster=fixed, emit=events.append, **settings, **on_ray)
    gpus = granted_gpus(events)
    assert packed == 2
    assert gpus[0] == gpus[1]
    assert set(gpus.values()) == {"0", "1"}


@pytest.mark.ray
def test_a_run_counts_the_memory_of_gpus_as_its_plan_does(cluster_address, tmp_path, monkeypatch):
    """Two GPUs of 900 MB hold an actor of 430 MB twice each: five clients are packed in pairs, unless fixed."""
    monkeypatch.setattr(gpus, "memory_here", lambda: [9e8, 9e8])
    settings = {"partition": {"clients": 5}, "methods": ["quickdrop"], "relearn": {"rounds": 0}}
    on_ray = {"engine": "ray", "address": cluster_address}
    with pytest.raises(CannotPlace, match=r"asked for 5 actors of 4\d\d MB on a GPU, found 900 MB there, which hold 2"):
        run(tmp_path / "refused", cluster={"gpus_per_client": 0.2}, **settings, **on_ray)
    said = []
    run(tmp_path / "done", **settings, **on_ray, emit=said.append)
    notes = [event.text for event in said if isinstance(event, Notice)]
    assert any(note.startswith("2 clients share an actor (auto): a GPU of 900 MB holds 2 actors") for note in notes)


@pytest.mark.ray
def test_room_that_others_hold_is_waited_for_until_the_time_is_up(cluster_address, tmp_path, monkeypatch):
    """Somebody holds both GPUs: two seconds later the run gives up and says what is free; Ctrl-C ends a longer wait."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    monkeypatch.setattr("qdsim.ray_engine.reservation.NOTIFY_EVERY_S", 1.0)
    said = []

    def interrupt(event):
        if isinstance(event, Notice) and not said:
            said.append(event.text)
            os.kill(os.getpid(), signal.SIGINT)

    ray.init(address=cluster_address, namespace="others")
    held = placement_group([{"GPU": 2}], lifetime="detached", name="held")
    assert held.wait(60)
    ray.shutdown()
    try:
        impatient = {"placement_timeout_s": 2.0}
        with pytest.raises(CannotPlace, match=r"free after 2 s \(cluster\.placement_timeout_s\); wait for other jobs"):
            run(tmp_path, engine="ray", address=cluster_address, cluster=impatient)
        with pytest.raises(Interrupted):
            run(tmp_path / "patient", engine="ray", address=cluster_address, cluster=PATIENT, emit=interrupt)
        assert re.match(r"waiting for room for .+ free, giving up in \d+ s", said[0])
        assert read_manifest(next((tmp_path / "patient").iterdir()))["state"] == "interrupted"
    finally:
        ray.init(address=cluster_address, namespace="others")
        remove_placement_group(ray.util.get_placement_group("held"))
        ray.shutdown()


@pytest.mark.ray
def test_cores_that_others_hold_keep_no_run_from_free_gpus(cluster_address, tmp_path):
    """Two actors with a GPU each would ask for a core each; others hold one and a half of two. They start at once."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    ray.init(address=cluster_address, namespace="others")
    held = placement_group([{"CPU": 1.5}], lifetime="detached", name="cores")
    assert held.wait(60)
    ray.shutdown()
    try:
        packed = {"clients_per_actor": 5, "placement_timeout_s": 2.0}
        short = {"train": {"rounds": 1}, "methods": ["retrain"], "unlearn": {"rounds": 1}, "relearn": {"rounds": 0}}
        events = []
        run(tmp_path, engine="ray", address=cluster_address, cluster=packed, emit=events.append, **short)
        assert set(granted_gpus(events).values()) == {"0", "1"}
    finally:
        ray.init(address=cluster_address, namespace="others")
        remove_placement_group(ray.util.get_placement_group("cores"))
        ray.shutdown()


@pytest.mark.ray
def test_progress_is_seen_by_rays_metrics(cluster_address):
    """All nine gauges, with run, phase and method, on the port from which Prometheus reads."""
    import ray

    ray.init(address=cluster_address, namespace="metrics")
    try:
        row = {"wall_s": 1.5, "test_accuracy": 0.9, "forget_accuracy": 0.1, "retain_accuracy": 0.8}
        gauges = Gauges("tiny-1")
        gauges.record(Progress(0, "", 0, "quickdrop", "class:9", "train", 3, 5, 4, 10, 0.25, row=row))
        gauges.record(Notice("client 3 on node a: its actor was lost; started again", actor_replaced=True))
        (node,) = (node for node in ray.nodes() if node["Alive"])
        page = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        lines: list[str] = []
        for _ in range(60):
            with urllib.request.urlopen(page, timeout=10) as answer:
                lines = [line for line in answer.read().decode().splitlines() if "tiny-1" in line]
            if any(line.startswith("ray_qdsim_actors_replaced") and line.endswith(" 1.0") for line in lines):
                break
            time.sleep(0.5)
    finally:
        ray.shutdown()
    found = {line.split("{")[0]: line for line in lines}
    assert set(found) == {f"ray_{name}" for name in METRICS}
    assert 'phase="train"' in found["ray_qdsim_round"]
    assert found["ray_qdsim_test_accuracy"].endswith(" 0.9")
