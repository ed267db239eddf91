"""The rooms stay apart: who may import whom."""

import ast
import subprocess
import sys

import pytest

from tests.conftest import PROJECT

ALL = {"anything"}
LEAVES = {
    "qdsim.errors",
    "qdsim.storage",
    "qdsim.seeds",
    "qdsim.params",
    "qdsim.hyper",
    "qdsim.clocks",
    "qdsim.stopping",
}
VALUES = LEAVES | {"qdsim.data", "qdsim.models", "qdsim.clients", "qdsim.forgetting", "qdsim.phases", "qdsim.history"}
VALUES |= {"qdsim.derivatives", "qdsim.patches", "qdsim.winograd"}
RULES: dict[str, tuple[set[str], set[str]]] = {
    # module: (what it may import of qdsim, which third parties)
    "errors": (set(), set()),
    "storage": ({"qdsim.errors"}, {"pyarrow"}),
    "hyper": (set(), set()),
    "methods": (set(), set()),
    "imports": (set(), set()),
    "ray_environment": (set(), set()),
    "ray_preload": ({"qdsim.imports", "qdsim.ray_clients"}, set()),
    "seeds": (set(), {"torch", "numpy"}),
    "params": (set(), {"torch", "numpy"}),
    "clocks": (set(), {"torch"}),
    "stopping": (set(), set()),
    "arrays": ({"qdsim.errors", "qdsim.storage"}, {"numpy"}),
    "history": (LEAVES, {"torch", "numpy"}),
    "models": (LEAVES, {"torch"}),
    "winograd": (set(), {"torch"}),
    "patches": (LEAVES | {"qdsim.models"}, {"torch"}),
    "derivatives": (LEAVES | {"qdsim.models", "qdsim.patches", "qdsim.winograd"}, {"torch"}),
    "forgetting": (set(), {"numpy"}),
    "data": (LEAVES, {"numpy", "torchvision", "sklearn", "pyarrow", "PIL", "scipy"}),
    "partition": (LEAVES, {"numpy"}),
    "clients": (VALUES, {"torch", "numpy"}),
    "phases": (VALUES, {"torch", "numpy"}),
    "algorithms": (VALUES | {"qdsim.algorithms"}, {"torch", "numpy"}),
    "evaluation": (VALUES, {"torch", "numpy"}),
    "hosts": (VALUES | {"qdsim.arrays", "qdsim.evaluation", "qdsim.algorithms"}, {"torch", "numpy"}),
    "federation": (VALUES | {"qdsim.evaluation", "qdsim.algorithms", "qdsim.hosts"}, {"torch", "numpy"}),
    "tables": (set(), {"pyarrow"}),
    "results": ({"qdsim.arrays", "qdsim.tables", "qdsim.errors", "qdsim.storage"}, {"pyarrow"}),
    "summary": ({"qdsim.results", "qdsim.errors", "qdsim.storage"}, {"pandas", "pyarrow"}),
    "profiles": ({"qdsim.config"}, set()),
    "sections": ({"qdsim.hyper"}, {"pydantic"}),
    "config": (
        {"qdsim.errors", "qdsim.hyper", "qdsim.methods", "qdsim.profiles", "qdsim.sections", "qdsim.storage"},
        {"pydantic", "pydantic_core"},
    ),
    "membership": ({"qdsim.evaluation"}, {"numpy", "sklearn"}),
    "attacks": (ALL, {"numpy"}),
    "gallery": ({"qdsim.hosts"}, {"numpy", "PIL"}),
    "rows": (ALL, {"numpy"}),
    "progress": ({"qdsim.rows", "qdsim.forgetting", "qdsim.plan"}, set()),
    "checkpoint": (
        {"qdsim.arrays", "qdsim.results", "qdsim.params", "qdsim.history", "qdsim.models", "qdsim.storage"},
        {"numpy"},
    ),
    "footprint": ({"qdsim.plan"}, set()),
    "pace": (set(), set()),
    "status": (ALL, {"pyarrow"}),
    "watch": ({"qdsim.display", "qdsim.status", "qdsim.storage"}, {"rich"}),
    "planner": (ALL, {"torch"}),
    "prospect": ({"qdsim.display", "qdsim.estimate", "qdsim.planner"}, {"rich"}),
    "ray_metrics": ({"qdsim.progress"}, {"ray"}),
    "ray_probe": (ALL, {"ray", "torch"}),
    "layout": ({"qdsim.errors", "qdsim.sections"}, set()),
    "estimate": (ALL, {"numpy"}),
    "probe": (ALL, {"numpy", "torch"}),
    "trained": (ALL, {"numpy", "pyarrow"}),
    "ray_cluster": ({"qdsim.sections", "qdsim.errors", "qdsim.layout", "qdsim.ray_environment"}, {"ray"}),
    "ray_jobs": ({"qdsim.errors", "qdsim.ray_environment"}, {"ray"}),
    "ray_clients": (VALUES | {"qdsim.chaos", "qdsim.evaluation", "qdsim.hosts"}, {"ray", "numpy"}),
    "lock": ({"qdsim.errors", "qdsim.storage"}, set()),
    "verify": ({"qdsim.errors", "qdsim.results", "qdsim.storage", "qdsim.tables"}, {"pandas", "pyarrow"}),
    "chaos": ({"qdsim.errors", "qdsim.storage"}, set()),
    "ray_placement": ({"qdsim.errors", "qdsim.layout", "qdsim.ray_cluster"}, {"ray"}),
    "ray_crew": (ALL, {"ray"}),
    "ray_actors": (ALL, {"ray"}),
    "ray_executor": (ALL, {"ray", "numpy"}),
    "ray_driver": (ALL, {"ray"}),
    "plan": (ALL, {"numpy"}),
    "experiment": (ALL, set()),
    "launch": (ALL, {"torch"}),
    "display": (ALL, {"rich", "pandas"}),
    "cli": (ALL, {"typer", "rich"}),
    "bench": (ALL, {"torch", "numpy", "ray", "pyarrow", "rich", "flwr", "bare", "PIL"}),
    "__init__": (set(), set()),
    "__main__": ({"qdsim.cli"}, set()),
}


def imports_of(path) -> set[str]:
    """Every module that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            own = node.module in ("qdsim", "qdsim.algorithms")
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if own else {node.module}
    return found


@pytest.mark.parametrize("path", sorted((PROJECT / "qdsim").rglob("*.py")), ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_modules_import_only_what_they_may(path):
    """Ray is imported by the files whose name says so, printing libraries by display and cli alone."""
    room = path.parent.name if path.parent.name in ("algorithms", "bench") else path.stem
    own, third_party = RULES[room]
    for name in imports_of(path):
        top = name.split(".")[0]
        if top == "qdsim":
            allowed = own == ALL or any(name == o or name.startswith(f"{o}.") for o in own)
            assert allowed or name == "qdsim.__version__", f"{path.name} may not import {name}"
        else:
            assert top in third_party or top in sys.stdlib_module_names, f"{path.name} may not import {name}"


@pytest.mark.parametrize("path", sorted((PROJECT / "analysis").glob("*.py")), ids=lambda p: p.stem)
def test_analysis_reads_tables_and_manifests_alone(path):
    """Of qdsim only what reads runs; pandas and matplotlib, and in the command its printers."""
    own = {"analysis", "qdsim.errors", "qdsim.results", "qdsim.storage", "qdsim.summary", "qdsim.tables"}
    third_party = {"pandas", "numpy", "pyarrow", "matplotlib"}
    third_party |= {"__main__": {"typer", "rich"}, "page": {"jinja2"}}.get(path.stem, set())
    for name in imports_of(path):
        top = name.split(".")[0]
        allowed = top == "analysis" or name in own or top in third_party or top in sys.stdlib_module_names
        assert allowed, f"{path.name} may not import {name}"


@pytest.mark.parametrize(("module", "unwanted"), [("qdsim.hosts", {"ray"}), ("qdsim.ray_preload", set())])
def test_a_client_loads_no_reader_of_files(module, unwanted):
    """What an actor imports leaves torchvision, pandas, pyarrow, scikit-learn, pydantic and rich out."""
    unwanted = unwanted | {"torchvision", "pandas", "pyarrow", "sklearn", "pydantic", "rich", "typer"}
    code = f"import sys, {module}\nprint(sorted({unwanted!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_job_is_checked_without_torch():
    """Nor Ray nor pandas: a mistake is told at once, and torch is imported while Ray starts."""
    unwanted = {"torch", "torchvision", "ray", "pandas", "sklearn"}
    code = f"import sys\nfrom qdsim import cli, config, display, launch\nprint(sorted({unwanted!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_room_holds_too_much():
    """No Python file has more than 400 lines, and none is called utils, common, base or helpers."""
    for folder in ("qdsim", "analysis", "tests"):
        for path in (PROJECT / folder).rglob("*.py"):
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path
            assert path.stem not in ("utils", "common", "base", "helpers", "types", "logging"), path
