"""How long a long run takes to read: its parts as they were written, beside the same parts once they are joined.

``python -m tests.long_run --rounds 10000 --work DIR`` writes a run of that many rounds into DIR, unless one lies there,
and has each reader read both, every time in a process of its own: pandas all tables, ``verify`` the run against itself,
and the analysis as far as its report. It prints seconds, and how many times faster the joined tables are.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from qdsim.store import run_directory
from tests.analysis.made import made_run

READERS = {
    "pandas": "[pd.read_parquet(f'{run}/tables/{name}') for name in ('rounds', 'clients', 'classes', 'stages')]",
    "verify": "assert difference(Path(run), Path(run)) is None",
    "report": "report(run, out=f'{run}-report')",
}
TIMED = """
import sys, time
from pathlib import Path
import pandas as pd
from qdsim import report
from qdsim.store.verify import difference
run = sys.argv[1]
began_s = time.perf_counter()
{statement}
print(time.perf_counter() - began_s)
"""


def make(folder: Path, rounds: int) -> Path:
    """Write a finished run that has retrained for so many rounds; 2 clients, 3 classes."""
    return made_run(folder, {"retrain": {"unlearn": [(10.0, 0.0, 0.7)] * rounds}}, job="long")


def seconds(statement: str, run: Path) -> float:
    """Return how long a process takes for a statement, without its imports."""
    command = [sys.executable, "-c", TIMED.format(statement=statement), str(run)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    """Make the run, read it both ways, and print a line for each reader."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--work", type=Path, required=True)
    given = parser.parse_args()
    apart, joined = given.work / "apart" / "long-1", given.work / "joined" / "long-1"
    if not apart.exists():
        make(apart.parent, given.rounds)
    shutil.rmtree(joined, ignore_errors=True)
    shutil.copytree(apart, joined)
    run_directory.join_parts(joined)
    for name, statement in READERS.items():
        before_s, after_s = (seconds(statement, run) for run in (apart, joined))
        print(f"{name}: apart {before_s:.1f} s, joined {after_s:.1f} s, {before_s / after_s:.1f} times", flush=True)


if __name__ == "__main__":
    main()
