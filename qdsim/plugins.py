"""What a job may name from outside the package: ``package.module:NAME``, or an entry point of an installed package.

Each kind of thing has a group of entry points of its own, named in :data:`GROUPS`; an entry point's name may then be
written like a built-in one. Nothing is imported until a job names it. A module may also lie in the folder where the
command is run, as with most tools that take such names.
"""

import importlib
import importlib.util
import inspect
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from qdsim.errors import BadInput, QdsimError

GROUPS = {
    "method": "qdsim.methods",
    "network": "qdsim.networks",
    "data set": "qdsim.datasets",
    "attack": "qdsim.attacks",
    "server rule": "qdsim.server_rules",
}
"""Groups of entry points, by what they declare."""
MOST_BYTES = 10_000_000
"""Of a package that is sent to a cluster: its code and small files, not its data."""
NOT_SENT = (".pyc", ".pyo", ".pem", ".key", ".p12", ".pfx")
"""Compiled files, and keys."""
REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_reference(text: str) -> bool:
    """Tell whether a name has the form ``package.module:NAME``."""
    return REFERENCE.fullmatch(text) is not None


def declared(kind: str) -> dict[str, EntryPoint]:
    """Return the entry points that installed packages declare for one of :data:`GROUPS`, by name."""
    return {point.name: point for point in entry_points(group=GROUPS[kind])}


def reference_of(kind: str, name: str) -> str | None:
    """Return ``package.module:NAME`` for what a job names from outside; None where nothing goes by that name."""
    if is_reference(name):
        return name
    point = declared(kind).get(name)
    return point.value if point is not None else None


def load_named(kind: str, key: str, name: str, builtin: Iterable[str]) -> object:
    """Import what a job names under ``key``; a name that is nobody's is refused with those that there are.

    ``kind`` is one of :data:`GROUPS`, ``builtin`` are qdsim's own names of that kind.
    """
    reference = reference_of(kind, name)
    if reference is None:
        allowed = [*builtin, *declared(kind), "package.module:NAME"]
        raise BadInput(key, name, f"no such {kind}; allowed: {', '.join(allowed)}")
    return load(key, name, reference)


def load(key: str, name: str, reference: str) -> object:
    """Import what a reference names; whatever is wrong with it is the job's ``key``, in one line."""
    module, _, attribute = reference.partition(":")
    found = imported(key, name, module)
    try:
        return getattr(found, attribute)
    except AttributeError:
        own = [each for each in vars(found) if not each.startswith("_")]
        raise BadInput(key, name, f"{module} has no {attribute}; it has {', '.join(own[:12])}") from None


def imported(key: str, name: str, module: str) -> ModuleType:
    """Import a module that lies outside, in an installed package or in the folder where the command runs."""
    if os.getcwd() not in sys.path:  # at the end: what is installed comes first
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            fix = f"install its package in this environment, or run the command in the folder of {error.name}"
            raise BadInput(key, name, f"there is no module {error.name}; {fix}") from None
        raise BadInput(key, name, f"importing {module} fails: it needs {error.name}, which is not here") from None
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        raise BadInput(key, name, f"importing {module} fails: {in_a_line(error)}") from None


@contextmanager
def calling(key: str, name: str, what: str) -> Iterator[None]:
    """Have whatever somebody else's code raises in one line, as the job's ``key``; errors of qdsim's own pass."""
    try:
        yield
    except QdsimError:
        raise
    except (Exception, SystemExit) as error:
        raise BadInput(key, name, f"{what} fails: {in_a_line(error)}") from None


def misfit(function: Callable[..., Any], *positional: Any, **keywords: Any) -> str | None:
    """Say why a function does not take these arguments, if it does not; it is not called."""
    try:
        inspect.signature(function).bind(*positional, **keywords)
    except TypeError as error:
        return str(error)
    except ValueError:  # written in C, without a signature
        return None
    return None


def in_a_line(error: BaseException) -> str:
    """Return an error of somebody else's code in a line, with the place that raised it."""
    first = next(iter(str(error).splitlines()), "")
    raised = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(raised[-1].filename).name}, line {raised[-1].lineno})" if raised else ""
    return f"{type(error).__name__}: {first}{place}"


def copy_packages(named: Iterable[tuple[str, str]], into: Path) -> list[str]:
    """Copy the top-level packages of what a job names from outside into a folder; return their names.

    ``named`` are kinds of :data:`GROUPS` with names. Where a name is an entry point, the declaration goes along, so
    that it is found in that folder as it is here. Of a package goes what a wheel of it would hold, :func:`files_of`.
    """
    copied: list[str] = []
    for kind, name in named:
        reference = reference_of(kind, name)
        package = (reference or "").partition(":")[0].partition(".")[0]
        if not package or package == __package__.partition(".")[0]:
            continue
        if not is_reference(name):
            _copy_declaration(declared(kind)[name], into)
        if package in copied:
            continue
        imported(kind, name, package)
        spec = importlib.util.find_spec(package)
        folders = list(spec.submodule_search_locations or []) if spec else []
        if folders:
            _copy_package(kind, name, Path(folders[0]), into / package)
        elif spec and spec.origin:
            shutil.copy(spec.origin, into / Path(spec.origin).name)
        copied.append(package)
    return copied


def files_of(package: Path) -> list[Path]:
    """Return the files of a package relative to its folder: code and what lies beside it.

    Hidden ones, compiled ones, keys and what links to other folders stay here.
    """
    found = []
    for folder, inner, names in os.walk(package):
        inner[:] = sorted(name for name in inner if not name.startswith((".", "__pycache__")))
        kept = [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
        found += [path.relative_to(package) for path in kept if path.suffix not in NOT_SENT and path.is_file()]
    return found


def _copy_package(kind: str, name: str, package: Path, into: Path) -> None:
    """Copy a package; refuse one that holds more than code and small files: all of it would leave this machine."""
    sizes = {file: (package / file).stat().st_size for file in files_of(package)}
    if sum(sizes.values()) > MOST_BYTES:
        largest = sorted(sizes, key=lambda file: -sizes[file])[:3]
        said = ", ".join(f"{file} ({sizes[file] / 1e6:.1f} MB)" for file in largest)
        why = (
            f"its package {package} would be sent with {sum(sizes.values()) / 1e6:.1f} MB, {MOST_BYTES / 1e6:g} at most"
        )
        raise BadInput(kind, name, f"{why}; largest: {said}; keep data out of the folder, or install it on the cluster")
    for file in sizes:
        (into / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(package / file, into / file)


def _copy_declaration(point: EntryPoint, into: Path) -> None:
    """Write the metadata of the package that declares an entry point, as an installed package has it."""
    assert point.dist is not None
    folder = into / f"{point.dist.name.replace('-', '_')}-{point.dist.version}.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {point.dist.name}\nVersion: {point.dist.version}\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")
    (folder / "entry_points.txt").write_text(point.dist.read_text("entry_points.txt") or "", encoding="utf-8")
