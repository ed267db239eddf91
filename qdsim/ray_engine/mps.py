"""CUDA MPS on the node that this is run on, before Ray starts there.

``QDSIM_MPS=off|on|auto python -m qdsim.ray_engine.mps [COMMAND...]`` starts MPS's daemon where it is asked for, then
becomes the command. ``auto`` goes on without it where it cannot be had; ``on`` ends with exit code 3 there. The
processes that Ray starts afterwards find the daemon by its usual folder, /tmp/nvidia-mps or CUDA_MPS_PIPE_DIRECTORY.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from qdsim.ray_engine.environment import MPS_PIPES

CONTROL = "nvidia-cuda-mps-control"
CHOICES = ("off", "on", "auto")
LOGS = "/tmp/nvidia-mps-log"
"""Its usual folder, /var/log/nvidia-mps, is root's."""
ANSWER_S = 30.0


class NotHere(Exception):
    """MPS cannot be had on this node; the message says why."""


def start(environment: Mapping[str, str]) -> str:
    """Start the daemon, unless it runs; say which."""
    control = shutil.which(CONTROL, path=environment.get("PATH"))
    if control is None:
        raise NotHere(f"{CONTROL} is not installed: it comes with NVIDIA's driver")
    # with the variable set the daemon would number the GPUs anew, and Ray's numbers would be others
    own = {key: value for key, value in environment.items() if key != "CUDA_VISIBLE_DEVICES"}
    own.setdefault("CUDA_MPS_LOG_DIRECTORY", LOGS)
    if (Path(own.get("CUDA_MPS_PIPE_DIRECTORY", MPS_PIPES)) / "control").exists():
        asked = _run([control], own, "get_server_list\n")
        if asked.returncode == 0:
            return "CUDA MPS runs on this node already"
    started = _run([control, "-d"], own)
    if started.returncode != 0:
        raise NotHere(f"{CONTROL} -d ended with {started.returncode}: {started.stdout.strip()}")
    return "CUDA MPS started"


def _run(command: Sequence[str], environment: Mapping[str, str], typed: str = "") -> subprocess.CompletedProcess[str]:
    # into a file: the daemon keeps what it inherits open, and a pipe would not end before it does
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        try:
            done = subprocess.run(
                command, env=dict(environment), input=typed, stdout=said, stderr=subprocess.STDOUT, text=True,
                timeout=ANSWER_S, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotHere(f"{command[0]}: {error}") from None
        said.seek(0)
        return subprocess.CompletedProcess(command, done.returncode, said.read())


def main(command: Sequence[str]) -> int:
    """Do what QDSIM_MPS says, then become the command, if there is one."""
    wanted = os.environ.get("QDSIM_MPS", "off")
    if wanted not in CHOICES:
        print(f"qdsim: QDSIM_MPS = {wanted!r}: allowed: {', '.join(CHOICES)}", file=sys.stderr)
        return 2
    if wanted != "off":
        try:
            print(f"qdsim: {start(os.environ)}", file=sys.stderr, flush=True)
        except NotHere as reason:
            if wanted == "on":
                print(f"qdsim: no CUDA MPS on this node: {reason}; QDSIM_MPS=auto goes on without", file=sys.stderr)
                return 3
            print(f"qdsim: going on without CUDA MPS: {reason}", file=sys.stderr, flush=True)
    if command:
        os.execvp(command[0], list(command))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
