"""Room for a run's actors on the cluster: placement groups, each bundle bound to the node that was counted for it.

Left to itself Ray spreads bundles by the sum of a node's GPUs: for one of 0.65 it may choose a node with 0.7 free, 0.35
on each of two GPUs, and wait for ever. :mod:`qdsim.planning.layout` counts GPU by GPU, so bundles go where it says.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from qdsim.errors import CannotPlace
from qdsim.planning.layout import Layout, assign
from qdsim.ray_engine import cluster

NOTIFY_EVERY_S = 10.0
"""How often a user hears that there is no room yet."""
PLACEMENT_S = 10.0
"""Bundles that were counted to fit are placed within this time, or somebody else was faster."""
POLL_S = 1.0
Notify = Callable[[str], None]


class Reservation:
    """The placement group bundles that a run holds: one for each actor."""

    def __init__(self, layout: Layout, run_id: str, timeout_s: float, notify: Notify, check: Callable[[], None]):
        self._layout, self._run_id, self._timeout_s = layout, run_id, timeout_s
        self._moves = 0
        self.nodes: list[str] = []
        """Of each actor's place."""
        release(run_id)  # of a driver that was lost
        group, self.nodes = self._reserve(len(layout.clients), run_id, notify, check)
        self._places = [(group, i) for i in range(len(layout.clients))]

    def strategy(self, actor: int) -> Any:
        """Return what binds an actor to its place."""
        return PlacementGroupSchedulingStrategy(*self._places[actor])

    def is_alive(self, actor: int) -> bool:
        """Tell whether the node of an actor's place is still there."""
        return self.nodes[actor] in {node.node_id for node in cluster.nodes()}

    def move(self, actor: int, notify: Notify) -> None:
        """Find another place for an actor whose node is gone."""
        self._moves += 1
        group, (node,) = self._reserve(1, f"{self._run_id}/moved-{self._moves}", notify, lambda: None)
        self._places[actor], self.nodes[actor] = (group, 0), node

    def _reserve(self, count: int, name: str, notify: Notify, check: Callable[[], None]) -> tuple[Any, list[str]]:
        """Reserve bundles as soon as there is room for all of them; give up after the time that the job allows."""
        layout = self._layout
        grows = cluster.most_gpus() is not None
        began_s = said_s = time.monotonic()
        demand = None
        crowded: set[str] = set()
        """Nodes that had room by the sum of their GPUs, and not on any one of them."""
        try:
            while True:
                check()
                free = [node for node in cluster.free_nodes() if node.node_id not in crowded]
                has = [self.nodes.count(node.node_id) for node in free]
                chosen = assign(layout, free, count, has)
                if chosen is not None:
                    nodes = [free[i].node_id for i in chosen]
                    group = self._bound(nodes, name)
                    if group is not None:
                        return group, nodes
                crowded = set(nodes) if chosen is not None else set()
                if grows and demand is None:  # an autoscaler sees a group that waits, and adds nodes for it
                    demand = placement_group([layout.bundle] * count, "SPREAD", name=f"{self._run_id}/demand")
                now_s = time.monotonic()
                if now_s - began_s > self._timeout_s:
                    raise self._no_room()
                if now_s - said_s > NOTIFY_EVERY_S:
                    said_s = now_s
                    left_s = self._timeout_s - (now_s - began_s)
                    notify(f"waiting for room for {layout}: {cluster.free()} free, giving up in {left_s:.0f} s")
                if demand is not None and demand.wait(POLL_S):  # it has taken what is needed: take its place
                    remove_placement_group(demand)
                    demand = None
                time.sleep(POLL_S)
        finally:
            if demand is not None:
                remove_placement_group(demand)

    def _bound(self, nodes: list[str], name: str) -> Any:
        """Reserve one bundle on each of these nodes; None where somebody else was faster."""
        where = [{"ray.io/node-id": node} for node in nodes]
        group = placement_group([self._layout.bundle] * len(nodes), "SPREAD", name=name, bundle_label_selector=where)
        if group.wait(PLACEMENT_S):
            return group
        remove_placement_group(group)
        return None

    def _no_room(self) -> CannotPlace:
        fix = "wait for other jobs, set cluster.clients_per_actor higher or cluster.gpus_per_client lower"
        found = f"{cluster.free()} free after {self._timeout_s:g} s (cluster.placement_timeout_s)"
        return CannotPlace(str(self._layout), found, fix, self._layout.table(cluster.nodes()))


def release(run_id: str) -> None:
    """Give up what a run has reserved, with the actors there: while the job that made it lasts, it stays reserved."""
    for hex_id, group in placement_group_table().items():
        if group["name"].partition("/")[0] == run_id and group["state"] != "REMOVED":
            with contextlib.suppress(ValueError):
                remove_placement_group(_handle(hex_id))


def _handle(hex_id: str) -> Any:
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    return PlacementGroup(PlacementGroupID(bytes.fromhex(hex_id)))
