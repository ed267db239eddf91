"""Trackers hold what the tables hold: every value, at its round, once."""

import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections import Counter

import pytest

import qdsim
from qdsim.errors import BadInput, Interrupted
from qdsim.experiment.progress import Progress
from qdsim.store import run_directory, tables
from qdsim.tracking import follow, trackers
from qdsim.tracking.follow import Follower, check_trackers, export
from qdsim.tracking.series import Reader, Series
from tests.cli.test_commands import qdsim as command
from tests.runs import TINY
from tests.runs import run as run_tiny

SHORT = {"train.rounds": 2, "recover.rounds": 2, "membership": ["loss_threshold"]}


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """A small run with TensorBoard beside it."""
    pytest.importorskip("tensorboard")
    out = tmp_path_factory.mktemp("out")
    return qdsim.run(TINY, set=SHORT, out=out, engine="inline", track="tensorboard", progress=False)


def expected(run):
    """Every number of the three tables by series, metric and round, worked out of the DataFrames."""
    found = {}

    def add(row, metric, value):
        request = row["request"].replace(":", "-")
        name = "/".join(part for part in (f"seed-{row['seed']}", row["method"], request) if part)
        if value is not None and not math.isnan(value):
            found[name, f"{row['phase']}/{metric}", row["round"]] = float(value)

    keys = {column.name for column in tables.KEYS}
    for row in run.rounds.to_dict("records"):
        for name in set(row) - keys - {"params_sha256", "reused"}:
            add(row, name, row[name])
    for row in run.classes.to_dict("records"):
        add(row, f"class_accuracy/{row['class']}", row["accuracy"])
    for row in run.membership.to_dict("records"):
        for name in ("member_rate", "auc", "tpr_at_1pct_fpr"):
            add(row, f"{row['attack']}/{row['subset']}/{name}", row[name])
    return found


def in_tensorboard(folder):
    """Every point of every event file, with how often it is there."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    found, times = {}, Counter()
    for path in folder.rglob("events.out.tfevents.*"):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                key = (str(path.parent.relative_to(folder)), value.tag, event.step)
                found[key] = make_ndarray(value.tensor).item()
                times[key] += 1
    return found, times


def assert_same(run, folder):
    found, times = in_tensorboard(folder)
    assert found == expected(run)
    assert set(times.values()) == {1}


def test_series_of_tensorboard_equal_the_tables(tracked):
    """2 + (1 + 2 + 1) + (2 + 1) rounds: ten accuracies each, and the rounds' columns; bit for bit, each once."""
    assert_same(tracked, tracked.path / "tensorboard")
    found, _ = in_tensorboard(tracked.path / "tensorboard")
    names = {name for name, _, _ in found}
    assert names == {"seed-0/shared", "seed-0/quickdrop/class-9", "seed-0/retrain/class-9"}
    assert sum("/class_accuracy/" in metric for _, metric, _ in found) == 9 * 10
    assert ("seed-0/quickdrop/class-9", "recover/loss_threshold/forget/auc", 2) in found
    assert not any("forget_accuracy" in metric for name, metric, _ in found if name == "seed-0/shared")


def test_tensorboard_itself_reads_them(tracked):
    """Its own reader finds the series as scalars, whose steps are the rounds."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    reader = EventAccumulator(str(tracked.path / "tensorboard" / "seed-0" / "shared"))
    reader.Reload()
    assert reader.SummaryMetadata("train/test_accuracy").plugin_data.plugin_name == "scalars"
    assert [event.step for event in reader.Tensors("train/test_accuracy")] == [1, 2]


def test_a_resumed_run_has_no_point_twice(tmp_path):
    """Cut off in recovery after a tracked part, then resumed with the tracker: as if nothing had happened."""
    pytest.importorskip("tensorboard")
    followers = []

    def begin_and_stop(event):
        if isinstance(event, Progress) and event.row is not None:
            if not followers:
                followers.append(Follower(("tensorboard",), pytest.fail))
                followers[0].begin(next((tmp_path / "out").glob("tiny-*")))
            followers[0].take(event)
            if event.phase == "recover":
                raise Interrupted(signal.SIGINT)

    with pytest.raises(Interrupted):
        run_tiny(tmp_path / "out", emit=begin_and_stop, train={"rounds": 1}, methods=["quickdrop"])
    followers[0].__exit__(None, None, None)
    (path,) = (tmp_path / "out").glob("tiny-*")
    cut, _ = in_tensorboard(path / "tensorboard")
    assert {phase.split("/")[0] for _, phase, _ in cut} == {"train", "unlearn", "recover"}
    resumed = qdsim.resume(path, engine="inline", track="tensorboard", progress=False)
    assert_same(resumed, path / "tensorboard")


def test_a_finished_run_is_exported_as_often_as_one_likes(tracked, tmp_path):
    """Into a folder of one's own, twice: the same points, each once; the command says where to look."""
    export(tracked.path, ["tensorboard"], tmp_path)
    done = command("export", tracked.path, "--to", "tensorboard", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / tracked.run_id / "tensorboard"
    assert done.stdout.strip() == f"tensorboard --logdir {folder}"
    assert_same(tracked, folder)


def test_points_of_a_round_may_come_in_parts(tracked):
    """A reader sees each part of the tables once, and counts a series' rounds over its phases."""
    reader = Reader(tracked.path)
    points = reader.new()
    own = [p for p in points if p.series == Series("", 0, "quickdrop", "class:9")]
    assert [(p.phase, p.round_number, p.step) for p in own] == [
        ("unlearn", 1, 0),
        ("recover", 1, 1),
        ("recover", 2, 2),
        ("relearn", 1, 3),
    ]
    assert reader.new() == []
    assert Series("train.lr=0.1,synthetic.scale=10", 2, "sga", "2:client:3").name == (
        "train.lr=0.1,synthetic.scale=10/seed-2/sga/2-client-3"
    )


def test_parts_that_are_joined_meanwhile_give_no_point_twice(tracked, tmp_path, monkeypatch):
    """Half of the parts were seen before the run joined them: of the joined file only the other half is new."""
    whole = shutil.copytree(tracked.path, tmp_path / tracked.path.name)
    parts = sorted((whole / "tables" / "classes").glob("seed-*"))
    aside = [path.rename(tmp_path / path.name) for path in parts[::2]]
    reader = Reader(whole)
    first = reader.new()
    for path in aside:
        path.rename(whole / "tables" / "classes" / path.name)
    monkeypatch.setattr(run_directory, "JOINED_FROM", 5)
    run_directory.join_parts(whole)
    assert (whole / "tables" / "classes" / "all.parquet").exists()
    second = reader.new()
    assert reader.new() == []

    def named(points):
        return Counter((p.series, p.phase, p.round_number, name) for p in points for name in p.values)

    everything = named(Reader(tracked.path).new())
    assert set(everything.values()) == {1}
    assert named(first) + named(second) == everything
    assert len(named(second)) == 10 * len(aside)


def test_a_part_that_is_joined_between_listing_and_reading_is_found_again(tracked, tmp_path, monkeypatch):
    """The listing still has the parts, the folder only the joined file: it is listed once more."""
    whole = shutil.copytree(tracked.path, tmp_path / tracked.path.name)
    monkeypatch.setattr(run_directory, "JOINED_FROM", 5)
    real, joined = run_directory.part_files, []

    def list_then_join(run_dir, table):
        found = real(run_dir, table)
        if table == "rounds" and not joined:
            joined.append(table)
            run_directory.join_parts(whole)
        return found

    monkeypatch.setattr(run_directory, "part_files", list_then_join)
    points = Reader(whole).new()
    assert joined
    assert sum("train/test_accuracy" in p.values for p in points) == 2


class Failing:
    """A tracker whose server is gone after the first rows."""

    where = ""

    def __init__(self, target):
        self.calls = 0

    def log(self, points):
        self.calls += 1
        raise ConnectionError("no route to host\nmore of it")

    def close(self):
        raise AssertionError("not closed after it failed")


def test_a_tracker_that_fails_costs_one_warning(tmp_path, monkeypatch):
    """The run ends as it would have, the other tracker has everything."""
    pytest.importorskip("tensorboard")
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Failing)
    monkeypatch.setattr(follow, "find_spec", lambda name: object())
    small = {"train.rounds": 1, "methods": ["quickdrop"]}
    both = ["wandb", "tensorboard"]
    with pytest.warns(UserWarning, match="wandb failed") as caught:
        run = qdsim.run(TINY, set=small, out=tmp_path, engine="inline", track=both, progress=False)
    (said,) = [str(warning.message) for warning in caught]
    assert said == (
        "wandb failed and is not tracked any more: ConnectionError: no route to host; "
        "qdsim export RUN --to wandb sends it all"
    )
    assert run.state == "done"
    assert_same(run, run.path / "tensorboard")


def test_a_tracker_that_does_not_open_costs_one_warning(tmp_path, monkeypatch):
    """Some end the process where they should raise."""

    def leave(target):
        raise SystemExit(1)

    monkeypatch.setitem(trackers.TRACKERS, "mlflow", leave)
    warned = []
    with Follower(("mlflow",), warned.append) as follower:
        (tmp_path / "manifest.json").write_text("{}")
        follower.begin(tmp_path)
    assert len(warned) == 1
    assert warned[0].startswith("mlflow failed and is not tracked any more: SystemExit: 1")


def test_a_tracker_that_hangs_is_left_behind(tmp_path, monkeypatch):
    """A run waits for the last rows only so long."""
    held = threading.Event()

    class Hanging(Failing):
        def log(self, points):
            held.wait(30)

    monkeypatch.setitem(trackers.TRACKERS, "trackio", Hanging)
    monkeypatch.setattr(follow, "CLOSE_S", 0.2)
    warned = []
    (tmp_path / "manifest.json").write_text("{}")
    with Follower(("trackio",), warned.append) as follower:
        follower.begin(tmp_path)
    held.set()
    assert warned == ["trackio did not end within 0.2 s; qdsim export sends what is missing"]


def test_trackers_are_checked_before_a_run_starts(tmp_path, monkeypatch):
    """An unknown one, and one that is not installed: one line with the command that installs it."""
    done = command("run", "quickstart", "--out", tmp_path / "out", "--track", "paper")
    assert done.returncode == 2
    assert done.stderr == ("qdsim: --track = 'paper': no such tracker; allowed: tensorboard, wandb, mlflow, trackio\n")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(follow, "find_spec", lambda name: None)
    for name in trackers.TRACKERS:
        with pytest.raises(BadInput) as raised:
            check_trackers([name])
        assert str(raised.value) == f"--track = '{name}': it is not installed: pip install 'qdsim[{name}]'"
    assert check_trackers(["mlflow", "mlflow"], installed=False) == ("mlflow",)


@pytest.mark.filterwarnings("ignore")  # of MLflow's own
def test_mlflow_holds_the_same(tracked, tmp_path, monkeypatch):
    """In a local database, exported twice: a run for each series below one of the run's id."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    for _ in range(2):
        export(tracked.path, ["mlflow"])
    client = mlflow.MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("qdsim").experiment_id])
    (parent,) = [run for run in runs if run.info.run_name == tracked.run_id]
    found = {}
    for run in runs:
        for name in run.data.metrics:
            for metric in client.get_metric_history(run.info.run_id, name):
                key = (run.info.run_name, name, metric.step)
                assert key not in found
                found[key] = metric.value
        if run is not parent:
            assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
            assert run.data.params["train.rounds"] == "2"
            assert run.info.status == "FINISHED"
    assert found == expected(tracked)


def wandb_records(content):
    """The records of a file that W&B syncs: after 7 bytes, blocks of 32 KB of pieces (checksum, length, kind)."""
    assert content[:4] == b":W&B"
    place, record = 7, b""
    while place + 7 <= len(content):
        room = 32768 - place % 32768
        if room < 7:  # the rest of a block that is too short for a piece
            place += room
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


@pytest.mark.filterwarnings("ignore")  # of W&B's own
def test_wandb_offline_holds_the_same(tracked, tmp_path):
    """Its own files, exported twice by the command, since W&B writes the last of them when a process ends."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    for _ in range(2):
        done = command("export", tracked.path, "--to", "wandb", "--out", tmp_path, WANDB_MODE="offline")
        assert done.returncode == 0, done.stderr
    found, names, times = {}, {}, Counter()
    for path in (tmp_path / tracked.run_id / "wandb").glob("offline-run-*/*.wandb"):
        for data in wandb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                names[path] = record.run.display_name
                assert (record.run.run_group, record.run.project) == (tracked.run_id, "qdsim")
            if record.HasField("history"):
                items = record.history.item
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                for metric, value in row.items():
                    phase = metric.split("/")[0]
                    if not metric.startswith("_") and metric != f"{phase}/round":
                        key = (names[path], metric, row[f"{phase}/round"])
                        found[key] = value
                        times[key] += 1
    assert found == expected(tracked)
    assert set(times.values()) == {1}


@pytest.mark.filterwarnings("ignore")  # of Trackio's own
def test_trackio_holds_the_same(tracked, tmp_path):
    """In a local database, exported twice by the command, in a process whose Trackio knows no other folder."""
    pytest.importorskip("trackio")
    for _ in range(2):
        done = command("export", tracked.path, "--to", "trackio", TRACKIO_DIR=str(tmp_path))
        assert done.returncode == 0, done.stderr
    code = (
        "import json\nfrom trackio.sqlite_storage import SQLiteStorage as S\n"
        "print(json.dumps({r: S.get_logs('qdsim', r) for r in S.get_runs('qdsim')}))"
    )
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    found = {}
    for name, rows in json.loads(said.splitlines()[-1]).items():
        for row in rows:
            for metric, value in row.items():
                phase = metric.split("/")[0]
                if "/" in metric and metric != f"{phase}/round":
                    key = (name.removeprefix(f"{tracked.run_id}/"), metric, row[f"{phase}/round"])
                    assert key not in found
                    found[key] = value
    assert found == expected(tracked)
