"""The rooms stay apart: a package imports only those before it, and each third party has its room."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT

LAYERS = {
    # package or module: the third parties it may import; it may import of qdsim what stands above it, and itself
    "errors": set(),
    "plugins": set(),
    "ranges": {"annotated_types"},
    "seeds": {"torch", "numpy"},
    "clocks": {"torch"},
    "store": {"numpy", "pandas", "pyarrow", "PIL"},
    "models": {"torch", "numpy", "torchvision", "triton"},
    "data": {"torch", "numpy", "torchvision", "sklearn", "scipy", "pyarrow", "PIL"},
    "algorithms": {"torch", "numpy", "annotated_types"},
    "federation": {"torch", "numpy", "sklearn"},
    "experiment": {"numpy", "pyarrow", "pydantic", "pydantic_core", "annotated_types", "PIL"},
    "planning": {"torch", "numpy"},
    "ray_engine": {"torch", "numpy", "ray"},
    "tracking": {"torch", "pyarrow", "wandb", "mlflow", "trackio"},
    "api": {"torch", "pandas", "pyarrow", "rich", "IPython", "analysis"},
    "tuning": {"pandas", "ray", "optuna"},
    "bench": {"torch", "numpy", "pyarrow", "PIL", "ray", "rich", "flwr", "bare"},
    "doctor": {"torch", "numpy", "ray", "rich"},
    "cli": {"rich", "typer"},
    "__init__": set(),
    "__main__": set(),
}
ORDER = list(LAYERS)
READERS = {"errors", "store"}
"""What the analysis may use of qdsim: it reads runs, and nothing else but the titles in ``algorithms/methods.py``."""


def room_of(path: Path) -> str:
    """The package of a file, or its own name at the top."""
    parts = path.relative_to(PROJECT / "qdsim").parts
    return parts[0] if len(parts) > 1 else path.stem


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "qdsim":
            found |= {f"qdsim.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


@pytest.mark.parametrize(
    "path", sorted((PROJECT / "qdsim").rglob("*.py")), ids=lambda p: str(p.relative_to(PROJECT / "qdsim"))
)
def test_a_package_imports_only_those_above_it(path):
    """One order for all packages; Ray, printing and reading libraries only where they belong."""
    room = room_of(path)
    for name in imports_of(path):
        top, _, rest = name.partition(".")
        if top == "qdsim":
            used = rest.partition(".")[0]
            allowed = used == "__version__" or ORDER.index(used) <= ORDER.index(room)
            assert allowed, f"{path.name} is in {room}, which may not import {name}"
        else:
            known = top in LAYERS[room] or top in sys.stdlib_module_names
            assert known, f"{path.name} is in {room}, which may not import {name}"


@pytest.mark.parametrize("folder", sorted(p for p in (PROJECT / "qdsim").rglob("*") if (p / "__init__.py").exists()))
def test_a_package_says_what_it_is_for(folder):
    """Each ``__init__`` is a docstring and nothing else, so importing one module never brings its neighbours."""
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


@pytest.mark.parametrize("path", sorted((PROJECT / "analysis").glob("*.py")), ids=lambda p: p.stem)
def test_analysis_reads_tables_and_manifests_alone(path):
    """Of qdsim only what reads runs; pandas and matplotlib, and in the command its printers."""
    third_party = {"pandas", "numpy", "pyarrow", "matplotlib"}
    third_party |= {"__main__": {"typer", "rich"}, "page": {"jinja2"}}.get(path.stem, set())
    for name in imports_of(path):
        top, _, rest = name.partition(".")
        reads = top == "qdsim" and (rest.partition(".")[0] in READERS or name == "qdsim.algorithms.methods")
        allowed = top == "analysis" or reads or top in third_party or top in sys.stdlib_module_names
        assert allowed, f"{path.name} may not import {name}"


@pytest.mark.parametrize(
    ("module", "unwanted"), [("qdsim.federation.client_host", {"ray"}), ("qdsim.ray_engine.preload", set())]
)
def test_a_client_loads_no_reader_of_files(module, unwanted):
    """What an actor imports leaves torchvision, pandas, pyarrow, scikit-learn, pydantic and rich out."""
    unwanted = unwanted | {"torchvision", "pandas", "pyarrow", "sklearn", "pydantic", "rich", "typer"}
    code = f"import sys, {module}\nprint(sorted({unwanted!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_job_is_checked_without_torch():
    """Nor Ray nor pandas: a mistake is told at once, and torch is imported while Ray starts."""
    unwanted = {"torch", "torchvision", "ray", "pandas", "sklearn"}
    code = (
        "import sys\nfrom qdsim.api import functions\nfrom qdsim.cli import commands\nfrom qdsim.tuning import search\n"
        f"print(sorted({unwanted!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_qdsim_brings_nothing_with_it():
    """What it offers is there by name, and imported when it is asked for; what it does not offer is not there."""
    code = (
        "import sys\nbefore = set(sys.modules)\nimport qdsim\n"
        "own = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(own - set(sys.stdlib_module_names)), 'run' in dir(qdsim), hasattr(qdsim, 'fit'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['qdsim'] True False"


def test_no_file_has_a_name_that_says_nothing():
    """None is called utils, common, base, helpers, types or logging."""
    for folder in ("qdsim", "analysis", "tests"):
        for path in (PROJECT / folder).rglob("*.py"):
            assert path.stem not in ("utils", "common", "base", "helpers", "types", "logging"), path
