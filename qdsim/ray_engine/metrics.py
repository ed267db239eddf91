"""A run's progress as Ray metrics, for those who have Prometheus and Grafana: see ``cluster/grafana/qdsim.json``."""

from ray.util.metrics import Gauge

from qdsim.experiment.progress import Event, Notice, Step

METRICS = {
    "qdsim_round": "Round of the phase",
    "qdsim_share_done": "Share of the run's work that is done, 0 to 1",
    "qdsim_test_accuracy": "Test accuracy after the last round",
    "qdsim_forget_accuracy": "F-Set accuracy after the last round",
    "qdsim_retain_accuracy": "R-Set accuracy after the last round",
    "qdsim_clients_done": "Clients that have done their step of the round",
    "qdsim_clients_expected": "Clients that take part in the round",
    "qdsim_round_seconds": "Wall-clock time of the last round",
    "qdsim_actors_replaced": "Actors that were lost and started again",
}
"""Ray puts ``ray_`` before each name."""
TAGS = ("run", "phase", "method")


class Gauges:
    """The gauges of one run, set by its driver. Tagged by phase and method, not by round or client: those are many."""

    def __init__(self, run_id: str):
        self._gauges = {name: Gauge(name, description=said, tag_keys=TAGS) for name, said in METRICS.items()}
        self._run_id = run_id
        self._tags = dict.fromkeys(TAGS, "")
        self._replaced = 0

    def record(self, event: Event) -> None:
        """Take what an event says."""
        if isinstance(event, Notice):
            self._replaced += event.actor_replaced
            self._set("actors_replaced", self._replaced)
            return
        if isinstance(event, Step):
            return
        self._tags = {"run": self._run_id, "phase": event.phase, "method": event.method}
        self._set("round", event.round_number)
        self._set("share_done", event.share_done)
        self._set("clients_done", event.clients_done)
        self._set("clients_expected", event.clients)
        if event.row is not None:
            self._set("round_seconds", event.row["wall_s"])
            for name in ("test_accuracy", "forget_accuracy", "retain_accuracy"):
                if event.row.get(name) is not None:
                    self._set(name, event.row[name])
        self._set("actors_replaced", self._replaced)

    def _set(self, name: str, value: float) -> None:
        self._gauges[f"qdsim_{name}"].set(value, tags=self._tags)
