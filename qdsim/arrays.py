"""Named numpy arrays in a file: written whole or not at all, read without executing anything."""

import os
import secrets
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from qdsim.errors import BadInput


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the arrays under a name that begins with a dot, flush, and rename."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with open(temporary, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk, a renamed file's among them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path, fix: str) -> dict[str, np.ndarray]:
    """Return all arrays of a file; one that is damaged or gone is named, with what to do about it."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise damaged(path, error, fix) from None


def damaged(path: Path, error: Exception, fix: str) -> BadInput:
    """Return the error that names a file, what is wrong with it and what to do about it."""
    why = f"cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return BadInput("file", str(path), f"{why}; {fix}")
