"""Named numpy arrays in a file: written whole or not at all, bound to their owner, read without executing anything.

A file says inside whose it is and what it holds. A copy of another run's, or of another client's, has the right shapes
and would be taken for the right one.
"""

import json
from collections.abc import Mapping
from io import BytesIO
from typing import NamedTuple

import numpy as np

from qdsim.errors import BadInput, QdsimError
from qdsim.store import storage
from qdsim.store.storage import StoragePath

NAMES = "__names__"
IDENTITY = "__identity__"


class ArrayFile(NamedTuple):
    """A file of arrays, and whose it is."""

    path: StoragePath
    owner: str
    """The id of the run, or the hash of the training."""
    content: str
    """What it holds, for example ``client 3 after 0-00002``."""
    unnamed: bool = False
    """It may be of a version that wrote no owner into its files."""


def write(file: ArrayFile, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the arrays as one file, whole or not at all."""
    identity = json.dumps({"owner": file.owner, "content": file.content}).encode()
    named = {**arrays, IDENTITY: np.frombuffer(identity, np.uint8)}
    names = np.array(sorted(named))  # a damaged directory of the file may hide an array
    content = BytesIO()  # numpy leaves a zip file open where a disk is full, which complains when it is deleted
    np.savez(content, **named, **{NAMES: names})  # type: ignore[arg-type]
    with storage.writing(file.path) as stream:
        stream.write(content.getbuffer())


def read(file: ArrayFile, fix: str) -> dict[str, np.ndarray]:
    """Return all arrays of a file; one that is damaged, gone or another's is named, with what to do about it."""
    found, identity = _load(file.path, fix)
    if identity is None and file.unnamed:
        return found
    expected = {"owner": file.owner, "content": file.content}
    if identity != expected:
        said = "says nothing of whose it is" if identity is None else f"is {_said(identity)}"
        raise BadInput("file", str(file.path), f"{said}, not {_said(expected)}; {fix}")
    return found


def load(path: StoragePath, fix: str) -> dict[str, np.ndarray]:
    """Return all arrays of a file, whosever it is."""
    return _load(path, fix)[0]


def _load(path: StoragePath, fix: str) -> tuple[dict[str, np.ndarray], dict[str, str] | None]:
    try:
        with np.load(BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            found = dict(arrays)
        if sorted(found) != sorted([NAMES, *found.get(NAMES, np.array([])).tolist()]):
            raise ValueError("some of its arrays are gone")
        identity = json.loads(found.pop(IDENTITY).tobytes()) if IDENTITY in found else None
    except QdsimError:  # the storage cannot be reached: nothing is wrong with the file
        raise
    except Exception as error:  # numpy and zip raise what the damaged bytes make them raise
        raise damaged(path, error, fix) from None
    del found[NAMES]
    return found, identity


def _said(identity: Mapping[str, str]) -> str:
    return f"{identity.get('content')} of {identity.get('owner')}"


def damaged(path: StoragePath, error: Exception, fix: str) -> BadInput:
    """Return the error that names a file, what is wrong with it and what to do about it."""
    why = f"cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return BadInput("file", str(path), f"{why}; {fix}")
