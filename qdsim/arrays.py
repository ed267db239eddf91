"""Named numpy arrays in a file: written whole or not at all, read without executing anything."""

import zipfile
from collections.abc import Mapping
from io import BytesIO

import numpy as np

from qdsim import storage
from qdsim.errors import BadInput
from qdsim.storage import Folder


def write(path: Folder, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the arrays as one file, whole or not at all."""
    with storage.writing(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def read(path: Folder, fix: str) -> dict[str, np.ndarray]:
    """Return all arrays of a file; one that is damaged or gone is named, with what to do about it."""
    try:
        with np.load(BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise damaged(path, error, fix) from None


def damaged(path: Folder, error: Exception, fix: str) -> BadInput:
    """Return the error that names a file, what is wrong with it and what to do about it."""
    why = f"cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return BadInput("file", str(path), f"{why}; {fix}")
