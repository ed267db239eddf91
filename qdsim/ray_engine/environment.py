"""What must stand in the environment before Ray is imported: it reads its settings then, and only then."""

import gc
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MPS_PIPES = "/tmp/nvidia-mps"
"""Where CUDA MPS has its pipes, unless CUDA_MPS_PIPE_DIRECTORY says otherwise."""


def prepare(address: str | None) -> None:
    """Set ``RAY_AUTH_MODE`` explicitly: left to itself Ray decides by the files it happens to find.

    A cluster started here gets a token of its own that no file holds; a running one is joined with the
    user's token where there is one. What the user has set stays. Where Ray runs already, it is too late.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    local = address is None and not os.environ.get("RAY_ADDRESS")
    if local:  # the processes that Ray starts ahead import it meanwhile
        os.environ.setdefault("RAY_preload_python_modules", "qdsim.ray_engine.preload")
    mode = os.environ.setdefault("RAY_AUTH_MODE", "token" if local or token_source() is not None else "disabled")
    if local and mode == "token" and token_source() is None:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def prepare_for_jobs(address: str) -> None:
    """Prepare for a job server: the address that was given counts, and none that Ray would find in the environment."""
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        os.environ.pop(name, None)
    prepare(address)


def token_source() -> str | None:
    """Say where Ray finds its token here, in its order; None where there is none. The token itself is not read."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(named) if named else Path.home() / ".ray" / "auth_token"
    return str(file) if file.exists() else None


def sends_token() -> bool:
    """Tell whether requests from here carry a token."""
    return os.environ.get("RAY_AUTH_MODE") == "token" and token_source() is not None


def how_to_authenticate() -> str:
    """Say in a line how this process would authenticate, and what to set where that is refused."""
    source, mode = token_source(), os.environ.get("RAY_AUTH_MODE")
    found = (
        f"the token from {source}" if source else "no token (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token)"
    )
    fix = "copy the head's ~/.ray/auth_token to this machine, mode 0600"
    if mode != "token":
        fix = "set RAY_AUTH_MODE=token" + ("" if source else f" and {fix}")
    elif source == "RAY_AUTH_TOKEN":
        fix += ", and unset RAY_AUTH_TOKEN"
    return f"RAY_AUTH_MODE is {mode!r} here, with {found}: {fix}"


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector: it takes a seventh of the time of importing torch, and finds nothing to collect."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
