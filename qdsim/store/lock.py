"""One run, one owner: a lock that outlives a crash of its owner, but not for long."""

import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qdsim.errors import BadInput, StorageFailed, TakenOver
from qdsim.store import storage
from qdsim.store.storage import Remote, StoragePath

LEASE_S = 60.0
"""An owner on another host that has not been heard of for so long is taken to be dead."""
BEAT_S = 10.0
SETTLE_S = 1.0
"""Object stores cannot make a file only if it is not there yet: two who begin within this time are told apart after it.
"""


@contextmanager
def held(run_dir: StoragePath) -> Iterator[str]:
    """Own a run inside the block; refuse where another live process does. Yields the name under which it is owned.

    An owner on this host is asked for by its process id; on another, where that tells nothing, the time of the lock
    file counts, which its owner renews every ten seconds.
    """
    path = run_dir / "lock.json"
    own: dict[str, Any] = {"host": platform.node(), "pid": os.getpid(), "started": _started(os.getpid())}
    own |= {"name": secrets.token_hex(8), **_process_space()}
    while not _create(path, own):
        owner = _read(path)
        if owner is not None and _alive(owner, path):
            who = f"process {owner.get('pid')} on {owner.get('host')}"
            lease = "" if _is_here(owner) else f" (if it is dead, try again in {LEASE_S:g} s)"
            raise BadInput("RUN", str(run_dir), f"is being run by {who}: wait for it to end, or stop it{lease}")
        _remove(path, owner)
    over = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, str(own["name"]), over), daemon=True)
    beat.start()
    try:
        yield str(own["name"])
    finally:
        over.set()
        beat.join(BEAT_S)  # else its last beat might come after the lock is gone
        with suppress(StorageFailed):
            if (_read(path) or {}).get("name") == own["name"]:
                path.unlink(missing_ok=True)


def is_held(run_dir: StoragePath) -> bool:
    """Tell whether a live process owns a run."""
    path = run_dir / "lock.json"
    owner = _read(path)
    if owner is None or _is_here(owner):
        return owner is not None and _alive(owner, path)
    with suppress(FileNotFoundError):  # a watcher may not write: by its own clock, with some patience
        return abs(time.time() - storage.modified_s(path)) < 2 * LEASE_S
    return False


def check(run_dir: StoragePath, name: str) -> None:
    """Refuse to continue for an owner that another process has taken over from.

    A driver may outlive a killed command by some seconds, and an owner that was suspended wakes after its lease;
    meanwhile the run may have been resumed, and even finished.
    """
    if not owns(run_dir, name):
        owner = _read(run_dir / "lock.json")
        who = f"process {owner.get('pid')} on {owner.get('host')}" if owner else "a process that has ended since"
        raise TakenOver(run_dir.name, who)


def owns(run_dir: StoragePath, name: str) -> bool:
    """Tell whether the lock is still held under this name; whoever has taken it over may have given it back since."""
    return (_read(run_dir / "lock.json") or {}).get("name") == name


def _create(path: StoragePath, own: dict[str, Any]) -> bool:
    """Make the lock with its content at once, or not at all."""
    text = json.dumps(own)
    if isinstance(path, Remote):
        if path.exists():
            return False
        storage.write(path, text.encode())
        time.sleep(SETTLE_S)  # whoever else has written in the same moment: the last one owns it
        return bool((_read(path) or {}).get("name") == own["name"])
    temporary = path.with_name(f".lock.{secrets.token_hex(4)}")
    storage.write(temporary, text.encode())
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _read(path: StoragePath) -> dict[str, Any] | None:
    """Return who owns the lock; None where there is none, or one that nobody can have written."""
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    except OSError as error:  # somebody may own it all the same
        raise StorageFailed(str(path), error.strerror or str(error), "see that the storage is there") from None
    return owner if isinstance(owner, dict) else None


def _alive(owner: dict[str, Any], path: StoragePath) -> bool:
    if _is_here(owner):
        pid = owner.get("pid")
        return isinstance(pid, int) and _started(pid) is not None and _started(pid) == owner.get("started")
    now = path.with_name(f".now.{secrets.token_hex(4)}")
    storage.write(now, b"")  # both times by the clock of the storage
    try:
        written_s = storage.modified_s(path)
        age_s = storage.modified_s(now) - written_s
        if age_s > -LEASE_S:
            return age_s < LEASE_S
        time.sleep(2 * BEAT_S)  # dated ahead, by a clock that was wrong: a live owner dates it anew meanwhile
        return storage.modified_s(path) != written_s
    except FileNotFoundError:
        return False
    finally:
        now.unlink(missing_ok=True)


def _process_space() -> dict[str, str]:
    """Return what tells whether process ids mean the same to another process: the boot and the PID namespace."""
    found = {}
    with suppress(OSError):
        found["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        found["pid_namespace"] = os.readlink("/proc/self/ns/pid")
    return found


def _is_here(owner: dict[str, Any]) -> bool:
    """Tell whether an owner can be asked for by its process id; a container may have this host's name, or its boot."""
    if owner.get("host") != platform.node():
        return False
    return "boot" not in owner or {key: owner.get(key) for key in ("boot", "pid_namespace")} == _process_space()


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


def _remove(path: StoragePath, owner: dict[str, Any] | None) -> None:
    """Take a dead owner's lock away; put it back if somebody else has taken over just now."""
    if isinstance(path, Remote):
        if _read(path) == owner:
            path.unlink(missing_ok=True)
        return
    stale = path.with_name(f".lock.{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        os.rename(path, stale)
        if _read(stale) != owner:
            with suppress(OSError):
                os.link(stale, path)
        stale.unlink()


def _beat(path: StoragePath, name: str, over: threading.Event) -> None:
    while not over.wait(BEAT_S):
        with suppress(OSError, StorageFailed):
            owner = _read(path) or {}
            if owner.get("name") != name:
                continue
            if isinstance(path, Remote):
                storage.write(path, json.dumps(owner).encode())
            else:
                os.utime(path)
