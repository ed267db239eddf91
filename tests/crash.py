"""Kill processes of a run at random moments, resume it each time, and compare what it ends with.

``python -m tests.crash --kills 30`` kills (SIGKILL) the command, its driver actor or a client actor, three times in
each run, whatever they are doing, and has ``qdsim verify`` compare every run with one that nothing happened to.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
TARGETS = ("command", "driver", "client")
TITLES = {"driver": "ray::DriverActor", "client": "ray::ClientActor"}


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
    """Return the actors of a kind that the command has now."""
    return sorted(pid for pid, title in descendants(command.pid).items() if title.startswith(TITLES[target]))


def kill_one(command: subprocess.Popen[bytes], target: str, draws: random.Random, orphans: dict[int, str]) -> str:
    """Kill the command, its driver or one of its client actors; whichever does not exist, the command.

    What a killed command leaves goes on for a while, beside the run that is resumed: ``orphans`` takes note of it.
    """
    family = descendants(command.pid)
    found = processes(command, target) if target in TITLES else []
    if found:
        os.kill(draws.choice(found), signal.SIGKILL)
        return target
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    # Ray's own agents look for their raylet now and then, and are not waited for
    orphans.update({pid: title for pid, title in family.items() if title.startswith("ray::")})
    return "command"


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


def start(job: Path, out: Path, engine: str = "ray") -> subprocess.Popen[bytes]:
    """Start the command, or resume it."""
    arguments = ["run", str(job), "--out", str(out), "--engine", engine, "--resume"]
    with open(out.parent / f"{out.name}.log", "a", encoding="utf-8") as log:
        return subprocess.Popen([sys.executable, "-m", "qdsim", *arguments], stdout=log, stderr=log)


def disturbed(job: Path, out: Path, kills: list[str], draws: random.Random, longest_s: float = 12.0) -> list[str]:
    """Run a job to its end in spite of kills at random moments; say what was killed when.

    Of five moments one is counted from the start of the command, while Ray and the actors start or do not exist yet,
    and four from when there are client actors: else most kills would hit a run that has not begun.
    """
    said = []
    orphans: dict[int, str] = {}
    command = start(job, out)
    for target in kills:
        early = draws.random() < 0.2
        while not early and command.poll() is None and not processes(command, "client"):
            time.sleep(0.1)
        after_s = draws.uniform(0.0, longest_s)
        try:
            command.wait(after_s)
        except subprocess.TimeoutExpired:
            moment = f"{after_s:.1f} s after {'the start' if early else 'there were clients'}"
            said.append(f"{kill_one(command, target, draws, orphans)} {moment}")
        if command.poll() is not None:
            command = start(job, out)
    for _ in range(5):  # a run that gave up is resumed as well
        if command.wait(600) == 0:
            wait_for(orphans)
            return said
        command = start(job, out)
    raise AssertionError(f"the run does not end: {(out.parent / f'{out.name}.log').read_text()[-2000:]}")


def main() -> None:
    """Kill, resume, compare; print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    from qdsim.store.verify import difference

    draws = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "crash.toml"
        job.write_text(JOB, encoding="utf-8")
        assert start(job, Path(folder) / "undisturbed", "inline").wait() == 0
        (undisturbed,) = (Path(folder) / "undisturbed").glob("crash-*")
        done = equal = 0
        while done < arguments.kills:
            out = Path(folder) / f"run-{done}"
            said = disturbed(job, out, [draws.choice(TARGETS) for _ in range(3)], draws)
            (run,) = out.glob("crash-*")
            found = difference(undisturbed, run)
            done += len(said)
            equal += len(said) if found is None else 0
            print(f"{equal} of {done} kills, {found or 'equal'}: {'; '.join(said)}", flush=True)
    sys.exit(equal != done)


if __name__ == "__main__":
    main()
