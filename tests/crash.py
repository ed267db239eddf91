"""Kill and suspend processes of a run at random moments, resume it each time, and compare what it ends with.

``python -m tests.crash --kills 30 --suspensions 10`` strikes the command, its driver actor, a client actor, Ray's
raylet or its GCS, three times in each run, whatever they are doing. A kill is SIGKILL; a suspension is SIGSTOP and, 1
to 20 s later, SIGCONT. ``qdsim verify`` compares every run with one that nothing happened to, and each command must
end with the exit code that is documented for what happened to it.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qdsim.store.run_directory import read_manifest

JOB = """
name = "crash"
seeds = [0]
methods = ["quickdrop", "retrain", "federaser"]
model = { width = 8, depth = 2 }
partition = { clients = 6 }
train = { rounds = 6, steps = 12, batch_size = 64, lr = 0.1, participation = 0.7 }
unlearn = { steps = 5, lr = 0.1 }
recover = { rounds = 3, steps = 8, lr = 0.1 }
relearn = { rounds = 2, steps = 5, lr = 0.1 }
synthetic = { scale = 10 }
membership = ["loss_threshold"]
cluster = { clients_per_actor = 3 }
"""
TITLES = {"driver": "ray::DriverActor", "client": "ray::ClientActor", "raylet": "raylet/raylet", "gcs": "gcs_server"}
"""The processes that a command starts, by what the first word of their title ends or begins with."""
TARGETS = ("command", *TITLES)
ENDED_BY = {"command": -signal.SIGKILL, "raylet": 3, "gcs": 3}
"""What a command exits with once one of these is killed; a driver or a client is replaced, and the run goes on.

A raylet or GCS that is lost when the run is through is not missed: then the command ends with 0.
"""
LONGEST_SUSPENSION_S = 20.0


@dataclass(frozen=True)
class Strike:
    """What is to happen, and to whom."""

    target: str
    suspends: bool = False

    def __str__(self) -> str:
        """Say it in two words."""
        return f"{'suspend' if self.suspends else 'kill'} {self.target}"


def descendants(pid: int) -> dict[int, str]:
    """Return the processes that a process and its children started, with their titles."""
    parents, titles = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            titles[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
        except (OSError, ValueError, IndexError):
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {child: titles.get(child, "") for child in found - {pid}}


def processes(command: subprocess.Popen[bytes], target: str) -> list[int]:
    """Return the processes of a kind that the command has now."""
    if target == "command":
        return [command.pid]
    titles = {pid: title.partition(" ")[0] for pid, title in descendants(command.pid).items()}
    return sorted(
        pid for pid, title in titles.items() if title.startswith(TITLES[target]) or title.endswith(TITLES[target])
    )


def hit(command: subprocess.Popen[bytes], strike: Strike, draws: random.Random, orphans: dict[int, str]) -> Strike:
    """Strike one of the processes of a kind, or where there are none yet the command; return what happened.

    What a killed command leaves goes on for a while, beside the run that is resumed: ``orphans`` takes note of it.
    """
    family = descendants(command.pid)
    found = processes(command, strike.target)
    if not found:
        strike, found = Strike("command", strike.suspends), [command.pid]
    victim = draws.choice(found)
    if strike.suspends:
        os.kill(victim, signal.SIGSTOP)
        time.sleep(draws.uniform(1.0, LONGEST_SUSPENSION_S))
        with suppress(ProcessLookupError):  # whoever waits for it may have given it up, and killed it
            os.kill(victim, signal.SIGCONT)
        return strike
    os.kill(victim, signal.SIGKILL)
    if strike.target in ENDED_BY:
        command.wait(180)
        # Ray's own agents look for their raylet now and then, and are not waited for
        orphans.update({pid: title for pid, title in family.items() if title.startswith("ray::")})
    return strike


def wait_for(orphans: dict[int, str]) -> None:
    """Wait until the actors of commands that were killed have noticed it: they must end by themselves."""
    give_up_s = time.monotonic() + 180
    while left := [pid for pid, title in orphans.items() if alive(pid, title)]:
        if time.monotonic() > give_up_s:
            raise AssertionError(f"the command is dead, but its processes {left} are not")
        time.sleep(0.2)


def alive(pid: int, title: str) -> bool:
    """Tell whether the same process is still there, and more than a name."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") == title
    except OSError:
        return False


def is_done(out: Path) -> bool:
    """Tell whether the run has been written to its end."""
    return any(read_manifest(path.parent).get("state") == "done" for path in out.glob("*/manifest.json"))


def start(job: Path, out: Path, engine: str = "ray") -> subprocess.Popen[bytes]:
    """Start the command, or resume it."""
    arguments = ["run", str(job), "--out", str(out), "--engine", engine, "--resume"]
    with open(out.parent / f"{out.name}.log", "a", encoding="utf-8") as log:
        return subprocess.Popen([sys.executable, "-m", "qdsim", *arguments], stdout=log, stderr=log)


@dataclass(frozen=True)
class Disturbed:
    """What happened to a run until it had ended."""

    said: list[str]
    """Each strike that fell, and when."""
    wrong_codes: list[str]
    """Each command that ended with another exit code than documented."""


def disturbed(
    job: Path, out: Path, strikes: Sequence[Strike], draws: random.Random, longest_s: float = 12.0
) -> Disturbed:
    """Run a job to its end in spite of strikes at random moments.

    Of five moments one is counted from the start of the command, while Ray and the actors start or do not exist yet,
    and four from when there are client actors: else most strikes would hit a run that has not begun.
    """
    said: list[str] = []
    wrong: list[str] = []
    orphans: dict[int, str] = {}
    expected = {0}
    command = start(job, out)
    for planned in strikes:
        early = draws.random() < 0.2
        while not early and command.poll() is None and not processes(command, "client"):
            time.sleep(0.1)
        after_s = draws.uniform(0.0, longest_s)
        try:
            command.wait(after_s)
        except subprocess.TimeoutExpired:
            strike = hit(command, planned, draws, orphans)
            said.append(f"{strike} {after_s:.1f} s after {'the start' if early else 'there were clients'}")
            if not strike.suspends and strike.target in ENDED_BY:
                expected = {ENDED_BY[strike.target]}
            elif strike.suspends and strike.target in ("raylet", "gcs"):
                expected = {0, 3}  # whoever does not answer for long is given up by Ray
        if command.poll() is not None:
            through = command.returncode == 0 and is_done(out)
            if command.returncode not in expected and not through:
                wrong.append(f"exit code {command.returncode} after: {'; '.join(said)}")
            command, expected = start(job, out), {0}
    for _ in range(5):  # a run that gave up is resumed as well
        code = command.wait(600)
        if code not in expected and not (code == 0 and is_done(out)):
            wrong.append(f"exit code {code} after: {'; '.join(said)}")
        if code == 0:
            wait_for(orphans)
            return Disturbed(said, wrong)
        command, expected = start(job, out), {0}
    raise AssertionError(f"the run does not end: {(out.parent / f'{out.name}.log').read_text()[-2000:]}")


def main() -> None:
    """Strike, resume, compare; print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--suspensions", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    from qdsim.store.verify import difference

    draws = random.Random(given.seed)
    # each kind of process in turn, so that none is left out, in an order that is drawn
    strikes = [Strike(TARGETS[i % len(TARGETS)]) for i in range(given.kills)]
    strikes += [Strike(TARGETS[i % len(TARGETS)], suspends=True) for i in range(given.suspensions)]
    draws.shuffle(strikes)
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "crash.toml"
        job.write_text(JOB, encoding="utf-8")
        assert start(job, Path(folder) / "undisturbed", "inline").wait() == 0
        (undisturbed,) = (Path(folder) / "undisturbed").glob("crash-*")
        fallen: Counter[str] = Counter()
        equal = runs = 0
        wrong: list[str] = []
        while fallen.total() < len(strikes):
            out = Path(folder) / f"run-{runs}"
            happened = disturbed(job, out, strikes[fallen.total() :][:3], draws)
            (run,) = out.glob("crash-*")
            found = difference(undisturbed, run)
            fallen.update(" ".join(text.split()[:2]) for text in happened.said)
            equal += len(happened.said) if found is None else 0
            wrong += happened.wrong_codes
            runs += 1
            print(f"{equal} of {fallen.total()}, {found or 'equal'}: {'; '.join(happened.said)}", flush=True)
            for text in happened.wrong_codes:
                print(f"  {text}", flush=True)
            shutil.rmtree(out)
    print(f"{runs} runs: " + ", ".join(f"{name} {count}" for name, count in sorted(fallen.items())))
    print(f"{equal} of {fallen.total()} equal, {len(wrong)} exit codes other than documented")
    sys.exit(equal != fallen.total() or bool(wrong))


if __name__ == "__main__":
    main()
