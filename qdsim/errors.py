"""Everything qdsim refuses or gives up on, each with the exit code of the command line.

    QdsimError                 1   something inside qdsim is wrong
    ├── BadInput               2   a job, a value or a file the user gave
    ├── CannotPlace            3   the cluster cannot host the run
    │   ├── CannotReach        3   or does not let us in
    │   └── ClusterLost        3   or is gone, where it was started here
    ├── StorageFailed          3   the storage cannot: full, or gone
    ├── ClientFailed           4   a client step raised, or its actor died
    └── Diverged               4   a loss or an update is no longer a number
    Interrupted              130   SIGINT, 143 for SIGTERM, 129 for SIGHUP: the terminal was closed

An error's message is one line: what happened with numbers, the likely cause, the setting to change.
All of them are built from plain arguments, so they survive pickling between processes.
"""


class QdsimError(Exception):
    """Base of all errors that the command line prints without a traceback."""

    exit_code = 1


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP arrived; not an Exception, so that nothing on the way swallows it."""

    def __init__(self, signum: int):
        super().__init__(signum)
        self.signum = signum
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
        """Name the key, the value and what is allowed."""
        return f"{self.key} = {self.value!r}: {self.allowed}"


class MissingData(BadInput):
    """A data file is not there or damaged.

    Example scenario: ``data.dataset = "svhn"`` and no ``train_32x32.mat`` under ``data.root``.
    """

    def __init__(self, file: str, looked_in: str, fix: str):
        super().__init__("data.root", looked_in, f"{file}; {fix}")
        self.args = (file, looked_in, fix)


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
