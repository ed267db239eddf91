"""The files in ``cluster/``: each fits its schema, and each is safe as it stands."""

import copy
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml

from qdsim.experiment import config
from qdsim.ray_engine.metrics import METRICS
from tests.cluster.kubernetes_shapes import shape
from tests.conftest import PROJECT

CLUSTER = PROJECT / "cluster"
FILES = sorted(path for path in CLUSTER.rglob("*") if path.is_file())
NAMES = [str(path.relative_to(CLUSTER)) for path in FILES]
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in zip(NAMES, FILES, strict=True)}
MANIFESTS = {
    f"{name}:{i}": document
    for name, text in TEXTS.items()
    if name.startswith(("kuberay/", "grafana/")) and name.endswith(".yaml")
    for i, document in enumerate(yaml.safe_load_all(text))
}
RAY_MANIFESTS = {name: m for name, m in MANIFESTS.items() if m["kind"] in ("RayJob", "RayCluster")}
RAY_UP = {name: yaml.safe_load(text) for name, text in TEXTS.items() if name.startswith("ray-up/")}
LABEL = {"app.kubernetes.io/part-of": "qdsim"}


def walk(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield path, value
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield from walk(inner, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def ray_cluster(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"].get("rayClusterSpec", manifest["spec"])


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every pod template of a RayJob or RayCluster."""
    return [inner for _, inner in walk(manifest) if isinstance(inner, dict) and "containers" in inner.get("spec", {})]


def containers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [container for pod in pods(manifest) for container in pod["spec"]["containers"]]


def ray_starts() -> dict[str, list[str]]:
    """Return the arguments of every ``ray start`` that the files lead to."""
    found = {}
    for name, content in RAY_UP.items():
        for key in ("head_start_ray_commands", "worker_start_ray_commands"):
            for command in content[key]:
                if "ray start" in command:
                    found[f"{name} {key}"] = shlex.split(command.split("ray start")[1])
    for name, manifest in RAY_MANIFESTS.items():
        cluster = ray_cluster(manifest)
        head = [f"--{k}={v}" for k, v in cluster["headGroupSpec"]["rayStartParams"].items()]
        found[f"{name} head"] = ["--head", *head]
        for group in cluster["workerGroupSpecs"]:
            worker = [f"--{k}={v}" for k, v in group["rayStartParams"].items()]
            found[f"{name} {group['groupName']}"] = ["--address=192.0.2.1:6379", *worker]
    return found


STARTS = ray_starts()


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_knows_every_key_of_a_manifest(name):
    """At every level, with the types that KubeRay 1.7's CRDs and Kubernetes give them."""
    jsonschema.validate(MANIFESTS[name], shape(MANIFESTS[name]))


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_misspelt_key_of_a_manifest_is_refused(name):
    """Each key in turn, at every level but in the maps that are free: labels, and options of ``ray start``."""
    checks = jsonschema.Draft7Validator(shape(MANIFESTS[name]))
    free = {"labels", "matchLabels", "rayStartParams"}
    tried = 0
    for path, _ in walk(MANIFESTS[name]):
        if path and isinstance(path[-1], str) and path[-2:-1] not in {(f,) for f in free}:
            spoilt = copy.deepcopy(MANIFESTS[name])
            parent = at(spoilt, path[:-1])
            parent[path[-1] + "x"] = parent.pop(path[-1])
            assert not checks.is_valid(spoilt), path
            tried += 1
    assert tried > 7


@pytest.mark.parametrize("name", RAY_UP)
def test_ray_up_takes_its_file(name):
    """By Ray's own schema, as written and with Ray's defaults filled in; a misspelt key is refused."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    content = RAY_UP[name]
    filled = prepare_config(copy.deepcopy(content))
    validate_config(filled)
    for key in ("setup_commands", "head_start_ray_commands", "worker_start_ray_commands"):
        assert set(content[key]) <= set(filled[key])
    for key in content:
        spoilt = {k if k != key else f"{k}x": v for k, v in filled.items()}
        with pytest.raises(jsonschema.ValidationError):
            validate_config(spoilt)


@pytest.mark.parametrize("name", RAY_UP)
def test_ray_up_copies_the_project_and_the_token(name):
    """What it mounts is there, and the token is closed to others before Ray starts."""
    mounts = RAY_UP[name]["file_mounts"]
    sources = {source for target, source in mounts.items() if target.startswith("~/qdsim/")}
    assert sources == {"pyproject.toml", "README.md", "LICENSE", "qdsim", "analysis", "jobs"}
    assert all((PROJECT / source).exists() for source in sources)
    assert mounts["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert any("chmod 600 ~/.ray/auth_token" in command for command in RAY_UP[name]["setup_commands"])


@pytest.mark.parametrize("name", STARTS)
def test_ray_start_takes_the_options_that_it_is_given(name, monkeypatch):
    """All its checks pass, up to the moment at which it would start a node."""
    from ray.scripts.scripts import start

    class WouldStartError(Exception):
        pass

    def would_start(*_: Any, **__: Any) -> None:
        raise WouldStartError

    monkeypatch.setattr("ray._private.node.Node", would_start)
    monkeypatch.setenv("RAY_HEAD_IP", "192.0.2.1")
    args = [word.replace("$RAY_HEAD_IP", "192.0.2.1") for word in STARTS[name]]
    with pytest.raises(WouldStartError):
        start.main(args, standalone_mode=False)
    with pytest.raises(Exception, match="--misspelt"):
        start.main([*args, "--misspelt=1"], standalone_mode=False)


@pytest.mark.parametrize("name", RAY_MANIFESTS)
def test_every_container_authenticates_and_reports_to_nobody(name):
    """KubeRay makes the token; each container says the mode itself, so that nothing is left to what Ray finds."""
    assert ray_cluster(RAY_MANIFESTS[name])["authOptions"] == {"mode": "token"}
    for container in containers(RAY_MANIFESTS[name]):
        env = {entry["name"]: entry["value"] for entry in container["env"]}
        assert env["RAY_AUTH_MODE"] == "token"
        assert env["RAY_USAGE_STATS_ENABLED"] == "0"


@pytest.mark.parametrize("name", [name for name in NAMES if re.search(r"\bray (start|symmetric-run)\b", TEXTS[name])])
def test_whatever_starts_ray_sets_token_authentication(name):
    """In the command itself, or for all that follows in the same script."""
    text = re.sub(r"(?m)^\s*#.*", "", TEXTS[name])
    code = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)) if name.endswith(".md") else text
    commands = RAY_UP[name].values() if name in RAY_UP else [[code]]
    for command in (c for some in commands if isinstance(some, list) for c in some):
        for started in re.finditer(r"\bray (start|symmetric-run)\b", command):
            before = command[: started.start()]
            assert "RAY_AUTH_MODE=token" in before
            assert name.endswith(".md") or "RAY_USAGE_STATS_ENABLED=0" in before
    assert "RAY_AUTH_MODE=disabled" not in text


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_open_to_the_world(name):
    """No address of every interface, no ingress, no port of the host, no service but inside the cluster."""
    text = re.sub(r"(?m)#.*$", "", TEXTS[name]) if not name.endswith(".md") else ""
    assert not re.search(r"0\.0\.0\.0|Ingress\b(?!, Egress)|NodePort|LoadBalancer|hostNetwork|hostPort|hostPath", text)


def test_the_dashboard_stays_on_loopback():
    """Under ``ray up`` and in a RayCluster; a RayJob's must answer KubeRay, and network-policy.yaml lets only it in."""
    heads = {name: args for name, args in STARTS.items() if "--head" in args and "rayjob" not in name}
    assert len(heads) == 5
    assert all("--dashboard-host=127.0.0.1" in args for args in heads.values())
    assert "--dashboard-host=127.0.0.1" in TEXTS["slurm.sbatch"]
    for manifest in RAY_MANIFESTS.values():
        head = ray_cluster(manifest)["headGroupSpec"]
        assert head["serviceType"] == "ClusterIP"
        # what is listed here is what the service has: not 10001, Ray Client's
        ports = head["template"]["spec"]["containers"][0]["ports"]
        assert {port["containerPort"] for port in ports} == {6379, 8265, 8080}


def test_the_network_policy_holds_every_pod():
    """Each pod has its label; the dashboard is for KubeRay alone, and all that comes in has a sender."""
    spec = MANIFESTS["kuberay/network-policy.yaml:0"]["spec"]
    assert spec["podSelector"] == {"matchLabels": LABEL}
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    every = [pod for manifest in RAY_MANIFESTS.values() for pod in pods(manifest)]
    assert len(every) == 10
    assert all(pod["metadata"]["labels"] == LABEL for pod in every)
    assert all(rule.get("from") for rule in spec["ingress"])
    assert all(rule.get("to") for rule in spec["egress"])
    outside = [rule for rule in spec["ingress"] if rule["from"] != [{"podSelector": {"matchLabels": LABEL}}]]
    assert [[port["port"] for port in rule["ports"]] for rule in outside] == [[8265], [8080]]
    assert "kuberay-operator" in str(outside[0])


@pytest.mark.parametrize("name", RAY_MANIFESTS)
def test_containers_are_not_root_and_gain_nothing(name):
    """A numbered user, no capabilities, no way up, no token of Kubernetes."""
    for pod in pods(RAY_MANIFESTS[name]):
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["automountServiceAccountToken"] is False
    for container in containers(RAY_MANIFESTS[name]):
        locked = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["securityContext"] == locked


@pytest.mark.parametrize("name", NAMES)
def test_no_file_holds_a_secret(name):
    """No key of a cloud, no private key, nothing long and random, no value for a name that asks for a secret."""
    text = TEXTS[name]
    assert not re.search(r"AKIA[0-9A-Z]{16}|BEGIN [A-Z ]*PRIVATE KEY|\b[0-9a-f]{32,}\b|\bey[\w-]{20,}\.", text)
    assert not re.search(r"(?i)(password|passwd|secret_access_key|api_key|auth_token)\s*[:=]\s*['\"]?[\w+/]{8,}", text)


@pytest.mark.parametrize("name", RAY_MANIFESTS)
def test_a_job_carries_no_secret(name):
    """Ray shows metadata and runtime environments to all who ask: there are none; credentials come from a Secret."""
    manifest = RAY_MANIFESTS[name]
    assert not {"metadata", "runtimeEnvYAML"} & set(manifest["spec"])
    for container in containers(manifest):
        named = [entry["name"] for entry in container["env"]]
        assert not [n for n in named if re.search("TOKEN|SECRET|PASSWORD|KEY", n)]


def test_gpus_are_asked_for_in_the_gpu_files_alone():
    """By the workers, in limits, where KubeRay looks; a head on a GPU node sees none."""
    for name, manifest in RAY_MANIFESTS.items():
        kind = "gpu" if "gpu" in name else "cpu"
        workers = [container for container in containers(manifest) if container["name"] == "ray-worker"]
        gpus = [container["resources"]["limits"].get("nvidia.com/gpu", 0) for container in workers]
        assert gpus == [kind == "gpu"]
        assert ("void" in str(manifest)) == (kind == "gpu")
        assert {container["image"].rsplit(":")[1] for container in containers(manifest)} == {kind}


def test_one_version_of_ray_throughout():
    """Image, manifests and ``ray up`` files name the same, and it is one that qdsim is tested with."""
    named = set(re.findall(r"(?:rayproject/ray:|rayVersion: |ray\[default\]==)(\d[\d.]+\d)", "\n".join(TEXTS.values())))
    assert named == {"2.60.0"}
    assert tuple(map(int, ray.__version__.split(".")[:2])) >= (2, 52)


@pytest.mark.parametrize("name", [name for name in RAY_MANIFESTS if "rayjob" in name])
def test_the_job_that_a_rayjob_runs_is_a_valid_one(name):
    """And it resumes, since each retry is a new cluster."""
    words = shlex.split(RAY_MANIFESTS[name]["spec"]["entrypoint"])
    assert words[:2] == ["qdsim", "run"]
    assert {"--resume", "--address"} <= set(words)
    profile = words[words.index("--profile") + 1] if "--profile" in words else None
    config.load(PROJECT / "jobs" / words[2].rsplit("/", 1)[1], profile=profile)
    mounts = {m["mountPath"]: m for c in containers(RAY_MANIFESTS[name]) for m in c.get("volumeMounts", [])}
    assert words[words.index("--out") + 1] in mounts


def test_the_image_is_not_root_and_holds_what_it_copies():
    """A numbered user from the first command on, a pinned base, and nothing but the project."""
    text = TEXTS["Dockerfile"]
    user = text.index("USER 1000:100")
    assert len(re.findall(r"(?m)^USER", text)) == 1
    assert user < text.index("\nRUN")
    assert "RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0" in text
    copied = {word for line in re.findall(r"(?m)^COPY --chown=1000:100 (.*) \S+$", text) for word in line.split()}
    assert copied == {"pyproject.toml", "README.md", "LICENSE", "qdsim", "analysis", "jobs"}
    kept = {line[1:] for line in TEXTS["Dockerfile.dockerignore"].splitlines() if line.startswith("!")}
    assert kept == copied


def test_the_dashboard_file_shows_every_metric():
    """Those of qdsim all, and of Ray only such as it has; panels neither overlap nor share a number."""
    board = json.loads(TEXTS["grafana/qdsim.json"])
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    named = {metric for expr in asked for metric in re.findall(r"\bray_(\w+)", expr)}
    assert {metric for metric in named if metric.startswith("qdsim_")} == set(METRICS)
    folder = Path(ray.__file__).parent / "dashboard" / "modules"
    known = (folder / "metrics" / "dashboards" / "default_dashboard_panels.py").read_text(encoding="utf-8")
    known += (folder / "reporter" / "reporter_agent.py").read_text(encoding="utf-8").replace('"node_', '"ray_node_')
    assert all(f"ray_{metric}" in known for metric in named - set(METRICS))
    assert len(named - set(METRICS)) >= 6
    cells = [
        (x, y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_readme_says_how_to_use_every_file():
    """Each is named, and every file that it names is there."""
    readme = TEXTS["README.md"]
    for name in NAMES:
        assert name == "README.md" or name in readme or name == "Dockerfile.dockerignore", name
    for path in re.findall(r"(?<!/)cluster/[\w./-]+\w", readme):
        assert (PROJECT / path).exists(), path
