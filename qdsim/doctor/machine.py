"""The checks of a machine that need neither Ray nor a GPU: cores, memory, storage, ports, data."""

import os
import secrets
import shutil
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from qdsim.data import datasets
from qdsim.doctor.checks import Check, Number, Outcome
from qdsim.errors import QdsimError
from qdsim.experiment.sections import DataSection
from qdsim.models.device import driver_version
from qdsim.store import storage

LEAST_MEMORY_BYTES = 1.5e9
"""A driver and two client actors with what Ray starts beside them."""
LEAST_SHM_BYTES = 256e6
LEAST_DISK_BYTES = 1e9
PORTS = 8
"""Ray opens about as many for a cluster of one node."""


def check_machine(runs: str) -> list[Check]:
    """Make all of them; ``runs`` is where run directories are to go."""
    return [
        _cores(),
        _instructions(),
        _memory(),
        _shared_memory(),
        _disk(runs),
        _storage(runs),
        _ports(),
        _data(),
        _cuda(),
    ]


def _cores() -> Check:
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    usable = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = _cpu_quota()
    says = f"{usable} cores" + (f", of which a quota leaves {quota:g}" if quota else "")
    numbers = {"cores": usable, "torch_threads": torch.get_num_threads()} | ({"quota": quota} if quota else {})
    fits = not quota or quota >= 1
    return Check("cores", "pass" if fits else "fail", says, numbers, vital=False)


def _cpu_quota() -> float | None:
    """Return how many cores a container may use; None where nothing limits it. Ray sees the limit, torch does not."""
    with suppress(OSError, ValueError):
        allowed, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return None if allowed == "max" else int(allowed) / int(period)
    return None


def _instructions() -> Check:
    has = torch.backends.cpu.get_cpu_capability()
    wide = has not in ("DEFAULT", "NO AVX")
    says = f"torch computes with {has}" + ("" if wide else ": steps are several times slower than with AVX2")
    return Check("vector instructions", "pass" if wide else "fail", says, {"instructions": has}, vital=False)


def _memory() -> Check:
    free = None
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    if free is None:
        return Check("memory", "not checked", f"{sys.platform} does not tell how much is free")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    says = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f}"
    outcome: Outcome = "pass" if free >= LEAST_MEMORY_BYTES else "fail"
    return Check("memory", outcome, says, {"free_bytes": free, "total_bytes": total})


def _shared_memory() -> Check:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return Check("/dev/shm", "not checked", "there is none: Ray keeps images in its temporary folder", vital=False)
    total, _, free = shutil.disk_usage(shm)
    enough = free >= LEAST_SHM_BYTES
    slow = ": Ray keeps images on disk instead; in a container give it --shm-size"
    says = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f}" + ("" if enough else slow)
    return Check(
        "/dev/shm", "pass" if enough else "fail", says, {"free_bytes": free, "total_bytes": total}, vital=False
    )


def _disk(runs: str) -> Check:
    folder = storage.named(runs)
    if not isinstance(folder, Path):
        return Check("disk", "not checked", "an object store does not tell how much is free")
    there = next(path for path in [folder.absolute(), *folder.absolute().parents] if path.is_dir())
    free = shutil.disk_usage(there).free
    outcome: Outcome = "pass" if free >= LEAST_DISK_BYTES else "fail"
    return Check("disk", outcome, f"{free / 1e9:.1f} GB free where runs go", {"free_bytes": free})


def _storage(runs: str) -> Check:
    """Write, replace and link a file where runs go, as commits and the lock of a run do."""
    folder = storage.named(runs)
    began_s = time.perf_counter()
    made = [path for path in (folder,) if not path.exists()]
    probe = folder / f".doctor-{secrets.token_hex(4)}"
    link = folder / f"{probe.name}-link"
    numbers: dict[str, Number] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        storage.write(probe, b"one")
        storage.write(probe, b"two")  # under a name of its own, then renamed
        whole = probe.read_bytes() == b"two"
        numbers["writes_s"] = round(time.perf_counter() - began_s, 4)
        if isinstance(probe, Path) and isinstance(link, Path):
            numbers["links"] = _links(probe, link)
    except (OSError, QdsimError) as error:
        return Check("storage", "fail", f"a file cannot be written where runs go: {str(error).splitlines()[0]}")
    finally:
        for path in (link, probe):
            with suppress(OSError, QdsimError):
                path.unlink(missing_ok=True)
        for path in made:
            with suppress(OSError):
                if isinstance(path, Path):
                    path.rmdir()
    if not whole:
        return Check("storage", "fail", "a file that was replaced still has its old content", numbers)
    missing = "" if numbers.get("links", True) else "; it has no hard links, so that two commands may begin at once"
    return Check("storage", "pass", f"written and replaced in {numbers['writes_s']} s{missing}", numbers)


def _links(probe: Path, link: Path) -> bool:
    try:
        os.link(probe, link)
    except OSError:
        return False
    return True


def _ports() -> Check:
    """Open ports on loopback, and reach each of them: a local cluster listens there alone."""
    opened: list[socket.socket] = []
    try:
        for _ in range(PORTS):
            listener = socket.create_server(("127.0.0.1", 0))
            opened.append(listener)
            with socket.create_connection(listener.getsockname(), timeout=5.0):
                listener.accept()[0].close()
    except OSError as error:
        return Check("ports", "fail", f"no connection through 127.0.0.1: {error}", {"opened": len(opened)})
    finally:
        for listener in opened:
            listener.close()
    return Check("ports", "pass", f"{PORTS} on loopback, each reached", {"opened": PORTS})


def _data() -> Check:
    root = DataSection().root
    there = []
    for name in datasets.SHAPES:
        with suppress(QdsimError, OSError):
            datasets.check_there(name, root)
            there.append(name)
    known = {"there": ", ".join(there), "known": ", ".join(datasets.SHAPES)}
    if not there:
        says = "none under data.root: digits needs none, the others come with --set data.download=true"
        return Check("data sets", "not checked", says, known, vital=False)
    return Check("data sets", "pass", f"{', '.join(there)} under data.root, and digits", known)


def _cuda() -> Check:
    """Say what torch and the driver make of each other, before Ray hands out any GPU."""
    count = torch.cuda.device_count()
    driver, built = driver_version(), torch.version.cuda or ""
    numbers: dict[str, Number] = {"gpus": count, "driver": driver, "built_for_cuda": built}
    if count:
        return Check("GPUs of this machine", "pass", f"{count}, driver {driver or 'unknown'}, CUDA {built}", numbers)
    if driver or Path("/dev/nvidiactl").exists():
        why = "torch is built for CPUs" if not built else "the driver is too old for it, or no GPU is visible"
        says = f"there is NVIDIA's driver {driver}, and torch {torch.__version__} sees no GPU: {why}"
        return Check("GPUs of this machine", "fail", says, numbers)
    return Check("GPUs of this machine", "not checked", "no GPU and no driver here", numbers)
