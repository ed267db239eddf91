"""What must stand in the environment before Ray is imported: it reads its settings then, and only then."""

import os
import secrets
from pathlib import Path


def prepare(address: str | None) -> None:
    """Set ``RAY_AUTH_MODE`` explicitly: left to itself Ray decides by the files it happens to find.

    A cluster started here gets a token of its own that no file holds; a running one is joined with the
    user's token where there is one. What the user has set stays.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    local = address is None and not os.environ.get("RAY_ADDRESS")
    mode = os.environ.setdefault("RAY_AUTH_MODE", "token" if local or _has_token() else "disabled")
    if local and mode == "token" and not _has_token():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _has_token() -> bool:
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return True
    return (Path.home() / ".ray" / "auth_token").exists()
