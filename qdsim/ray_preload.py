"""What a process that Ray starts ahead imports while it waits for its actor."""

from qdsim import imports

with imports.undisturbed():
    import qdsim.ray_clients  # noqa: F401
