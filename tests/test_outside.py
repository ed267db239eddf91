"""Methods, networks, data sets, attacks and server rules of other packages: the example runs, bad ones are refused."""

import os
import re
import subprocess
import sys
import textwrap

import pytest

from qdsim import plugins
from qdsim.algorithms import methods
from qdsim.errors import BadInput, ClientFailed
from qdsim.experiment import config
from qdsim.store.run_directory import read_manifest
from qdsim.store.verify import difference
from tests import examples
from tests.conftest import PROJECT
from tests.runs import run, table

SHORT = {"train.rounds": 3, "train.steps": 3, "drift.rounds": 2, "recover.rounds": 1, "relearn.rounds": 1}
"""What the example's job is cut down to: two rounds show what the third would."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder where the example package is installed."""
    return examples.install(tmp_path_factory.mktemp("forgetful"))


def qdsim(*arguments, path, cwd=PROJECT):
    """Run a command with another package on the path."""
    env = os.environ | {"PYTHONPATH": f"{PROJECT}{os.pathsep}{path}"}
    command = [sys.executable, "-m", "qdsim", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=280)


@pytest.mark.ray
def test_the_example_runs_on_ray_as_inline(installed, tmp_path):
    """Its method, network, data set, attack and server rule at once; in another folder than its own.

    Every value is the same inline, where the things are named by where they stand, from the package's folder.
    """
    short = [part for key, value in SHORT.items() for part in ("--set", f"{key}={value}")]
    done = qdsim("run", examples.JOB, *short, "--out", tmp_path / "ray", path=installed, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Drift +\d", done.stdout)
    (found,) = (tmp_path / "ray").glob("forgetful-*")
    assert set(table(found, "stages")["method"]) == {"shared", "drift", "quickdrop", "retrain"}
    assert set(table(found, "membership")["attack"]) == {"confidence"}
    manifest = read_manifest(found)
    assert manifest["methods"]["drift"]["title"] == "Drift"
    assert manifest["data"]["classes"] == 4
    references = {
        "methods": '["forgetful.drift:METHOD", "quickdrop", "retrain"]',
        "membership": '["forgetful.confidence:ATTACK"]',
        "data.dataset": "forgetful.stripes:stripes",
        "model.kind": "forgetful.two_paths:two_paths",
        "server.kind": "forgetful.clipped:clipped",
    }
    named = [part for key, value in (references | SHORT).items() for part in ("--set", f"{key}={value}")]
    folder = examples.FORGETFUL
    here = qdsim("run", "job.toml", *named, "--engine", "inline", "--out", tmp_path / "inline", path="", cwd=folder)
    assert here.returncode == 0, here.stdout + here.stderr
    (inline,) = (tmp_path / "inline").glob("forgetful-*")
    assert difference(found, inline) is None


def test_what_is_sent_to_a_cluster(installed, tmp_path, monkeypatch):
    """The package once, however often it is named, and the declaration of its entry points; nothing built in."""
    monkeypatch.syspath_prepend(installed)
    job = config.load(examples.JOB)
    named = [("method", "drift"), ("attack", "confidence"), ("network", "two_paths"), ("server rule", "clipped")]
    assert job.outside() == [*named, ("data set", "stripes")]
    assert plugins.copy_packages(job.outside(), tmp_path) == ["forgetful"]
    sent = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"forgetful/drift.py", "forgetful-0.1.0.dist-info/entry_points.txt"} <= sent
    assert not any("pyc" in name for name in sent)
    quickstart = config.load(PROJECT / "jobs" / "quickstart.toml", overrides=["model.kind=torchvision:resnet18"])
    assert quickstart.outside() == []


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """A package in the folder where the command runs, with data, keys and hidden files beside its code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    files = [
        "__init__.py",
        "deep/net.py",
        "deep/table.json",
        "deep/__pycache__/net.pyc",
        ".env",
        ".git/config",
        "a.pem",
    ]
    for file in files:
        path = tmp_path / "theirs_packed" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
    yield tmp_path / "theirs_packed"
    sys.modules.pop("theirs_packed", None)


def test_keys_and_hidden_files_stay_here(packaged, tmp_path):
    """Code and the JSON file beside it are sent: what a wheel would hold."""
    (tmp_path / "into").mkdir()
    assert plugins.copy_packages([("method", "theirs_packed.deep.net:M")], tmp_path / "into") == ["theirs_packed"]
    sent = {str(path.relative_to(tmp_path / "into")) for path in (tmp_path / "into").rglob("*") if path.is_file()}
    assert sent == {f"theirs_packed/{name}" for name in ("__init__.py", "deep/net.py", "deep/table.json")}


def test_a_package_with_data_in_it_is_not_sent(packaged, tmp_path):
    """8 + 3 MB are more than 10: nothing is copied, and the largest files are named with their sizes."""
    for name, size in (("images.npy", 8_000_000), ("labels.npy", 3_000_000)):
        with open(packaged / "deep" / name, "wb") as file:
            file.truncate(size)
    (tmp_path / "into").mkdir()
    said = r"would be sent with 11.0 MB, 10 at most; largest: deep/images.npy \(8.0 MB\), deep/labels.npy \(3.0 MB\), "
    with pytest.raises(BadInput, match=said):
        plugins.copy_packages([("method", "theirs_packed.deep.net:M")], tmp_path / "into")
    assert not list((tmp_path / "into").iterdir())


GOOD = """
    from dataclasses import dataclass, replace
    from qdsim.algorithms import fedavg
    from qdsim.algorithms.methods import Method
    from qdsim.data.forgetting import View

    @dataclass(frozen=True)
    class Settings:
        rounds: int = 1

    METHOD = Method("mine", "Mine", __name__, Settings)

    def phases(hyper, settings, request, history):
        stage = replace(hyper.train, rounds=settings.rounds)
        return [fedavg.phase("unlearn", stage, View("real", without=request.forgotten))]
"""
BAD = {
    "exits": ("import sys\nsys.exit(3)", r"importing theirs fails: SystemExit: 3 \(theirs.py, line 2\)"),
    "refuses fails": (
        GOOD + "    def refuses(model):\n        return model.depths",
        r"its refuses\(\) fails: AttributeError: .* \(theirs.py, line 17\)",
    ),
    "refuses": (GOOD + "    def refuses():\n        pass", r"too many positional arguments; wanted is refuses\(model"),
    "storage": (
        GOOD + "    def storage_bytes(hyper):\n        return 0, 0",
        r"theirs.storage_bytes: too many positional arguments; wanted is storage_bytes\(hyper, settings,",
    ),
    "raises": ("raise RuntimeError('no')", r"importing theirs fails: RuntimeError: no \(theirs.py, line 1\)"),
    "needs": ("import nothing_of_that_name", "it needs nothing_of_that_name, which is not here"),
    "no such name": ("OTHER = 1", "theirs has no METHOD; it has OTHER"),
    "no method": ("METHOD = 3", "is a int; wanted is a qdsim.algorithms.methods.Method"),
    "a name of ours": (GOOD.replace('"mine"', '"sga"'), "which is a method of qdsim: choose another"),
    "a section's name": (GOOD.replace('"mine"', '"train"'), "has the name of a section of every job"),
    "a bad name": (GOOD.replace('"mine"', '"My Own"'), "its name is 'My Own'; allowed are small letters"),
    "no default": (GOOD.replace("rounds: int = 1", "rounds: int"), "its setting rounds has no default"),
    "signature": (GOOD.replace("settings, request, history", "settings"), "phases: too many positional arguments"),
    "no phases": (GOOD.replace("def phases", "def faces"), "theirs has no function phases"),
    "fails": (
        GOOD.replace("hyper.train", "hyper.training"),
        r"its phases\(\) fails: AttributeError.*theirs.py, line 14",
    ),
    "nonsense": (
        GOOD.replace("return [", "return 'unlearn' #"),
        r"its phases\(\) returned 'unlearn'; wanted is a list",
    ),
    "no phase": (GOOD.replace("return [", "return [3] #"), r"returned a list of int; wanted is a list of Phase"),
    "phase's name": (GOOD.replace('"unlearn"', '"forget"'), "a phase is named 'forget'; allowed: unlearn, recover"),
    "twice": (GOOD.replace("return [", "return 2 * ["), "its phases are unlearn, unlearn: each name may stand once"),
    "step": (
        GOOD.replace("return [", "return [replace(").replace("forgotten))]", "forgotten)), client_step=len)]"),
        "the client_step of its phase unlearn: ",
    ),
}


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """Write a module into the folder where the command runs; forget it afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    methods.find.cache_clear()

    def write(text):
        (tmp_path / "theirs.py").write_text(textwrap.dedent(text), encoding="utf-8")
        return tmp_path / "runs"

    yield write
    sys.modules.pop("theirs", None)
    methods.find.cache_clear()


@pytest.mark.parametrize("why", BAD)
def test_a_bad_method_is_refused_in_one_line(theirs, why):
    """Before anything runs, with the key, the cause and the place."""
    text, said = BAD[why]
    with pytest.raises(BadInput, match=said) as refused:
        run(theirs(text), methods=["theirs:METHOD"])
    assert str(refused.value).startswith("methods = ")
    assert "\n" not in str(refused.value)


def test_its_settings_are_checked_as_ours_are(theirs):
    """An unknown key, a wrong type; a default that the job does not name is there."""
    out = theirs(GOOD)
    with pytest.raises(BadInput, match=r"mine.round = 2: unknown key; did you mean rounds\?"):
        run(out, methods=["theirs:METHOD"], mine={"round": 2})
    with pytest.raises(BadInput, match=r"mine.rounds = 'two': must be a whole number"):
        run(out, methods=["theirs:METHOD"], mine={"rounds": "two"})
    with pytest.raises(BadInput, match=r"mine = .*unknown key"):
        run(out, mine={"rounds": 2})
    made = run(out, methods=["theirs:METHOD"], sweep={"mine.rounds": [1, 2]})
    assert table(made, "stages").query("method == 'mine'")["rounds_run"].tolist() == [1, 2]
    assert read_manifest(made)["config"]["mine"] == {"rounds": 1}


def test_a_server_step_that_returns_nonsense_ends_the_run_in_one_line(theirs):
    """It can only be seen when it runs."""
    text = GOOD.replace("return [", "return [replace(").replace(
        "forgotten))]", "forgotten)), server_step=lambda p, u, ctx: list(u))]"
    )
    with pytest.raises(BadInput, match=r"unlearn.server_step = 'list': a server step returns the model's parameters"):
        run(theirs(text), methods=["theirs:METHOD"])
    sys.modules.pop("theirs")
    methods.find.cache_clear()
    text = GOOD.replace("return [", "return [replace(").replace(
        "forgotten))]", "forgotten)), client_step=lambda c, p, *, ctx, compute: 3)]"
    )
    with pytest.raises(ClientFailed, match=r"client 0 failed in unlearn, round 1.*TypeError"):
        run(theirs(text), methods=["theirs:METHOD"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 3", "TypeError: 'int' object is not iterable"),
        ("return history.rounds_of_mine, 0", "AttributeError: 'History' object has no attribute 'rounds_of_mine'"),
    ],
)
def test_what_it_says_of_its_storage_ends_the_run_in_one_line(theirs, body, said):
    """It is asked with the history of training, so after it; training is stored, and the next run takes it up."""
    text = GOOD + f"    def storage_bytes(hyper, settings, request, history):\n        {body}"
    with pytest.raises(BadInput, match=r"^methods = 'mine': its storage_bytes\(\) fails: " + said):
        run(theirs(text), methods=["theirs:METHOD"])


def test_names_that_are_nothing_are_refused_with_what_there_is():
    """Methods, attacks and data sets; networks and server rules have tests of their own."""
    for changes, said in [
        ({"methods": ["drop"]}, "methods = 'drop': no such method; allowed: quickdrop, "),
        ({"methods": ["nowhere.at_all:M"]}, "there is no module nowhere; install its package"),
        ({"membership": ["guess"]}, "membership = 'guess': no such attack; allowed: loss_threshold, "),
        ({"model": {"kind": "transformer"}}, r"model.kind = 'transformer': allowed: convnet, mlp, lenet, resnet, "),
        (
            {"model": {"options": {"width": 3}}},
            "model.options = {width = 3}: convnet has none; it has model.width and model.depth",
        ),
        ({"server": {"kind": "sgd"}}, "server.kind = 'sgd': no such server rule; allowed: mean, momentum, adam, yogi"),
    ]:
        with pytest.raises(BadInput, match=said):
            config.validate({"name": "x", "methods": ["retrain"], **changes})


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("3", "calling it fails: TypeError"),
        ("a, b", "it returned 2 arrays; wanted are train_images"),
        ("a / 2, b, a, b", r"its images are float64 of shape \(4, 1, 8, 8\); wanted is uint8"),
        ("a[:, 0], b, a, b", r"its images are uint8 of shape \(4, 8, 8\)"),
        ("a, b[:3], a, b", r"its labels are int64 of shape \(3,\) for 4 images"),
        ("a, b - 1, a, b", "a training label is -1"),
    ],
)
def test_a_bad_reader_of_data_is_refused(theirs, returned, said):
    """Counts, shapes, types and labels."""
    out = theirs(f"""
        import numpy as np

        def read(root):
            a, b = np.zeros((4, 1, 8, 8), np.uint8), np.arange(4)
            return {returned}
    """)
    with pytest.raises(BadInput, match=said):
        run(out, data={"dataset": "theirs:read"})


HALF = '[{"subset": s, "member_rate": 0.5, "auc": 0.5, "tpr_at_1pct_fpr": 0.0} for s in ("forget", "retain")]'


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        ("lambda f: [{}]", "its judge fails: KeyError"),
        ("None", "is an Attack without judge"),
        ("lambda: []", r"its judge: too many positional arguments; wanted is judge\(features\)"),
        (f"lambda f: {HALF}[:1]", r"its rows are of \['forget'\]; wanted is one of forget and one of retain"),
        ("lambda f: exit(0)", r"its judge fails: SystemExit: 0 "),
        # of a client request there are no such samples
        (f"lambda f: f.forget_others[0].sum() and {HALF}", "its judge fails: IndexError"),
    ],
)
def test_a_bad_attack_is_refused(theirs, judge, said):
    """No function, and one that returns nonsense: before anything runs, for hours of training come before an attack."""
    from qdsim.federation import attacks

    attacks.find.cache_clear()
    out = theirs(f"""
        from qdsim.federation.attacks import Attack

        ATTACK = Attack("theirs", "theirs", "", {judge})
    """)
    with pytest.raises(BadInput, match=said):
        run(out, methods=["retrain"], membership=["theirs:ATTACK"], requests=[{"kind": "client", "target": 3}])
    assert not out.exists()
    attacks.find.cache_clear()
