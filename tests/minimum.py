"""Run the tests in an environment of the oldest versions that ``pyproject.toml`` admits.

``python -m tests.minimum --work DIR [-- PYTEST ARGUMENTS]`` makes a virtual environment in DIR, unless one lies there,
installs qdsim with every dependency at its lower bound, and runs pytest there. It downloads some gigabytes. What the
tests themselves need, and what dependencies need in turn, is installed as new as it comes; so old libraries use what is
deprecated in new ones, and a warning is no error there.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent.parent
BOUND = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(\[[^\]]*\])?>=(?P<version>[0-9.]+)")


def minimums(dependencies: list[str]) -> list[str]:
    """Return each dependency at its lower bound; one without a bound is refused, since nothing would test it."""
    found = []
    for text in dependencies:
        matched = BOUND.fullmatch(text)
        if matched is None:
            raise ValueError(f"{text!r} is not NAME>=VERSION")
        found.append(f"{matched['name']}=={matched['version']}")
    return found


def declared() -> list[str]:
    """Return the dependencies of the project."""
    content = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))
    found: list[str] = content["project"]["dependencies"]
    return found


def main() -> None:
    """Make the environment and run the tests in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="where the environment goes, or lies")
    parser.add_argument("arguments", nargs="*", help="for pytest; by default -q")
    given = parser.parse_args()
    python = given.work / "venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(given.work / "venv")], check=True)
    constraints = given.work / "minimum.txt"
    constraints.write_text("\n".join(minimums(declared())) + "\n", encoding="utf-8")
    install = ["-m", "pip", "install", "--quiet", "--constraint", str(constraints), "--editable", f"{HERE}[test]"]
    subprocess.run([str(python), *install], check=True)
    tests = [str(python), "-m", "pytest", "-W", "default", *(given.arguments or ["-q"])]
    raise SystemExit(subprocess.run(tests, cwd=HERE, check=False).returncode)


if __name__ == "__main__":
    main()
