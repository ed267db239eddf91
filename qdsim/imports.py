"""Imports that take long, made shorter."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep the garbage collector out of the way: a seventh of importing torch, and there is nothing to collect."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
