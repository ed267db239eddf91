"""One run, one owner: a lock that outlives a crash of its owner, but not for long."""

import json
import os
import platform
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qdsim.errors import BadInput, QdsimError

LEASE_S = 60.0
"""An owner on another host that has not been heard of for so long is taken to be dead."""
BEAT_S = 10.0


@contextmanager
def held(run_dir: Path) -> Iterator[str]:
    """Own a run inside the block; refuse where somebody alive does. Yields the name under which it is owned.

    An owner on this host is asked for by its process id; on another, where that tells nothing, the time of the lock
    file counts, which its owner renews every ten seconds.
    """
    path = run_dir / "lock.json"
    own: dict[str, Any] = {"host": platform.node(), "pid": os.getpid(), "started": _started(os.getpid())}
    own["name"] = secrets.token_hex(8)
    while not _create(path, own):
        owner = _read(path)
        if owner is not None and _alive(owner, path):
            who = f"process {owner.get('pid')} on {owner.get('host')}"
            lease = "" if owner.get("host") == platform.node() else f" (if it is dead, try again in {LEASE_S:g} s)"
            raise BadInput("RUN", str(run_dir), f"is being run by {who}: wait for it to end, or stop it{lease}")
        _remove(path, owner)
    over = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, str(own["name"]), over), daemon=True)
    beat.start()
    try:
        yield str(own["name"])
    finally:
        over.set()
        if (_read(path) or {}).get("name") == own["name"]:
            path.unlink(missing_ok=True)


def check(run_dir: Path, name: str) -> None:
    """Refuse to go on for an owner that somebody else has taken over from.

    A driver may outlive a killed command by some seconds; meanwhile the run may have been resumed.
    """
    owner = _read(run_dir / "lock.json")
    if owner is not None and owner.get("name") != name:
        who = f"process {owner.get('pid')} on {owner.get('host')}"
        raise QdsimError(f"{run_dir.name} has been taken over by {who}")


def _create(path: Path, own: dict[str, Any]) -> bool:
    """Make the lock with its content at once, or not at all."""
    temporary = path.with_name(f".lock.{secrets.token_hex(4)}")
    temporary.write_text(json.dumps(own), encoding="utf-8")
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(json.dumps(own))
        except FileExistsError:
            return False
    finally:
        temporary.unlink()
    return True


def _read(path: Path) -> dict[str, Any] | None:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) else None


def _alive(owner: dict[str, Any], path: Path) -> bool:
    if owner.get("host") == platform.node():
        pid = owner.get("pid")
        return isinstance(pid, int) and _started(pid) is not None and _started(pid) == owner.get("started")
    now = path.with_name(f".now.{secrets.token_hex(4)}")
    now.touch()  # both times by the clock of the storage
    try:
        return now.stat().st_mtime - path.stat().st_mtime < LEASE_S
    except FileNotFoundError:
        return False
    finally:
        now.unlink()


def _started(pid: int) -> str | None:
    """Return when a process of this host began, since numbers are used again; None where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return None
    except OSError:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "unknown"


def _remove(path: Path, owner: dict[str, Any] | None) -> None:
    """Take a dead owner's lock away; put it back if somebody else has taken over just now."""
    stale = path.with_name(f".lock.{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        os.rename(path, stale)
        if _read(stale) != owner:
            with suppress(OSError):
                os.link(stale, path)
        stale.unlink()


def _beat(path: Path, name: str, over: threading.Event) -> None:
    while not over.wait(BEAT_S):
        with suppress(OSError):
            if (_read(path) or {}).get("name") == name:
                os.utime(path)
