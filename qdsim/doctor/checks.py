"""What a check says, and the report of all of them: as lines of a table, as JSON, and as a file to attach."""

import json
import os
import platform
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from qdsim import __version__

Outcome = Literal["pass", "fail", "not checked"]
Number = float | int | str | bool
PACKAGES = ("torch", "torchvision", "ray", "numpy", "pandas", "pyarrow", "pydantic", "triton")
ENVIRONMENT = ("CUDA_", "NVIDIA_", "RAY_", "OMP_", "MKL_", "CUBLAS_", "PYTORCH_", "TORCH_", "SLURM_JOB_NUM", "QDSIM_")
"""Beginnings of the names of variables that decide something; of those that may hold a secret only the name is said."""
PLACE = re.compile(r"ADDRESS|HOST|NODELIST")
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)

LEAST_SECRET = 8
"""Shorter values are words such as ``true``, which stand elsewhere as well."""


@dataclass(frozen=True)
class Check:
    """One thing that was tried."""

    name: str
    outcome: Outcome
    says: str
    numbers: Mapping[str, Number] = field(default_factory=dict)
    vital: bool = True
    """Whether a run would not work, or not be repeatable, where this fails."""
    where: str = ""
    """The node or GPU, where there are several."""

    @property
    def stops(self) -> bool:
        """Tell whether it would stop a run."""
        return self.outcome == "fail" and self.vital


@dataclass(frozen=True)
class Report:
    """All checks, with what they were made on."""

    checks: tuple[Check, ...]
    about: dict[str, Any]

    @property
    def exit_code(self) -> int:
        """3 where something would stop a run."""
        return 3 if any(check.stops for check in self.checks) else 0

    def as_dict(self) -> dict[str, Any]:
        """Return what goes into the JSON: without paths of the user, names of hosts, or tokens."""
        content = {"about": self.about, "exit_code": self.exit_code, "checks": [asdict(each) for each in self.checks]}
        cleaned: dict[str, Any] = _cleaned(content, secrets_of_this_machine())
        return cleaned

    def as_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(self.as_dict(), indent=2, sort_keys=True)


def about_this_machine() -> dict[str, Any]:
    """Return versions, the platform, and the variables that decide something."""
    versions = {"qdsim": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    named = sorted(name for name in os.environ if name.startswith(ENVIRONMENT))
    hidden = {name for name in named if SECRET.search(name) or PLACE.search(name)}
    variables = {name: "(set)" if name in hidden else os.environ[name] for name in named}
    return {
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "environment": variables,
    }


def secrets_of_this_machine() -> dict[str, str]:
    """Return what must not be in a file that is passed on, with what stands there instead."""
    folders = {str(Path.cwd()): ".", str(Path.home()): "~", tempfile.gettempdir(): "TMP"}
    folders |= {os.environ[name]: f"${name}" for name in ("QDSIM_DATA_ROOT", "VIRTUAL_ENV") if os.environ.get(name)}
    values = {
        os.environ[name]: "(hidden)"
        for name in os.environ
        if SECRET.search(name) and len(os.environ[name]) >= LEAST_SECRET
    }
    return {platform.node(): "HOST", **folders, **values}


def cleaned(text: str, secrets: dict[str, str]) -> str:
    """Replace secrets in a text, the longest first, whatever else is a path below a home, and addresses of hosts."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) > 1:
            text = text.replace(secret, secrets[secret])
    text = re.sub(r"/(?:home|Users)/[^/\s'\"]+", "~", text)
    return re.sub(r"\b(?!127\.)\d{1,3}(?:\.\d{1,3}){3}\b", "(address)", text)


def _cleaned(value: Any, secrets: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _cleaned(each, secrets) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(each, secrets) for each in value]
    return cleaned(value, secrets) if isinstance(value, str) else value


def not_checked(names: Iterable[str], why: str, where: str = "") -> list[Check]:
    """Return checks that could not be made."""
    return [Check(name, "not checked", why, where=where) for name in names]
