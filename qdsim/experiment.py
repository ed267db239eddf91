"""Work through a plan on one executor: train once per seed, then every method and request from there."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from qdsim import params as P
from qdsim import seeds
from qdsim.evaluation import Counts
from qdsim.federation import Executor, RoundResult, run_rounds
from qdsim.forgetting import NOTHING, Branch
from qdsim.hosts import Shard
from qdsim.params import Params
from qdsim.phases import Phase
from qdsim.plan import Plan, SeedPlan
from qdsim.results import TableWriter

SHARED = "shared"
"""The method's name in rows of training."""
TRAINING = Branch("", NOTHING)
Scores = dict[str, float | None]
CONVERGED_WITHIN = 0.01
SUMMED = ("wall_s", "client_compute_s", "critical_path_s", "evaluation_s", "aggregation_s", "wait_s")
CLIENT_COLUMNS = (
    "client_id",
    "num_samples",
    "loss",
    "compute_s",
    "matching_s",
    "node_id",
    "gpu_id",
    "peak_memory_bytes",
)
COUNTED = ("samples", "gradients", "bytes_up", "bytes_down", "participants_expected", "participants_received")


@dataclass(frozen=True)
class Progress:
    """Where the run is: sent to whoever watches, at every round and as clients finish."""

    seed: int
    method: str
    request: str
    phase: str
    round_number: int
    rounds: int
    clients_done: int
    clients: int
    share_done: float
    """Of the work that the plan expects."""
    row: dict[str, Any] | None = field(default=None, repr=False)
    """The finished round's row of the table ``rounds``."""


class Experiment:
    """One plan, one executor, one set of tables."""

    def __init__(self, plan: Plan, executor: Executor, writer: TableWriter, emit: Callable[[Progress], None]):
        self._plan, self._executor, self._writer, self._emit = plan, executor, writer, emit
        self._expected = max(plan.total_work(), 1.0)
        self._done = 0.0

    def run(self) -> None:
        """Seeds, then methods, then requests; each independent request starts from the trained model."""
        for seed_plan in self._plan.seeds:
            trained = self._train(seed_plan)
            for method in self._plan.job.methods:
                params = trained
                for branch in seed_plan.branches:
                    start = params if self._plan.job.sequence else trained
                    params = self._serve(seed_plan, method, branch, start)

    def _train(self, seed_plan: SeedPlan) -> Params:
        synthetic = self._plan.hyper.synthetic if self._plan.uses_synthetic else None
        parts = zip(seed_plan.partition.indices, seed_plan.labels, strict=True)
        shards = [Shard(i, rows, labels) for i, (rows, labels) in enumerate(parts)]
        self._executor.adopt(seed_plan.seed, shards, synthetic)
        self._write_partition(seed_plan)
        params = self._plan.model.init(seeds.generator(seed_plan.seed, "init", phase="train"))
        for phase in self._plan.training():
            params, _ = self._run_phase(seed_plan, SHARED, TRAINING, phase, params, {})
        return params

    def _serve(self, seed_plan: SeedPlan, method: str, branch: Branch, params: Params) -> Params:
        scores, _ = self._scores(params, branch)
        for phase in self._plan.phases(method, seed_plan, branch):
            params, scores = self._run_phase(seed_plan, method, branch, phase, params, scores)
        return params

    def _run_phase(
        self, seed_plan: SeedPlan, method: str, branch: Branch, phase: Phase, params: Params, before: Scores
    ) -> tuple[Params, Scores]:
        """Run a phase, write its rows, and return the model with its scores; ``before`` are those it began with."""
        if phase.fresh_start:
            names = {"request": branch.label, "phase": phase.name}
            params = self._plan.model.init(seeds.generator(seed_plan.seed, "init", **names))
        sizes = self._plan.sizes(phase, seed_plan)
        at = Progress(seed_plan.seed, method, branch.label, phase.name, 0, phase.stage.rounds, 0, 0, self._share())
        self._emit(at)

        def on_client(round_number: int, expected: int, done: int) -> None:
            here = replace(at, round_number=round_number, clients_done=done, clients=expected)
            self._emit(replace(here, share_done=self._share()))

        keys = {"seed": seed_plan.seed, "cell": "", "method": method, "request": branch.label, "phase": phase.name}
        scores = before
        rows: list[dict[str, Any]] = []
        work = self._plan.work(phase, seed_plan) / phase.stage.rounds
        rounds = run_rounds(phase, params, sizes, self._executor, seed_plan.seed, branch.label, on_client)
        for result in rounds:
            params = result.params
            began_s = time.perf_counter()
            scores, counts = self._scores(params, branch)
            if branch.label and result.round_number == phase.stage.rounds:
                scores |= self._own_scores(params, seed_plan, branch)
            row = {**keys, "round": result.round_number, **scores, **_costs(result), "data_size": int(sizes.sum())}
            row |= {"params_sha256": P.sha256(params), "reused": False}
            row["evaluation_s"] = time.perf_counter() - began_s
            rows.append(row)
            self._write_round(row, keys, result, counts)
            self._done += work
            on_row = replace(at, round_number=result.round_number, clients_done=result.expected)
            self._emit(replace(on_row, clients=result.expected, share_done=self._share(), row=row))
        self._write_stage(keys, rows, before, seed_plan, phase)
        return params, scores

    def _share(self) -> float:
        return min(1.0, self._done / self._expected)

    def _scores(self, params: Params, branch: Branch) -> tuple[Scores, Counts]:
        """Test accuracies; for a client request F-Set is the client's own data (it has no test data)."""
        counts = self._executor.test_counts(params, self._plan.num_test)
        scores: Scores = {"test_accuracy": counts.accuracy()}
        if not branch.label:
            return scores, counts
        if branch.forget.clients:
            scores["retain_accuracy"] = counts.accuracy()
            own, _ = self._executor.own_counts(params, sorted(branch.forget.clients), branch)
            scores["forget_accuracy"] = own.accuracy()
        else:
            kept = set(range(self._plan.model.num_classes)) - branch.gone.classes
            scores["retain_accuracy"] = counts.accuracy(kept)
            scores["forget_accuracy"] = counts.accuracy(branch.forget.classes)
        return scores, counts

    def _own_scores(self, params: Params, seed_plan: SeedPlan, branch: Branch) -> Scores:
        everyone = list(range(len(seed_plan.labels)))
        forgotten, retained = self._executor.own_counts(params, everyone, branch)
        return {"forget_accuracy_train": forgotten.accuracy(), "retain_accuracy_train": retained.accuracy()}

    def _write_partition(self, seed_plan: SeedPlan) -> None:
        split, seed = seed_plan.partition, seed_plan.seed
        synthetic = split.synthetic_counts(self._plan.hyper.synthetic.scale)
        keys = {"seed": seed, "cell": "", "method": SHARED, "request": "", "phase": "train", "round": 0}
        rows = [
            {
                **keys,
                "client_id": i,
                "class": c,
                "num_samples": int(split.counts[i, c]),
                "num_synthetic": int(synthetic[i, c]) if self._plan.uses_synthetic else 0,
            }
            for i in range(split.counts.shape[0])
            for c in range(split.counts.shape[1])
        ]
        self._writer.append("partitions", f"seed-{seed}", rows)

    def _write_round(self, row: dict[str, Any], keys: dict[str, Any], result: RoundResult, counts: Counts) -> None:
        part = f"{_part(keys)}-{result.round_number:05d}"
        here = {**keys, "round": result.round_number, "reused": False}
        classes = [{**here, "class": c, "accuracy": counts.accuracy({c})} for c in range(self._plan.model.num_classes)]
        clients = [{**here, **{name: getattr(update, name) for name in CLIENT_COLUMNS}} for update in result.updates]
        self._writer.append("clients", part, clients)
        self._writer.append("classes", part, classes)
        self._writer.append("rounds", part, [row])

    def _write_stage(
        self,
        keys: dict[str, Any],
        rows: list[dict[str, Any]],
        before: Scores,
        seed_plan: SeedPlan,
        phase: Phase,
    ) -> None:
        last = rows[-1]
        score = "retain_accuracy" if last.get("retain_accuracy") is not None else "test_accuracy"
        converged = next(r["round"] for r in rows if r[score] >= last[score] - CONVERGED_WITHIN)
        synthetic = self._plan.uses_synthetic and (phase.view.source != "real" or keys["method"] == SHARED)
        image_bytes = self._plan.model.channels * self._plan.model.size**2
        counts = seed_plan.partition.synthetic_counts(self._plan.hyper.synthetic.scale)
        stage = {
            **keys,
            "round": last["round"],
            "rule": "rounds",
            "rounds_run": len(rows),
            "converged_round": converged,
            "forget_accuracy_start": before.get("forget_accuracy"),
            "retain_accuracy_start": before.get("retain_accuracy"),
            **{name: sum(r[name] for r in rows) for name in (*SUMMED, *COUNTED)},
            **{name: last.get(name) for name in ("test_accuracy", "forget_accuracy", "retain_accuracy")},
            **{name: last.get(name) for name in ("forget_accuracy_train", "retain_accuracy_train")},
            "data_size": last["data_size"],
            "storage_bytes": self._executor.storage_bytes() if synthetic else 0,
            "storage_bytes_nominal": int(counts.sum()) * image_bytes if synthetic else 0,
            "reused": False,
        }
        self._writer.append("stages", _part(keys), [stage])


def _costs(result: RoundResult) -> dict[str, Any]:
    updates = result.updates
    return {
        "wall_s": result.wall_s,
        "client_compute_s": sum(u.compute_s for u in updates),
        "critical_path_s": max(u.compute_s for u in updates),
        "aggregation_s": result.aggregation_s,
        "wait_s": result.wait_s,
        "samples": sum(u.samples for u in updates),
        "gradients": sum(u.gradients for u in updates),
        "bytes_up": sum(u.bytes_up for u in updates),
        "bytes_down": result.bytes_down,
        "participants_expected": result.expected,
        "participants_received": len(updates),
    }


def _part(keys: dict[str, Any]) -> str:
    names = [f"seed-{keys['seed']}", keys["method"], keys["request"], keys["phase"]]
    return "-".join(name for name in names if name)
