"""Named numpy arrays in a file: written whole or not at all, read without executing anything."""

import zipfile
import zlib
from collections.abc import Mapping
from io import BytesIO

import numpy as np

from qdsim.errors import BadInput
from qdsim.store import storage
from qdsim.store.storage import StoragePath

NAMES = "__names__"
DAMAGED = (OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What numpy and zip make of damaged bytes."""


def write(path: StoragePath, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the arrays as one file, whole or not at all."""
    names = np.array(sorted(arrays))  # a damaged directory of the file may hide an array
    with storage.writing(path) as file:
        np.savez(file, **arrays, **{NAMES: names})  # type: ignore[arg-type]


def read(path: StoragePath, fix: str) -> dict[str, np.ndarray]:
    """Return all arrays of a file; one that is damaged or gone is named, with what to do about it."""
    try:
        with np.load(BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            found = dict(arrays)
        if sorted(found) != sorted([NAMES, *found.get(NAMES, np.array([])).tolist()]):
            raise ValueError("some of its arrays are gone")
    except DAMAGED as error:
        raise damaged(path, error, fix) from None
    del found[NAMES]
    return found


def damaged(path: StoragePath, error: Exception, fix: str) -> BadInput:
    """Return the error that names a file, what is wrong with it and what to do about it."""
    why = f"cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return BadInput("file", str(path), f"{why}; {fix}")
