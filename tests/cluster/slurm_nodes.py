"""Programs that stand in for Slurm's and for ``ray symmetric-run``, on the one machine that tests have.

The real ``ray symmetric-run`` ends with ``ray stop``, which takes every Ray process on the machine with it. This one
starts two real nodes with the options it was given, runs the command, and ends what it started.
"""

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("srun", "scontrol", "ray", "qdsim")
# the nodes share this machine's ports and its memory
SHARED = (
    "--min-worker-port=0",
    "--max-worker-port=0",
    "--dashboard-agent-listen-port=0",
    "--object-store-memory=80000000",
)


def install(folder: Path) -> None:
    """Put the programs into ``bin``, which PATH is to begin with."""
    (folder / "bin").mkdir()
    for name in PROGRAMS:
        file = folder / "bin" / name
        file.write_text(f'#!/bin/bash\nexec {shlex.join([sys.executable, __file__, name])} "$@"\n', encoding="utf-8")
        file.chmod(0o755)


def log_of(folder: Path) -> Path:
    """Return where the programs note what they were called with."""
    return folder / "said.jsonl"


def said(folder: Path) -> list[list[str]]:
    """Return the notes."""
    return [json.loads(line) for line in log_of(folder).read_text(encoding="utf-8").splitlines()]


def note(*words: str) -> None:
    with Path(os.environ["STAND_IN_LOG"]).open("a", encoding="utf-8") as log:
        log.write(json.dumps(words) + "\n")


def srun(*args: str) -> int:
    note("srun", *args)
    first = next(i for i, word in enumerate(args) if not word.startswith("--"))
    return subprocess.run(args[first:], check=False).returncode


def scontrol(verb: str, *args: str) -> int:
    note("scontrol", verb, *args)
    if (verb, args[0]) == ("show", "hostnames"):
        print(*args[1].split(","), sep="\n")
    return 0


def qdsim(*args: str) -> int:
    note("qdsim", *args)
    os.execv(sys.executable, [sys.executable, "-m", "qdsim", *args])


def ray(verb: str, *args: str) -> int:
    assert verb == "symmetric-run", f"ray {verb} is not for a machine that others use"
    note("ray", verb, *args)
    options, command = list(args[: args.index("--")]), args[args.index("--") + 1 :]
    given = {name: options[options.index(name) + 1] for name in ("--address", "--min-nodes")}
    start = [word for word in options if word not in {*given, *given.values()}]
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    note("token", oct(token.stat().st_mode & 0o777), oct(token.parent.stat().st_mode & 0o777))
    note("environment", *(f"{k}={v}" for k, v in os.environ.items() if k.startswith("RAY_")))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--node-ip-address=127.0.0.1"]
    nodes = [subprocess.Popen([*program, "--head", f"--port={port}", "--include-dashboard=false", *SHARED, *start])]
    try:
        _wait_for_head(port)
        nodes += [subprocess.Popen([*program, f"--address=127.0.0.1:{port}", *SHARED, *start])]
        _wait_for_nodes(int(given["--min-nodes"]), port)
        return subprocess.run(command, check=False).returncode
    finally:
        end([node.pid for node in nodes])


def _wait_for_head(port: int) -> None:
    for _ in range(600):
        with socket.socket() as there:
            if there.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError("no head after a minute")


def _wait_for_nodes(nodes: int, port: int) -> None:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    client = GcsClient(address=f"127.0.0.1:{port}")
    for _ in range(600):
        found = len(client.get_all_node_info(timeout=10))
        if found == nodes:
            return
        time.sleep(0.1)
    raise TimeoutError(f"{found} of {nodes} nodes after a minute")


def end(pids: list[int]) -> None:
    """Kill these processes and all that they started."""
    from ray._private.utils import psutil  # type: ignore[attr-defined]  # Ray brings its own

    parents = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    everything = [process for parent in parents for process in (parent, *parent.children(recursive=True))]
    for process in everything:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(everything, timeout=10)


if __name__ == "__main__":
    programs: dict[str, Callable[..., int]] = {"srun": srun, "scontrol": scontrol, "qdsim": qdsim, "ray": ray}
    sys.exit(programs[sys.argv[1]](*sys.argv[2:]))
