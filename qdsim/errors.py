"""Everything qdsim refuses or gives up on, each with the exit code of the command line.

    QdsimError                 1   something inside qdsim is wrong
    ├── BadInput               2   a job, a value or a file the user gave
    ├── CannotPlace            3   the cluster cannot host the run
    │   ├── CannotReach        3   or does not let us in
    │   ├── UnusableGpu        3   or has GPUs that torch cannot use
    │   ├── OtherDevice        3   or others than the run began on
    │   ├── OutOfMemory        3   or too little memory
    │   └── ClusterLost        3   or is gone, where it was started here
    ├── StorageFailed          3   the storage cannot: full, or gone
    ├── ClientFailed           4   a client step raised, or its actor died
    └── Diverged               4   a loss or an update is no longer a number
    Interrupted              130   SIGINT, 143 for SIGTERM, 129 for SIGHUP: the terminal was closed

An error's message is one line: what happened with numbers, the likely cause, the setting to change.
All of them are built from plain arguments, so they survive pickling between processes.
"""

import json
import re
from collections.abc import Mapping
from datetime import date, time

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def as_toml(value: object) -> str:
    """Return a value as a job file may have it, on one line."""
    if isinstance(value, Mapping):
        names = {key: key if BARE_KEY.fullmatch(str(key)) else json.dumps(str(key)) for key in value}
        return "{" + ", ".join(f"{names[key]} = {as_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):  # a literal string, in which a backslash stands for itself, where it can be one
        return f"'{value}'" if value.isprintable() and "'" not in value else json.dumps(value)
    return value.isoformat() if isinstance(value, date | time) else repr(value)


class QdsimError(Exception):
    """Base of all errors that the command line prints without a traceback."""

    exit_code = 1


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP arrived; not an Exception, so that nothing on the way swallows it."""

    def __init__(self, signum: int, resume: str = ""):
        super().__init__(signum, resume)
        self.signum = signum
        self.resume = resume
        """The command that resumes the run; empty where none had begun."""
        self.exit_code = 128 + signum


class BadInput(QdsimError):
    """The user gave something that cannot be run.

    Example scenario: ``requests[0].target = 12`` on a data set with 10 classes.
    """

    exit_code = 2

    def __init__(self, key: str, value: object, allowed: str):
        super().__init__(key, value, allowed)
        self.key, self.value, self.allowed = key, value, allowed

    def __str__(self) -> str:
        """Name the key, the value where there is one, and what is allowed."""
        given = "" if self.value is None else f" = {as_toml(self.value)}"
        return f"{self.key}{given}: {self.allowed}"


class MissingData(BadInput):
    """A data file is not there or damaged.

    Example scenario: ``data.dataset = "svhn"`` and no ``train_32x32.mat`` under ``data.root``.
    """

    def __init__(self, file: str, looked_in: str, fix: str, key: str = "data.root"):
        super().__init__(key, looked_in, f"{file}; {fix}")
        self.args = (file, looked_in, fix, key)
        self.file, self.looked_in, self.fix = file, looked_in, fix


class TakenOver(QdsimError):
    """Another process owns the run now, so this one writes nothing more.

    Example scenario: a laptop sleeps for an hour with a run on it, which is resumed elsewhere meanwhile.
    """

    exit_code = 3

    def __init__(self, run: str, by: str):
        super().__init__(run, by)
        self.run, self.by = run, by

    def __str__(self) -> str:
        """Name the run and who has it."""
        return f"{self.run} has been taken over by {self.by}: nothing more is written from here"


class CannotPlace(QdsimError):
    """The cluster has no room for the actors that the job asks for.

    Example scenario: ten actors of 0.4 GPU each on two GPUs: two fit each GPU, so four are placed.
    """

    exit_code = 3

    def __init__(self, asked: str, found: str, fix: str, nodes: tuple[tuple[str, ...], ...] = ()):
        super().__init__(asked, found, fix, nodes)
        self.asked, self.found, self.fix = asked, found, fix
        self.nodes = nodes
        """Of each node: name, CPUs, GPUs, memory in GB, and how many actors it holds."""

    def __str__(self) -> str:
        """Say what was asked, what there is and which setting to change."""
        return f"the cluster cannot host this run: asked for {self.asked}, found {self.found}; {self.fix}"


class CannotReach(CannotPlace):
    """There is no cluster at an address, or it does not let us in.

    Example scenario: the head has token authentication on, and ``~/.ray/auth_token`` is not its token.
    """

    def __str__(self) -> str:
        """Name the address, the cause and what to set."""
        return f"cannot reach the cluster at {self.asked}: {self.found}; {self.fix}"


class UnusableGpu(CannotPlace):
    """Ray has granted a GPU that torch cannot use.

    Example scenario: NVIDIA's driver is older than the CUDA that torch was built with.
    """

    def __init__(self, gpu: str, reason: str):
        super().__init__(f"GPU {gpu}", f"that torch cannot use it ({reason})", "")
        self.args = (gpu, reason)
        self.fix = "mend that, or set cluster.cpu_fallback to true: clients then run on the CPU"


class OtherDevice(CannotPlace):
    """An actor came to another kind of device than the others: its bits would differ.

    Example scenario: the node of an A100 was lost, and the actor that replaces its own was given a V100.
    """

    def __init__(self, began_on: str, found: str, where: str):
        super().__init__(f"{began_on}, on which the run began", f"{found} on node {where}", "")
        self.args = (began_on, found, where)

    def __str__(self) -> str:
        """Name both devices and what allows them."""
        fix = "set cluster.mixed_devices to true to allow it, or resume where there is the former"
        return f"other device, other bits: asked for {self.asked}, found {self.found}; {fix}"


class OutOfMemory(CannotPlace):
    """A client ran out of memory, on its GPU or its node.

    Example scenario: eight clients share a GPU of 8 GB, and fine-tuning takes 2 GB of each.
    """

    def __init__(self, client_id: int, phase: str, round_number: int, where: str, numbers: str, fix: str):
        super().__init__(f"memory for client {client_id}", numbers, fix)
        self.args = (client_id, phase, round_number, where, numbers, fix)
        self.client_id, self.phase, self.round_number, self.where = client_id, phase, round_number, where

    def __str__(self) -> str:
        """Name client, phase, round and place, the numbers, and the settings that help."""
        place = f"{self.phase}{f', round {self.round_number}' if self.round_number else ''}, on {self.where}"
        return f"client {self.client_id} ran out of memory in {place}: {self.found}; {self.fix}"


class ClusterLost(CannotPlace):
    """A process of the cluster that was started here is gone; without it nothing can go on.

    Ray would end this process as well, after up to a minute and without a word of ours.
    Example scenario: the kernel killed ``raylet`` because the memory was full.
    """

    def __str__(self) -> str:
        """Name the process, how it ended and what to do."""
        return f"Ray on this machine has lost its {self.asked} ({self.found}); {self.fix}"


class StorageFailed(QdsimError):
    """The storage does not take what the run has to write; the last commit stays as it was.

    Example scenario: the disk under ``--out`` is full in round 30 of 50.
    """

    exit_code = 3

    def __init__(self, path: str, cause: str, fix: str):
        super().__init__(path, cause, fix)
        self.path, self.cause, self.fix = path, cause, fix

    def __str__(self) -> str:
        """Name the file, the cause and what to do."""
        return f"storage fails at {self.path}: {self.cause}; {self.fix}"


class ClientFailed(QdsimError):
    """A client step did not return an update; leaving the client out would change the result.

    Round 0 stands for a call outside a round, such as an evaluation.
    Example scenario: the loss of client 7 became infinite in round 3 because ``train.lr`` is too high.
    """

    exit_code = 4

    def __init__(self, client_id: int, phase: str, round_number: int, where: str, cause: str):
        super().__init__(client_id, phase, round_number, where, cause)
        self.client_id, self.phase, self.round_number = client_id, phase, round_number
        self.where, self.cause = where, cause

    def __str__(self) -> str:
        """Name client, phase, round and place before the cause."""
        place = f"{self.phase}{f', round {self.round_number}' if self.round_number else ''}, on {self.where}"
        return f"client {self.client_id} failed in {place}: {self.cause}"


class Diverged(QdsimError):
    """A loss or an update is no longer a finite number.

    Example scenario: ``unlearn.max_loss = "none"`` lets gradient ascent run into overflow.
    """

    exit_code = 4
