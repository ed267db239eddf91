"""Show that a change moves no number: run the same jobs at another commit and here, and compare all that they wrote.

``python -m tests.same_results --base main~3 --work DIR`` clones the commit into DIR, runs each case there and here with
the same interpreter, on this machine, and has ``qdsim verify`` compare every value of every table, ``params_sha256`` of
every round among them; clocks and places are left out. Tables of an older schema are read in today's words. Runs that
lie in DIR already are not made again, so a second call compares only what has changed. Exit code 0: all equal.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from qdsim.store.verify import difference

HERE = Path(__file__).parent.parent
SMOKE = ("--profile", "smoke")
CASES: dict[str, tuple[str, ...]] = {
    "quickstart, inline": ("quickstart", "--engine", "inline"),
    "quickstart, on Ray": ("quickstart",),
    "all class-level methods": ("mnist_10", *SMOKE),
    "all client-level methods": ("table4_client_noniid", *SMOKE),
    "a sweep": ("fig6_scale", *SMOKE),
    "a sequence": ("fig4_sequential", *SMOKE),
    "fine-tuning": (
        *("mnist_10", *SMOKE),
        *("--set", "synthetic.finetune=1", "--set", 'methods=["quickdrop"]', "--set", "membership=[]"),
    ),
}
"""MNIST and CIFAR-10 are looked for where ``QDSIM_DATA_ROOT`` says."""


def run(tree: Path, case: tuple[str, ...], out: Path) -> Path:
    """Run a job with the code of a tree, unless it has run before; return its directory."""
    found = sorted(out.glob("*/manifest.json"))
    if not found:
        job, *options = case
        command = [
            sys.executable,
            "-m",
            "qdsim",
            "run",
            str(tree / "jobs" / f"{job}.toml"),
            *options,
            "--out",
            str(out),
        ]
        environment = os.environ | {"PYTHONPATH": str(tree)}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(out, ignore_errors=True)
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        found = sorted(out.glob("*/manifest.json"))
    return found[-1].parent


def main() -> None:
    """Compare all cases, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True, help="the commit to compare with")
    parser.add_argument("--work", type=Path, required=True, help="where the clone and the runs go")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this case; may be repeated")
    given = parser.parse_args()
    tree = given.work.resolve() / "base"
    if not tree.exists():
        subprocess.run(["git", "clone", "--quiet", "--no-checkout", str(HERE), str(tree)], check=True)
        subprocess.run(["git", "checkout", "--quiet", given.base], cwd=tree, check=True)
    shutil.rmtree(given.work / "new", ignore_errors=True)
    different = 0
    for name in given.case or CASES:
        began_s = time.monotonic()
        folder = name.replace(", ", "-").replace(" ", "-")
        before = run(tree, CASES[name], given.work.resolve() / "old" / folder)
        after = run(HERE, CASES[name], given.work.resolve() / "new" / folder)
        found = difference(before, after)
        different += found is not None
        print(f"{name}: {found or 'equal'} ({time.monotonic() - began_s:.0f} s)", flush=True)
    raise SystemExit(1 if different else 0)


if __name__ == "__main__":
    main()
