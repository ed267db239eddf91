"""Where runs lie: a local or shared path, or a URI that one of pyarrow's file systems takes.

``--out runs`` is a path; ``--out s3://bucket/runs?region=eu-west-1`` (or ``gs://``, ``abfs://``) is a
:class:`Remote`, which has those methods of :class:`pathlib.Path` that are used here. Whatever the storage, a file is
written whole or not at all: on a disk under a name that begins with a dot, flushed, then renamed; in an object store an
object appears when it is complete; elsewhere under a dotted name, then moved.
"""

import ctypes
import errno
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

from qdsim.errors import BadInput, StorageFailed

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

WHOLE_OBJECTS = ("s3", "gcs", "abfs")
"""File systems in which nobody sees an object before it is closed."""
PLAIN_OPTIONS = {"region", "scheme", "endpoint_override", "allow_bucket_creation", "force_virtual_addressing"}
"""Of a URI: those that hold no secret."""
FULL = (errno.ENOSPC, errno.EDQUOT)
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT)
"""The storage is there, but does not take anything, or no longer."""


@dataclass(frozen=True)
class Remote:
    """A file or folder that a URI names."""

    uri: str

    def __str__(self) -> str:
        """Return the URI: it holds no credentials, see :func:`named`."""
        return self.uri

    def __truediv__(self, name: str) -> "Remote":
        """Return what lies in this folder under a name."""
        return self._at(f"{self._parts.path.rstrip('/')}/{name}")

    def _at(self, path: str) -> "Remote":
        parts = self._parts  # put together by hand: urlunsplit drops the slashes of a URI without a host
        return Remote(f"{parts.scheme}://{parts.netloc}{path}{f'?{parts.query}' if parts.query else ''}")

    @property
    def _parts(self) -> Any:
        return urlsplit(self.uri)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return str(self._parts.path.rstrip("/").rpartition("/")[2] or self._parts.netloc)

    @property
    def stem(self) -> str:
        """The name without its last suffix."""
        return Path(self.name).stem

    @property
    def parent(self) -> "Remote":
        """The folder that this lies in."""
        return self._at(self._parts.path.rstrip("/").rpartition("/")[0])

    def resolve(self) -> "Remote":
        """A URI is absolute already."""
        return self

    def absolute(self) -> "Remote":
        """A URI is absolute already."""
        return self

    def with_name(self, name: str) -> "Remote":
        """Return the neighbour of that name."""
        return self.parent / name

    def _open(self) -> "tuple[FileSystem, str]":
        parts = self._parts
        query = f"?{parts.query}" if parts.query else ""
        system, root = _connect(f"{parts.scheme}://{parts.netloc}{query}")
        return system, root + parts.path.rstrip("/")

    @contextmanager
    def _reached(self) -> "Iterator[tuple[FileSystem, str]]":
        """Speak with the storage; what fails on the way is not taken for a file that is damaged or gone."""
        try:
            yield self._open()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _failed(self, error) from None

    def _info(self) -> "FileInfo":
        with self._reached() as (system, path):
            return system.get_file_info(path)

    def exists(self) -> bool:
        """Tell whether there is a file or a folder."""
        from pyarrow.fs import FileType

        return bool(self._info().type != FileType.NotFound)

    def is_dir(self) -> bool:
        """Tell whether there is a folder."""
        from pyarrow.fs import FileType

        return bool(self._info().type == FileType.Directory)

    def modified_s(self) -> float:
        """Return when it was written, by the clock of the storage."""
        written_ns = self._info().mtime_ns
        if written_ns is None:
            raise FileNotFoundError(errno.ENOENT, "not there", self.uri)
        return float(written_ns) / 1e9

    def iterdir(self) -> "Iterator[Remote]":
        """Yield what lies in this folder; nothing where it does not exist."""
        from pyarrow.fs import FileSelector

        with self._reached() as (system, path):
            found = system.get_file_info(FileSelector(path, allow_not_found=True))
        return iter([self / info.base_name for info in found])

    def glob(self, pattern: str) -> "Iterator[Remote]":
        """Yield the files in this folder whose names match; a pattern is one name."""
        return (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Make the folder, where the storage knows folders."""
        with self._reached() as (system, path):
            system.create_dir(path, recursive=True)

    def touch(self) -> None:
        """Make an empty file."""
        write(self, b"")

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Delete the file."""
        try:
            with self._reached() as (system, path):
                system.delete_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self) -> None:
        """Delete the folder with all that is in it."""
        with self._reached() as (system, path):
            system.delete_dir(path)

    def read_bytes(self) -> bytes:
        """Return the file's content."""
        with self._reached() as (system, path), system.open_input_stream(path) as stream:
            return bytes(stream.read())

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the file's content as text."""
        return self.read_bytes().decode(encoding)

    def put(self, data: "bytes | memoryview") -> None:
        """Write the file whole or not at all: in a thread of its own, since a signal in the midst would close half."""
        problems: list[BaseException] = []

        def work() -> None:
            try:
                self._put(data)
            except BaseException as error:
                problems.append(error)

        writer = threading.Thread(target=work)
        writer.start()
        writer.join()
        for problem in problems:
            raise problem

    def _put(self, data: "bytes | memoryview") -> None:
        system, path = self._open()
        whole = system.type_name in WHOLE_OBJECTS
        head, _, name = path.rpartition("/")
        temporary = path if whole else f"{head}/.{name}.{secrets.token_hex(4)}.tmp"
        with system.open_output_stream(temporary) as stream:
            stream.write(data)
        if not whole:
            system.move(temporary, path)


StoragePath = Path | Remote
"""A place for files, or a file in one."""


@lru_cache
def _connect(root: str) -> "tuple[FileSystem, str]":
    """Return the file system of a URI without path, and the name of its root there: a bucket, or nothing."""
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem

    try:
        system, path = FileSystem.from_uri(root)
    except (ArrowException, OSError, ValueError) as error:
        raise BadInput("storage", root, f"no storage that can be opened: {_first_line(error)}") from None
    return system, path.rstrip("/")


def folder(text: str) -> StoragePath:
    """Return the place that a path or a URI names, which must be one that can be opened here."""
    found = named(text)
    if isinstance(found, Remote):
        found.exists()  # an unknown scheme or a bad option shows here
    return found


def named(text: str) -> StoragePath:
    """Return the place that a path or a URI names, without looking at it."""
    scheme, separator, _ = text.partition("://")
    if not separator:
        return Path(text)
    parts = urlsplit(text)
    if scheme == "file":
        return Path(parts.path)
    unknown = set(parse_qs(parts.query, keep_blank_values=True)) - PLAIN_OPTIONS
    if parts.password or (parts.username and scheme == "s3") or unknown:
        shown = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))
        allowed = f"options of a URI are {', '.join(sorted(PLAIN_OPTIONS))}"
        why = f"a URI ends up in logs: leave credentials to the environment or the storage's own files; {allowed}"
        raise BadInput("storage", shown, why)
    return Remote(text.replace("/?", "?").rstrip("/"))


@contextmanager
def writing(path: StoragePath) -> Iterator[IO[bytes]]:
    """Open a file for writing; it appears under its name when the block ends, whole and durable."""
    if isinstance(path, Remote):
        buffer = BytesIO()
        yield buffer
        try:
            path.put(buffer.getbuffer())
        except OSError as error:
            raise _failed(path, error) from None
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        _forget(temporary)
        raise _failed(path, error) from None
    except BaseException:
        _forget(temporary)
        raise


def _forget(temporary: Path) -> None:
    """Delete a temporary file; where that fails, what had failed before is said."""
    with suppress(OSError):
        temporary.unlink(missing_ok=True)


def as_failure(error: BaseException) -> StorageFailed | None:
    """Return what the system says of a file as a failure of the storage; None where it is about something else."""
    if not isinstance(error, OSError) or error.filename is None or error.errno not in (*FULL, *UNWRITABLE):
        return None
    return _failed(Path(os.fsdecode(error.filename)), error)


def inside(folder: StoragePath, pattern: str = "[!.]*") -> list[StoragePath]:
    """Return what lies in a folder under a matching name, in the order of names; nothing where it does not exist."""
    found: list[StoragePath] = [*folder.glob(pattern)]
    return sorted(found, key=str)


def write(path: StoragePath, data: bytes) -> None:
    """Write a whole file or none of it."""
    with writing(path) as file:
        file.write(data)


def sync(directory: Path) -> None:
    """Have the names in a directory on disk, a renamed file's among them."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Give two folders each other's name in one step; False where the system or its file system cannot."""
    here, both_ways = -100, 2  # AT_FDCWD in fcntl.h, RENAME_EXCHANGE in linux/fs.h
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):
        return False
    return bool(renameat2(here, os.fsencode(one), here, os.fsencode(other), both_ways) == 0)


def modified_s(path: StoragePath) -> float:
    """Return when a file was written, by the clock of the storage."""
    return path.modified_s() if isinstance(path, Remote) else path.stat().st_mtime


def remove(path: StoragePath) -> None:
    """Delete a folder with all that is in it, if it is there."""
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        path.remove()


def check_room(path: StoragePath, needed_bytes: float) -> None:
    """Refuse to begin what will not fit; an object store has no end."""
    if isinstance(path, Path):
        there = next(folder for folder in [path, *path.resolve().parents] if folder.exists())
        free = shutil.disk_usage(there).free
        if free < needed_bytes:
            need = f"the run needs about {_size(needed_bytes)}, and {_size(free)} are free"
            raise StorageFailed(str(path), need, "free some space, or choose another --out")


def _failed(path: StoragePath, error: OSError) -> StorageFailed:
    why = error.strerror or _first_line(error)
    if error.errno in FULL and isinstance(path, Path):
        with suppress(OSError):
            why = f"{why} ({_size(shutil.disk_usage(path.parent).free)} free)"
    fix = "free some space" if error.errno in FULL else "see that the storage is there and may be written to"
    return StorageFailed(str(path), why, f"{fix}, then qdsim resume continues from the last commit")


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
