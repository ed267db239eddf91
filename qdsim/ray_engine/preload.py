"""What a process that Ray starts ahead imports while it waits for its actor."""

from qdsim.ray_engine.environment import gc_paused

with gc_paused():
    import qdsim.ray_engine.client_actor  # noqa: F401
