"""Change one file of a run, or of the trained state beside it, and see whether anybody notices.

``python -m tests.mutate --count 500`` makes a few small runs, finished ones and ones that were cut off in every phase,
and the same with another learning rate. They sweep, have a server rule that remembers, and their longer tables are
joined, so that every kind of file is there. Then, each time on a fresh copy, something happens to one file: a bit is
flipped, it is cut off, emptied, filled with garbage or deleted, a neighbour or another run's file takes its place, or
it is copied under a second name as a file manager does. A run that was cut off is resumed; a finished one is compared,
shown and read by the analysis, and another run takes up its training.

Each mutation must be *named*, in one line of ours, or be *harmless*: whatever is read is what nothing happened to.
Anything else is *silent*. Exit code 0: none was.
"""

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd

import analysis
from qdsim.errors import QdsimError
from qdsim.experiment import status
from qdsim.experiment.checkpoint import Checkpoint, Commit
from qdsim.store import run_directory, summary
from qdsim.store.verify import difference
from tests.runs import run

SETTINGS: dict[str, Any] = {
    "methods": ["quickdrop", "retrain"],
    "partition": {"clients": 3},
    "train": {"rounds": 2, "steps": 1},
    "unlearn": {"steps": 1},
    "recover": {"rounds": 1, "steps": 1},
    "relearn": {"rounds": 1, "steps": 1},
    "model": {"width": 2},
    "membership": ["loss_threshold"],
    "server": {"kind": "momentum"},
    "synthetic": {"gallery": 1},
    "sweep": {"synthetic.lr": [0.1, 0.2]},
}
ANOTHER = {**SETTINGS, "train": {"rounds": 2, "steps": 1, "lr": 0.05}}
COMMITS = (1, 2, 3, 4, 5, 6, 8, 10)
"""After so many commits runs were cut off: in training, in each phase of a request, and in the second cell."""
JOINED_FROM = 9
"""Of so many parts the tables of these runs are joined, so that some are and some are not."""


@contextmanager
def tables_joined_early() -> Iterator[None]:
    """Have runs join their tables from :data:`JOINED_FROM` parts on."""
    with mock.patch.object(run_directory, "JOINED_FROM", JOINED_FROM):
        yield


class Stopped(Exception):
    """The run was cut off here."""


def stopped(out: Path, after: int, settings: dict[str, Any]) -> Path:
    """Return a run that was cut off after so many commits."""
    real = Checkpoint.save
    made = 0

    def failing(self: Checkpoint, commit: Commit) -> None:
        nonlocal made
        if made == after:
            raise Stopped
        made += 1
        real(self, commit)

    Checkpoint.save = failing  # type: ignore[method-assign]
    try:
        run(out, **settings)
    except Stopped:
        return run_in(out)
    finally:
        Checkpoint.save = real  # type: ignore[method-assign]
    raise AssertionError("the run has ended before")


def run_in(out: Path) -> Path:
    """Return the one run that lies in a folder."""
    (found,) = (path.parent for path in out.glob("*/manifest.json"))
    return found


@dataclass(frozen=True)
class Stock:
    """The runs that things happen to."""

    folder: Path
    undisturbed: Path
    finished: dict[str, Any]
    """What is read of the finished run."""

    @staticmethod
    def make(folder: Path, commits: tuple[int, ...] = COMMITS) -> "Stock":
        """Make all of them."""
        undisturbed = run(folder / "undisturbed", **SETTINGS)
        for kind, settings in (("own", SETTINGS), ("another", ANOTHER)):
            run(folder / kind / "finished", **settings)
            for after in commits:
                stopped(folder / kind / f"stopped-{after}", after, settings)
        return Stock(folder, undisturbed, read_all(run_in(folder / "own" / "finished")))

    def names(self) -> list[str]:
        """Return the runs' names."""
        return sorted(path.name for path in (self.folder / "own").iterdir())


def read_all(run_dir: Path) -> dict[str, Any]:
    """Return what ``show`` and the analysis see of a run; raises as ``show`` does."""
    summary.check_whole(run_dir)
    found: dict[str, Any] = {
        "stages": summary.stage_table(run_dir),
        "attacks": summary.membership_table(run_dir),
        "titles": summary.method_titles(run_dir),
        "notes": summary.notes(run_dir),
    }
    status.read(run_dir)
    return found


def same(one: Any, other: Any) -> bool:
    """Compare two things that were read."""
    return bool(one.equals(other) if isinstance(one, pd.DataFrame) else one == other)


def kind_of(path: Path, out: Path) -> str:
    """Return what kind of file it is: each is struck as often as any other."""
    parts = path.relative_to(out).parts
    inner = parts[2:-1] if parts[0] == ".trained" else parts[1:-1]
    top = "trained" if parts[0] == ".trained" else "run"
    name = parts[-1] if len(inner) < 1 or not parts[-1].endswith((".npz", ".parquet")) else path.suffix
    if parts[-1].startswith("00-schema"):
        name = "00-schema"
    return "/".join([top, *(part for part in inner if not part.startswith("seed-")), name])


def flip(path: Path, other: Path | None, draws: random.Random) -> None:
    """Flip a bit."""
    content = bytearray(path.read_bytes())
    if content:
        content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
    path.write_bytes(bytes(content))


def truncate(path: Path, other: Path | None, draws: random.Random) -> None:
    """Cut the end off."""
    content = path.read_bytes()
    path.write_bytes(content[: draws.randrange(len(content))] if content else b"")


def empty(path: Path, other: Path | None, draws: random.Random) -> None:
    """Leave nothing of it."""
    path.write_bytes(b"")


def garbage(path: Path, other: Path | None, draws: random.Random) -> None:
    """Fill it with noise of the same length."""
    path.write_bytes(draws.randbytes(path.stat().st_size))


def delete(path: Path, other: Path | None, draws: random.Random) -> None:
    """Take it away."""
    path.unlink()


def foreign(path: Path, other: Path | None, draws: random.Random) -> None:
    """Put the file of the same name of another run in its place."""
    if other is not None:
        shutil.copyfile(other, path)


def neighbour(path: Path, other: Path | None, draws: random.Random) -> None:
    """Put another file of the same folder in its place."""
    beside = sorted(file for file in path.parent.iterdir() if file.is_file() and file.suffix == path.suffix)
    if len(beside) > 1:
        shutil.copyfile(draws.choice([file for file in beside if file != path]), path)


def duplicate(path: Path, other: Path | None, draws: random.Random) -> None:
    """Copy it under a second name."""
    shutil.copyfile(path, path.with_name(f"{path.stem} (copy){path.suffix}"))


def add(path: Path, other: Path | None, draws: random.Random) -> None:
    """Put the file of another run beside it."""
    if other is not None:
        shutil.copyfile(other, path.with_name(f"other-{path.name}"))


MUTATIONS: tuple[Callable[[Path, Path | None, random.Random], None], ...] = (
    *(flip, truncate, empty, garbage, delete),
    *(foreign, neighbour, duplicate, add),
)


def counterpart(path: Path, out: Path, another: Path) -> Path | None:
    """Return the file of the other run that has the same place, or None."""
    parts = list(path.relative_to(out).parts)
    if parts[0] == ".trained":
        states = sorted((another / ".trained").iterdir()) if (another / ".trained").exists() else []
        found = [state.joinpath(*parts[2:]) for state in states]
    else:
        found = [run_in(another).joinpath(*parts[1:])]
    return next((file for file in found if file.exists()), None)


@dataclass(frozen=True)
class Outcome:
    """What became of a mutation."""

    verdict: str
    """``named``, ``harmless`` or ``silent``."""
    said: str


def strike(stock: Stock, name: str, work: Path, draws: random.Random, index: int) -> tuple[str, Outcome]:
    """Let something happen to a copy of a run; return what, and what became of it."""
    out = work / "out"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(stock.folder / "own" / name, out)
    kinds: dict[str, list[Path]] = {}
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        kinds.setdefault(kind_of(path, out), []).append(path)
    mutation = MUTATIONS[index % len(MUTATIONS)]
    before = content = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    while content == before:  # the other run may have no such file, or an equal one: then something else is struck
        kind = draws.choice(sorted(kinds))
        victim = draws.choice(kinds[kind])
        mutation(victim, counterpart(victim, out, stock.folder / "another" / name), draws)
        content = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    told = f"{name}, {mutation.__name__} {victim.relative_to(out)}"
    (run_dir,) = (path for path in out.iterdir() if path.name.startswith("tiny-"))
    try:
        if name == "finished":
            return told, judge_finished(stock, out, run_dir, trained=kind.startswith("trained"))
        return told, judge_resumed(stock, out, run_dir)
    except QdsimError as error:
        one_line = "\n" not in str(error) and error.exit_code in (2, 3)
        return told, Outcome("named" if one_line else "silent", str(error))
    except Exception as error:
        return told, Outcome("silent", f"{type(error).__name__}: {error}")


def judge_finished(stock: Stock, out: Path, run_dir: Path, *, trained: bool) -> Outcome:
    """Let everybody read a finished run, and another take up its training; each must notice, or see what was."""
    if trained:
        found = difference(stock.undisturbed, run(out, **SETTINGS))
        return Outcome("harmless" if found is None else "silent", found or "trained from as ever")
    outcomes = []
    for reader in (verified, shown, analysed):
        try:
            outcomes.append(reader(stock, run_dir))
        except QdsimError as error:
            outcomes.append(Outcome("named" if "\n" not in str(error) else "silent", str(error)))
    return max(outcomes, key=lambda outcome: ("harmless", "named", "silent").index(outcome.verdict))


def verified(stock: Stock, run_dir: Path) -> Outcome:
    """Compare it with the one that nothing happened to."""
    found = difference(stock.undisturbed, run_dir)
    return Outcome("harmless", "") if found is None else Outcome("named", f"verify: {found}")


def shown(stock: Stock, run_dir: Path) -> Outcome:
    """Show it."""
    read = read_all(run_dir)
    other = [name for name in read if not same(read[name], stock.finished[name])]
    return Outcome("silent" if other else "harmless", f"show has other {', '.join(other)}" if other else "")


def analysed(stock: Stock, run_dir: Path) -> Outcome:
    """Read it as the report does."""
    results, original = analysis.load(run_dir), analysis.load(run_in(stock.folder / "own" / "finished"))
    if results.problems:
        return Outcome("named", results.problems[0])
    other = [name for name in original.tables if not same(results.tables[name], original.tables[name])]
    return Outcome("silent" if other else "harmless", f"the analysis has other {', '.join(other)}" if other else "")


def judge_resumed(stock: Stock, out: Path, run_dir: Path) -> Outcome:
    """Resume a run that was cut off."""
    found = difference(stock.undisturbed, run(out, **SETTINGS, resume=run_dir))
    if found is None:
        read_all(run_dir)
        problems = analysis.load(run_dir).problems
        return Outcome("named" if problems else "harmless", problems[0] if problems else "")
    return Outcome("silent", f"resumed to another end: {found}")


def main() -> None:
    """Strike as often as asked, print a line for each that was silent, and count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="a line for each mutation")
    given = parser.parse_args()
    draws = random.Random(given.seed)
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, tables_joined_early():
        stock = Stock.make(Path(folder))
        names = stock.names()
        for index in range(given.count):
            name = "finished" if index % 2 else draws.choice(names)
            told, outcome = strike(stock, name, Path(folder) / "work", draws, index // 2)
            verdicts[outcome.verdict] += 1
            if given.verbose or outcome.verdict == "silent":
                print(f"{outcome.verdict}: {told}: {outcome.said}", flush=True)
    print(f"{given.count} mutations: " + ", ".join(f"{n} {verdict}" for verdict, n in sorted(verdicts.items())))
    sys.exit(bool(verdicts["silent"]))


if __name__ == "__main__":
    main()
