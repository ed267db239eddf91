"""Which clients share an actor, what each actor asks of its node, and whether it all fits. No Ray here.

All actors of a run ask for the same, so what a node holds is the least that any of its resources allows. A fraction of
a GPU never straddles two of them: floor(1/f) actors fit each GPU, and Σ floor(1/f) the node, not floor(GPUs/f).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from qdsim.errors import CannotPlace
from qdsim.experiment.sections import Cluster
from qdsim.models.device import CONTEXT_BYTES, memory_fraction
from qdsim.planning import units

ACTOR_BYTES = 400 * 2**20
"""What an actor takes where nobody has estimated it: 330 MB with torch were measured before it holds anything."""
TOKEN_CPU = 0.01
MOST_ACTORS_PER_CORE = 2
"""Automatic packing on CPUs: more than one, so that a core always has another client to run, and no more, since each
costs memory and start-up."""
MOST_ACTORS_PER_GPU = 2
"""Automatic packing: while one process waits for its host, the other computes. Each has a core of its own, and takes
300 to 500 MB of the GPU before any tensor."""
UNIT = 10_000
"""Ray counts CPUs and GPUs in steps of 1/10,000, and cuts off what is finer."""


@dataclass(frozen=True)
class Node:
    """What one node of the cluster offers."""

    node_id: str
    cpus: float
    gpus: float
    """Whole ones; of what is free at the moment, the rest may be a fraction."""
    memory_bytes: float
    """0 where it is not known: then memory does not limit."""
    name: str = ""

    def holds(self, gpus: float, cpus: float, memory_bytes: float) -> int:
        """Return how many actors of such a size fit this node."""
        limits = []
        if gpus:
            whole, rest = divmod(_units(self.gpus), UNIT)
            each = max(1, _units(gpus))
            limits.append(whole * (UNIT // each) + rest // each)
        if cpus:
            limits.append(_units(self.cpus) // max(1, _units(cpus)))
        if memory_bytes and self.memory_bytes:
            limits.append(int(self.memory_bytes // memory_bytes))
        return min(limits, default=0)


def _units(quantity: float) -> int:
    """Return a quantity as Ray counts it."""
    return int(quantity * UNIT)


@dataclass(frozen=True)
class Layout:
    """Which clients share an actor, and what each actor asks of its node."""

    clients: tuple[tuple[int, ...], ...]
    gpus: float
    cpus: float
    memory_bytes: int = ACTOR_BYTES

    @property
    def bundle(self) -> dict[str, float]:
        """Return one actor's resources, as Ray names them."""
        asked = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory_bytes)}
        return {name: amount for name, amount in asked.items() if amount}

    def held_by(self, nodes: Sequence[Node]) -> list[int]:
        """Return how many of these actors fit each node."""
        return [node.holds(self.gpus, self.cpus, self.memory_bytes) for node in nodes]

    def fits(self, nodes: Sequence[Node]) -> bool:
        """Tell whether all of them fit."""
        return sum(self.held_by(nodes)) >= len(self.clients)

    @property
    def on_one_gpu(self) -> int:
        """Return how many of these actors a GPU may come to hold; 0 without GPUs."""
        return min(len(self.clients), UNIT // max(1, _units(self.gpus))) if self.gpus else 0

    def table(self, nodes: Sequence[Node]) -> tuple[tuple[str, ...], ...]:
        """Return of each node its name, CPUs, GPUs, memory in GB, and how many of these actors it holds."""
        rows = []
        for node, held in zip(nodes, self.held_by(nodes), strict=True):
            memory = f"{node.memory_bytes / 1e9:.1f}"
            rows.append((node.name or node.node_id[:8], f"{node.cpus:g}", f"{node.gpus:g}", memory, str(held)))
        return tuple(rows)

    def __str__(self) -> str:
        """Say what is asked for."""
        each = [units.gpu_share(self.gpus)] if self.gpus else []
        each += [f"{self.cpus:g} CPU"] + ([units.size(self.memory_bytes)] if self.memory_bytes else [])
        return f"{len(self.clients)} actors of {', '.join(each)} each"


@dataclass(frozen=True)
class GpuMemory:
    """What the GPUs of a cluster have, and what actors take of it."""

    there: float
    """Bytes of the smallest of them."""
    actor_bytes: Callable[[int], int]
    """Of an actor with so many clients."""

    def holds(self, layout: Layout) -> bool:
        """Tell whether a GPU has memory for as many of these actors as may come to sit on it, each within its cap."""
        needed = self.actor_bytes(max(len(group) for group in layout.clients))
        return layout.on_one_gpu * needed <= self.there and needed <= self.allowed(layout.gpus)

    def allowed(self, share: float) -> float:
        """Return what a process may take that has so much of a GPU: its cap on tensors, and CUDA's context."""
        if not 0 < share < 1:
            return self.there
        try:
            return memory_fraction(share, int(self.there)) * self.there + CONTEXT_BYTES
        except CannotPlace:
            return 0.0


def lay_out(
    clients: int,
    wanted: Cluster,
    nodes: Sequence[Node],
    actor_bytes: Callable[[int], int] = lambda packed: ACTOR_BYTES,
    gpus: int | None = None,
    loads: Sequence[float] = (),
    gpu_memory: GpuMemory | None = None,
) -> Layout:
    """Divide clients into actors and choose each actor's share of a node; refuse what does not fit.

    ``actor_bytes(n)`` is what an actor with n clients is expected to take. ``gpus``: how many an autoscaler may come
    to; then nothing is refused, since nodes are still to come. ``loads`` says how much each client has to do: actors
    get about equal sums of it, since a round lasts as long as the busiest of them. ``gpu_memory``: None where it is not
    known.

    Where a GPU's memory is too small for an actor for each client, and neither number is fixed (GPUs are shared by
    ``auto``, clients per actor ``auto`` or the one that is the default), as many clients go into an actor as it takes.
    Of the default, that is as few as fit; of ``auto``, so many that a GPU has one process or two.
    """
    total = max(int(sum(node.gpus for node in nodes)), gpus or 0)
    ask = _Ask(clients, wanted, nodes, actor_bytes, total, loads)
    fixed = wanted.clients_per_actor if isinstance(wanted.clients_per_actor, int) else None
    may_pack = fixed is None or (fixed == 1 and wanted.gpus_per_client == "auto")
    crowds_a_gpu = False
    for per_actor in range(1, clients + 1) if may_pack else [fixed or 1]:
        found = ask.at(per_actor)
        fits = gpus is not None or found.fits(nodes)
        too_large = fits and gpu_memory is not None and not gpu_memory.holds(found)
        crowded = fixed is None and len(found.clients) > ask.most_actors
        if fits and not too_large and not crowded:
            return found
        crowds_a_gpu |= too_large
        if fixed is not None and not crowds_a_gpu:  # of the default, only a GPU's memory has more clients packed
            break
    if too_large and gpu_memory is not None:
        raise _gpu_refusal(ask, found, gpu_memory)
    raise _refusal(ask, found)


def without_cores(layout: Layout, wanted: Cluster, free: Sequence[Node]) -> Layout:
    """Have actors on GPUs ask for next to no CPU where others hold the cores at the moment, and the GPUs are free."""
    if not layout.gpus or wanted.cpus_per_actor != "auto" or layout.fits(free):
        return layout
    modest = replace(layout, cpus=TOKEN_CPU)
    return modest if modest.fits(free) else layout


def grouped(clients: int, most: int, loads: Sequence[float] = ()) -> tuple[tuple[int, ...], ...]:
    """Divide clients into groups of at most ``most``: the one with the most to do goes to the group with the least."""
    if not loads or most == 1:
        return tuple(tuple(range(i, min(i + most, clients))) for i in range(0, clients, most))
    groups: list[list[int]] = [[] for _ in range(-(-clients // most))]
    for i in sorted(range(clients), key=lambda i: -loads[i]):
        open_ones = [group for group in groups if len(group) < most]
        min(open_ones, key=lambda group: sum(loads[j] for j in group)).append(i)
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def assign(layout: Layout, nodes: Sequence[Node], count: int, has: Sequence[int] = ()) -> list[int] | None:
    """Return the node of each of so many actors, spread as evenly as they fit; None where they do not.

    ``has`` says how many of the run's actors each node has already.
    """
    room = layout.held_by(nodes)
    if sum(room) < count:
        return None
    there = list(has) or [0] * len(nodes)
    chosen = []
    for _ in range(count):
        node = min((i for i, left in enumerate(room) if left), key=lambda i: there[i])
        room[node] -= 1
        there[node] += 1
        chosen.append(node)
    return chosen


@dataclass(frozen=True)
class _Ask:
    """What a layout is made of."""

    clients: int
    wanted: Cluster
    nodes: Sequence[Node]
    actor_bytes: Callable[[int], int]
    gpus: int
    """Of all nodes, those included that an autoscaler may add."""
    loads: Sequence[float] = ()

    @property
    def most_actors(self) -> float:
        """Return how many actors automatic packing makes at most, where nobody says how much of a GPU each has."""
        if self.wanted.gpus_per_client not in ("auto", 0.0):
            return math.inf
        if self.wanted.gpus_per_client == "auto" and self.gpus:
            # two processes to a GPU want two cores; nodes that are still to come are taken to have them
            there = [(node.gpus, node.cpus) for node in self.nodes if node.gpus]
            short = sum(gpus for gpus, cpus in there if cpus < MOST_ACTORS_PER_GPU * gpus * self.wanted.threads)
            return MOST_ACTORS_PER_GPU * self.gpus - short
        lanes = sum(max(1, int(node.cpus) // self.wanted.threads) for node in self.nodes)
        return lanes * MOST_ACTORS_PER_CORE

    def at(self, per_actor: int, **changes: float | str) -> Layout:
        """Return the layout with so many clients in an actor, and some settings changed."""
        wanted = replace(self.wanted, **changes)  # type: ignore[arg-type]
        clients, nodes, gpus = self.clients, self.nodes, self.gpus
        groups = grouped(clients, per_actor, self.loads)
        if wanted.gpus_per_client == "auto":
            fraction = 1 / -(-len(groups) // gpus) if gpus else 0.0
        else:
            fraction = float(wanted.gpus_per_client)
        if isinstance(wanted.cpus_per_actor, float):
            cpus = wanted.cpus_per_actor
        else:
            share = min(1.0, 0.5 * sum(node.cpus for node in nodes) / len(groups))
            if fraction:
                # a core for each process, since its kernels are launched from there; but GPUs decide the placement, so
                # where a node has fewer cores than its GPUs hold actors, the share of each that leaves no GPU idle
                on_gpus = [(node.cpus, node.holds(fraction, 0, 0)) for node in nodes]
                share = min((min(1.0, cores / held) for cores, held in on_gpus if held), default=TOKEN_CPU)
            cpus = max(TOKEN_CPU, int(share * 100) / 100)
        asked = wanted.memory_per_actor_gb
        memory_bytes = int(asked * 1e9) if isinstance(asked, float) else self.actor_bytes(min(per_actor, clients))
        if not all(node.memory_bytes for node in nodes):  # a node that tells of none has none that Ray would give
            memory_bytes = 0
        return Layout(groups, fraction, cpus, memory_bytes)


def _refusal(ask: _Ask, found: Layout) -> CannotPlace:
    """Say what was asked, what each node holds, and a change of the settings that was tried here and fits."""
    nodes = ask.nodes
    cpus, memory = sum(n.cpus for n in nodes), sum(n.memory_bytes for n in nodes)
    held = f"which hold {sum(found.held_by(nodes))}"
    has = f"{ask.gpus} GPUs, {cpus:g} CPUs and {units.size(memory)} on {len(nodes)} nodes, {held}"
    return CannotPlace(str(found), has, _fix(ask, found), found.table(nodes))


def _gpu_refusal(ask: _Ask, found: Layout, memory: GpuMemory) -> CannotPlace:
    """Say how many actors a GPU's memory holds, and the settings that were tried here and fit."""
    packed = max(len(group) for group in found.clients)
    needed = memory.actor_bytes(packed)
    asked = f"{found.on_one_gpu} actors of {units.size(needed)} on a GPU"
    has = f"{units.size(memory.there)} there, which hold {int(memory.there // needed)}"
    if needed > memory.allowed(found.gpus) and found.on_one_gpu * needed <= memory.there:
        asked = f"actors of {units.size(needed)} with {found.gpus:g} of a GPU"
        allowed = units.size(memory.allowed(found.gpus))
        has = f"{units.size(memory.there)} there, of which such an actor may take {allowed}"
    fix = "set cluster.micro_batch lower, or take a smaller model.width"
    for per_actor in range(packed, ask.clients + 1):
        fit = int(memory.there // memory.actor_bytes(per_actor))
        if not fit:
            break
        tried = ask.at(per_actor, gpus_per_client=UNIT // fit / UNIT)
        if tried.fits(ask.nodes) and memory.holds(tried):
            fix = f"set cluster.gpus_per_client to {tried.gpus:g} and cluster.clients_per_actor to {per_actor}"
            break
    return CannotPlace(asked, has, fix, found.table(ask.nodes))


def _fix(ask: _Ask, found: Layout) -> str:
    """Return changes of one setting that were tried and fit; else the settings that ask for too much."""
    nodes, gpus = ask.nodes, ask.gpus

    def fits(per_actor: int, **changes: float | str) -> bool:
        return ask.at(per_actor, **changes).fits(nodes)

    per_actor = max(len(group) for group in found.clients)
    ways = []
    packed = next((n for n in range(per_actor + 1, ask.clients + 1) if fits(n)), None)
    if packed is not None:
        ways.append(f"cluster.clients_per_actor to {packed}")
    smaller = UNIT // max(1, math.ceil(len(found.clients) / gpus)) / UNIT if gpus else 0.0
    if found.gpus and fits(per_actor, gpus_per_client=smaller):
        ways.append(f"cluster.gpus_per_client to {smaller:g}")
    for setting in ("cpus_per_actor", "memory_per_actor_gb"):
        if not ways and getattr(ask.wanted, setting) != "auto" and fits(per_actor, **{setting: "auto"}):
            ways.append(f'cluster.{setting} to "auto"')
    if ways:
        return f"set {', or '.join(ways)}"
    alone = {
        "GPUs": replace(found, cpus=0.0, memory_bytes=0),
        "CPUs": replace(found, gpus=0.0, memory_bytes=0),
        "memory": replace(found, gpus=0.0, cpus=0.0),
    }
    lacking = [name for name, one in alone.items() if one.bundle and not one.fits(nodes)]
    return f"no single setting of [cluster] mends that: there is too little of {' and '.join(lacking) or 'everything'}"
