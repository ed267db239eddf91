"""The client actors that a run begins with, started by the command beside the driver that they will work for.

Each process takes seconds to import torch: were they started by the driver, they would wait until it has.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qdsim.data.datasets import Normalization
from qdsim.experiment.plan import Plan
from qdsim.planning import estimate
from qdsim.planning.layout import Layout, without_cores
from qdsim.ray_engine import cluster
from qdsim.ray_engine.client_actor import ClientActor
from qdsim.ray_engine.reservation import Reservation

MOST_NAMED = 5


@dataclass
class WorkerGroup:
    """The actors of all clients, and what it takes to start one again."""

    run_id: str
    layout: Layout
    reservation: Reservation
    start_with: tuple[Any, ...]
    """What every actor is made from."""
    cpu_fallback: bool = False
    actors: list[Any] = field(default_factory=list)

    def start(self, worker: int) -> Any:
        """Start one at its place."""
        cls: Any = ClientActor
        clients = self.layout.clients[worker]
        return cls.options(
            num_cpus=self.layout.cpus,
            num_gpus=self.layout.gpus,
            memory=self.layout.memory_bytes or None,
            scheduling_strategy=self.reservation.strategy(worker),
            name=f"clients-{listed(clients, '-')}-{self.run_id}-{secrets.token_hex(4)}",
        ).remote(*self.start_with, clients, self.layout.gpus, self.cpu_fallback)


def start_workers(
    plan: Plan,
    run_id: str,
    images: list[Any],
    normalization: Normalization,
    notify: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
    gpu_memory: float | None = None,
) -> WorkerGroup:
    """Start all actors of a plan, as soon as there is room for them; ``check`` may raise to end the wait for it.

    ``images`` are references: what they refer to does not come into this process again. ``gpu_memory`` is that of the
    smallest GPU, where it is known.
    """
    wanted = plan.job.cluster
    layout = estimate.layout_of(plan, cluster.nodes(), cluster.most_gpus(), gpu_memory)
    packing = estimate.packing_note(plan, layout, gpu_memory)
    if packing:
        notify(packing)
    layout = without_cores(layout, wanted, cluster.free_nodes())
    if wanted.gpus_per_client == "auto" and not layout.gpus:
        notify("no GPUs here: clients run on CPUs (cluster.gpus_per_client)")
    reservation = Reservation(layout, run_id, wanted.placement_timeout_s, notify, check)
    start_with = (*images, normalization, plan.points[0].model, wanted.numerics(), wanted.cuda_graphs)
    group = WorkerGroup(run_id, layout, reservation, start_with, wanted.cpu_fallback)
    group.actors = [group.start(worker) for worker in range(len(layout.clients))]
    return group


def listed(clients: tuple[int, ...] | list[int], between: str) -> str:
    """Name an actor's clients, the first few of them where there are many."""
    more = len(clients) - MOST_NAMED
    return between.join([*map(str, clients[:MOST_NAMED]), *([f"{more} more"] if more > 0 else [])])
