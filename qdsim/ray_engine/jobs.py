"""Jobs on a cluster over HTTP: packed here, run there, followed and stopped from here, through Ray's job server.

The cluster runs the code that lies here: the package is sent with the job file and the packages that the job names
methods and networks from, and nothing else is: no data, no runs, no token. Only ``python -m qdsim run`` on the head
computes anything.
"""

import asyncio
import http.client
import logging
import shlex
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from qdsim import plugins
from qdsim.errors import BadInput, CannotPlace, CannotReach
from qdsim.ray_engine import environment

STOP_WAIT_S = 60
"""From SIGTERM to SIGKILL: Ray's three seconds may be too few to leave a run in order."""
STOPPED_CODE = 143
"""Ray keeps no exit code of a job that it has stopped: that of SIGTERM, which it has sent."""
REACH_S = 10.0
SILENCE_S = 60.0
"""How long a cluster may be out of reach while its job is waited for: a tunnel that is made again is no failure."""
POLL_S = 1.0
LAST_LINES = 10


@dataclass(frozen=True)
class Ended:
    """How a job ended: its status in Ray's words, and the exit code of its command."""

    status: str
    exit_code: int


def pack(job: Path, into: Path, outside: Iterable[tuple[str, str]] = ()) -> tuple[str, int, int]:
    """Copy the job file and this package into a folder; return the job's name there, the number of files, the bytes.

    ``outside``: what the job names from other packages, as :meth:`qdsim.experiment.config.Job.outside` returns it;
    these packages are copied, too, but not what they import from elsewhere.
    """
    package = Path(__file__).parent.parent
    shutil.copytree(package, into / package.name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    plugins.copy_packages(outside, into)
    (into / "jobs").mkdir()
    shutil.copy(job, into / "jobs" / job.name)
    sizes = [path.stat().st_size for path in into.rglob("*") if path.is_file()]
    return f"jobs/{job.name}", len(sizes), sum(sizes)


class JobServer:
    """The job server of one cluster, at the address of its dashboard."""

    def __init__(self, address: str):
        if not address.startswith(("http://", "https://")):
            raise BadInput("--address", address, "the URL of the cluster's dashboard, for example http://HEAD:8265")
        self.address = address.rstrip("/")
        for chatty in ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
            logging.getLogger(chatty).setLevel(logging.ERROR)
        self._knock()
        with self._asking():
            self._client = JobSubmissionClient(self.address)

    def submit(
        self,
        job: Path,
        arguments: Sequence[str],
        say: Callable[[str], None],
        outside: Iterable[tuple[str, str]] = (),
    ) -> str:
        """Send the job and the code; return the submission's id. The command's log is the job's log."""
        with tempfile.TemporaryDirectory(prefix="qdsim-") as folder:
            name, files, size = pack(job, Path(folder), outside)
            say(f"sending {job} and the code that lies here: {files} files, {size / 1e3:.0f} kB")
            command = ["python", "-m", "qdsim", "run", name, "--address", "auto", *arguments]
            # seen by everybody who may see the job: nothing secret belongs here
            environment = {
                "working_dir": folder,
                "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)},  # read by the job's supervisor
            }
            with self._asking():
                return str(self._client.submit_job(entrypoint=shlex.join(command), runtime_env=environment))

    def follow(self, submission_id: str, show: Callable[[str], None]) -> None:
        """Show the log as it grows, until the job ends or the connection does; :meth:`wait` tells which."""

        async def tail() -> None:
            async for text in self._client.tail_job_logs(submission_id):
                show(text)

        try:
            asyncio.run(tail())
        except Exception as error:  # of the web socket, whatever it is: the job goes on
            show(f"\nthe log breaks off here ({type(error).__name__}); the job is waited for\n")

    def wait(self, submission_id: str, at_most_s: float = float("inf")) -> Ended:
        """Return how the job ended, once it has."""
        begun_s = heard_s = time.monotonic()
        status = "not heard of"
        while True:
            try:
                found = self._info(submission_id)
                heard_s, status = time.monotonic(), found.status.lower()
                if found.status.is_terminal():
                    return self._ended(submission_id, found)
            except CannotReach:
                if time.monotonic() - heard_s > SILENCE_S:
                    raise
            if time.monotonic() - begun_s > at_most_s:
                there = f"the job {submission_id} is {status} after {at_most_s:g} s"
                raise CannotReach(self.address, there, "see its log, and whether the head is overloaded")
            time.sleep(POLL_S)

    def stop(self, submission_id: str) -> tuple[Ended, bool]:
        """Stop a job with SIGTERM and wait for its end; tell as well whether it was running at all."""
        before = self._info(submission_id)
        if before.status.is_terminal():
            return self._ended(submission_id, before), False
        with self._asking():
            self._client.stop_job(submission_id)
        return self.wait(submission_id, at_most_s=2 * STOP_WAIT_S), True

    def last_lines(self, submission_id: str) -> list[str]:
        """Return the end of the job's log."""
        with self._asking():
            return str(self._client.get_job_logs(submission_id)).splitlines()[-LAST_LINES:]

    def _info(self, submission_id: str) -> JobDetails:
        with self._asking():
            try:
                return self._client.get_job_info(submission_id)
            except RuntimeError as error:
                if "status code 404" not in str(error):
                    raise
                known = [job.submission_id for job in self._client.list_jobs() if job.submission_id]
                there = f"there are {', '.join(known)}" if known else "there is none"
                raise BadInput("SUBMISSION_ID", submission_id, f"no such job at {self.address}; {there}") from None

    def _ended(self, submission_id: str, found: JobDetails) -> Ended:
        code = found.driver_exit_code
        if code is None and found.status == JobStatus.FAILED:  # no command of ours has run to its end
            cause = (found.message or "").strip().splitlines() or ["no cause is given"]
            fix = "see the head's logs, and that python and what qdsim needs are installed on every node"
            raise CannotPlace(f"the job {submission_id}", f"that Ray failed to run it ({cause[0]})", fix)
        if code is None:
            code = STOPPED_CODE if found.status == JobStatus.STOPPED else 0
        return Ended(str(found.status.value).lower(), code if code >= 0 else 128 - code)

    def _knock(self) -> None:
        """See that somebody answers, whatever the answer: Ray's client would wait for minutes."""
        try:
            urllib.request.urlopen(f"{self.address}/api/version", timeout=REACH_S).close()
        except urllib.error.HTTPError:
            return
        except (OSError, ValueError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", error)
            fix = (
                "see that the head runs, and that its dashboard can be reached from here: a tunnel is made by "
                "ssh -L 8265:localhost:8265 HEAD"
            )
            raise CannotReach(self.address, f"no answer ({cause})", fix) from None

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Have what goes wrong between here and the cluster in one line."""
        try:
            yield
        except AuthenticationError:
            sent = environment.sends_token()
            refused = "it refused the token that was sent" if sent else "it asks for a token, and none was sent"
            raise CannotReach(self.address, refused, environment.how_to_authenticate()) from None
        except (OSError, RuntimeError, ValueError) as error:
            cause = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CannotReach(self.address, cause, "see that this is the dashboard of a Ray cluster") from None
