"""Work through a plan on one executor: train each federation once, then every method and request from there."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qdsim import arrays, attacks, gallery, results, rows, seeds
from qdsim import params as P
from qdsim.algorithms import METHODS
from qdsim.errors import BadInput
from qdsim.evaluation import Counts
from qdsim.federation import Executor, RoundResult, run_rounds
from qdsim.forgetting import NOTHING, Branch
from qdsim.history import History
from qdsim.hosts import Shard
from qdsim.params import Params
from qdsim.phases import Phase
from qdsim.plan import Cell, Plan, SeedPlan, Task
from qdsim.results import TableWriter
from qdsim.rows import SHARED, Row, Scores
from qdsim.trained import Rows, Store, Trained, description

TRAINING = Branch("", NOTHING)
IN_TRAINING = -1


@dataclass(frozen=True)
class Progress:
    """Where the run is: sent to whoever watches, at every round and as clients finish."""

    task: int
    """Position in the plan's tasks; -1 while a federation trains."""
    cell: str
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
    row: Row | None = field(default=None, repr=False)
    """The finished round's row of the table ``rounds``; with ``finished`` the last one before relearning."""
    phase_ended: bool = False
    """The row is the phase's last."""
    note: str = ""
    """Something that the user should know."""
    finished: bool = False
    """The task is done, or the training was found ready."""


@dataclass(frozen=True)
class Place:
    """Whose phase it is."""

    task: int
    cell: Cell
    seed_plan: SeedPlan
    method: str
    branch: Branch

    def keys(self, phase: str) -> Row:
        """Return what names the phase in every table."""
        return rows.keys(self.cell, self.seed_plan, self.method, self.branch.label, phase)

    def progress(self, phase: str, rounds: int, share_done: float) -> Progress:
        """Return the event that a phase begins with."""
        named = (self.cell.label, self.seed_plan.seed, self.method, self.branch.label, phase)
        return Progress(self.task, *named, 0, rounds, 0, 0, share_done)


class Experiment:
    """One plan, one executor, one run directory."""

    def __init__(self, plan: Plan, executor: Executor, run_dir: Path, emit: Callable[[Progress], None]):
        self._plan, self._executor, self._emit = plan, executor, emit
        self._writer = TableWriter(run_dir)
        self._store = Store(run_dir.parent)
        self._models = run_dir / "models"
        self._expected = max(plan.total_work(), 1.0)
        self._done = 0.0

    def run(self) -> None:
        """Federation by federation; a task whose model lies in the run was done before the run was resumed."""
        self._models.mkdir(exist_ok=True)
        numbered = list(enumerate(self._plan.tasks()))
        for cell, seed_plan in self._plan.federations():
            own = [(i, task) for i, task in numbered if task.cell is cell and task.seed_plan is seed_plan]
            trained = None
            if all(self._model_path(task).exists() for _, task in own):
                self._done += sum(cell.work(phase, seed_plan) for phase in cell.training())
            else:
                trained = self._train(cell, seed_plan)
            reached: dict[str, Params] = {}
            for i, task in own:
                place = Place(i, cell, seed_plan, task.method, task.branch)
                path = self._model_path(task)
                if trained is None or path.exists():
                    reached[task.method] = P.from_numpy(
                        arrays.read(path, fix="delete it, and the request is served again")
                    )
                    self._pass_over(place, task.phases())
                    continue
                start = reached.get(task.method, trained.params) if cell.job.sequence else trained.params
                reached[task.method] = self._serve(place, task, start, trained.history)

    def _model_path(self, task: Task) -> Path:
        return self._models / f"{results.file_name(task.name)}.npz"

    def _pass_over(self, place: Place, phases: list[Phase]) -> None:
        """Say that phases had been done before."""
        self._done += sum(place.cell.work(phase, place.seed_plan) for phase in phases)
        name = phases[-1].name if phases else ""
        self._emit(replace(place.progress(name, 0, self._share()), finished=True))

    def _train(self, cell: Cell, seed_plan: SeedPlan) -> Trained:
        """Train, or take the state that an earlier training of the same fields left."""
        place = Place(IN_TRAINING, cell, seed_plan, SHARED, TRAINING)
        parts = zip(seed_plan.partition.indices, seed_plan.labels, strict=True)
        shards = [Shard(i, indices, labels) for i, (indices, labels) in enumerate(parts)]
        self._executor.adopt(cell.model, seed_plan.seed, shards, cell.hyper.synthetic if cell.distils else None)
        self._writer.append("partitions", rows.part(place.keys("")), rows.partition_rows(cell, seed_plan))
        phases = cell.training()
        device = self._executor.device
        described = [description(self._plan, cell, seed_plan, phases[: n + 1], device) for n in range(len(phases))]
        self._check_training(rows.part(place.keys("")), described[-1])
        trained, ready = self._find(described)
        if trained is None:
            trained = Trained(self._init(place, request="", phase="train"), History(), {})
        self._copy(place, phases[:ready], trained.rows)
        for phase, state in zip(phases[ready:], described[ready:], strict=True):
            kept: Rows = {table: list(found) for table, found in trained.rows.items()}
            history = trained.history if phase.name == "train" else None
            storage = self._storage(place, trained.history)
            params, _, _ = self._run_phase(
                place, phase, trained.params, {}, storage=storage, history=history, kept=kept
            )
            trained = Trained(params, trained.history, kept)
            if not self._store.save(state, trained, self._executor, len(shards)):
                unseen = "the trained state is not stored, since not all nodes see --out: nothing can reuse it"
                self._emit(replace(place.progress(phase.name, 0, self._share()), note=unseen))
        if cell.distils and cell.job.synthetic.gallery:
            self._show(place, trained.rows["rounds"][-1])
        return trained

    def _show(self, place: Place, last: Row) -> None:
        """Write the few synthetic images that the user asked to see."""
        hyper, split = place.cell.hyper.synthetic, place.seed_plan.partition
        picks = gallery.picks(split.synthetic_counts(hyper.scale), place.cell.job.synthetic.gallery)
        shown = self._executor.gallery(picks, hyper.init)
        named = {**place.keys(last["phase"]), "round": last["round"]}
        self._writer.append("images", rows.part(named), [{**named, **row} for row in gallery.rows(picks, shown)])

    def _check_training(self, name: str, described: dict[str, Any]) -> None:
        """Refuse to resume with a training of other bits: what was served before started from another model."""
        path = self._models / f"{results.file_name(name)}.json"
        now = json.loads(json.dumps(described))
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if before != now:
                differing = [f"{k} (then {before.get(k)!r}, now {now[k]!r})" for k in now if before.get(k) != now[k]]
                why = f"its training had other settings: {', '.join(differing)}; run without --resume to start anew"
                raise BadInput("--resume", str(self._models.parent), why)
        results.write_atomically(path, json.dumps(now, indent=2, sort_keys=True).encode())

    def _find(self, described: list[dict[str, Any]]) -> tuple[Trained | None, int]:
        """Return the furthest state that is stored, and how many phases it has behind it."""
        for ready in range(len(described), 0, -1):
            trained = self._store.load(described[ready - 1], self._executor)
            if trained is not None:
                return trained, ready
        return None, 0

    def _copy(self, place: Place, phases: list[Phase], stored: Rows) -> None:
        """Write the rows of a training that was done before, so that the run's tables are complete."""
        for phase in phases:
            named = place.keys(phase.name)
            if self._writer.has("stages", rows.part(named)):  # a resumed run's own training
                continue
            for table, found in stored.items():
                mine = [{**row, **named, "reused": True} for row in found if row["phase"] == phase.name]
                for number in dict.fromkeys(row["round"] for row in mine):
                    # under the names of rows that are written here, so that neither stands beside the other
                    name = rows.part(named) if table == "stages" else rows.round_part(named, number)
                    self._writer.append(table, name, [row for row in mine if row["round"] == number])
        if phases:
            self._pass_over(place, phases)

    def _serve(self, place: Place, task: Task, params: Params, history: History) -> Params:
        """Serve a request; return the model that has forgotten, before it relearns anything."""
        scores, _ = self._scores(task.cell, params, task.branch)
        phases = task.phases(history)
        forgot, last_row = params, None
        if not phases:  # the last class of a sequence: trained on nothing, a model is an untrained one
            forgot = self._init(place, request=task.branch.label, phase="unlearn")
        for phase in (p for p in phases if p.name != "relearn"):
            storage = self._storage(place, history)
            forgot, scores, last_row = self._run_phase(place, phase, forgot, scores, storage=storage)
        if last_row is not None:
            self._attack(place, task, forgot, last_row)
        for phase in (p for p in phases if p.name == "relearn"):
            self._run_phase(place, phase, forgot, scores, storage=self._storage(place, history))
        arrays.write(self._model_path(task), P.to_numpy(forgot))
        name = phases[-1].name if phases else ""
        self._emit(replace(place.progress(name, 0, self._share()), row=last_row, finished=True))
        return forgot

    def _run_phase(
        self,
        place: Place,
        phase: Phase,
        params: Params,
        before: Scores,
        *,
        storage: tuple[int, int],
        history: History | None = None,
        kept: Rows | None = None,
    ) -> tuple[Params, Scores, Row]:
        """Run a phase and write its rows; return the model, its scores and its last row.

        ``before`` are the scores it begins with; ``history`` records the updates and ``kept`` the rows, in training.
        """
        cell, seed_plan, branch = place.cell, place.seed_plan, place.branch
        params = self._start(place, phase, params)
        sizes = cell.sizes(phase, seed_plan)
        at = place.progress(phase.name, phase.stage.rounds, self._share())
        self._emit(at)

        def on_client(round_number: int, expected: int, done: int) -> None:
            here = replace(at, round_number=round_number, clients_done=done, clients=expected)
            self._emit(replace(here, share_done=self._share()))

        named = place.keys(phase.name)
        rule = phase.rule if phase.stage.stop == "converged" else None
        scores = before
        done: list[Row] = []
        work = cell.work(phase, seed_plan)
        until = self._done + work
        rounds = run_rounds(
            phase, params, sizes, self._executor, seed_plan.seed, branch.label, on_client, history=history
        )
        for result in rounds:
            params = result.params
            began_s = time.perf_counter()
            scores, counts = self._scores(cell, params, branch)
            row = {**named, "round": result.round_number, **scores, **rows.costs(result)}
            over = rule is not None and rule.reached(rows.scores_of(phase, [*done, row], before))
            ended = over or result.round_number == phase.stage.rounds
            if branch.label and ended:
                row |= self._own_scores(params, seed_plan, branch)
            row |= {"data_size": int(sizes.sum()), "params_sha256": P.sha256(params), "reused": False}
            row["evaluation_s"] = time.perf_counter() - began_s
            done.append(row)
            self._write_round(row, named, result, counts, kept)
            self._done += work / phase.stage.rounds
            on_row = replace(at, round_number=result.round_number, clients_done=result.expected)
            here = replace(on_row, clients=result.expected, share_done=self._share())
            self._emit(replace(here, row=row, phase_ended=ended))
            if over:
                break
        self._done = until
        stage = rows.stage_row(named, done, phase, before, storage)
        self._append("stages", rows.part(named), [stage], kept)
        return params, scores, done[-1]

    def _start(self, place: Place, phase: Phase, params: Params) -> Params:
        if phase.start == "current":
            return params
        if phase.start == "initial":  # θ_0 has the names of training, so that anybody can draw it again
            return self._init(place, request="", phase="train")
        return self._init(place, request=place.branch.label, phase=phase.name)

    def _init(self, place: Place, *, request: str, phase: str) -> Params:
        return place.cell.model.init(seeds.generator(place.seed_plan.seed, "init", request=request, phase=phase))

    def _share(self) -> float:
        return min(1.0, self._done / self._expected)

    def _scores(self, cell: Cell, params: Params, branch: Branch) -> tuple[Scores, Counts]:
        """Test accuracies; for a client request F-Set is the client's own data (it has no test data)."""
        counts = self._executor.test_counts(params, len(self._plan.test_labels))
        scores: Scores = {"test_accuracy": counts.accuracy()}
        if not branch.label:
            return scores, counts
        if branch.forget.clients:
            scores["retain_accuracy"] = counts.accuracy()
            own, _ = self._executor.own_counts(params, sorted(branch.forget.clients), branch)
            scores["forget_accuracy"] = own.accuracy()
        else:
            kept = set(range(cell.model.num_classes)) - branch.gone.classes
            scores["retain_accuracy"] = counts.accuracy(kept)
            scores["forget_accuracy"] = counts.accuracy(branch.forget.classes)
        return scores, counts

    def _own_scores(self, params: Params, seed_plan: SeedPlan, branch: Branch) -> Scores:
        everyone = list(range(len(seed_plan.labels)))
        forgotten, retained = self._executor.own_counts(params, everyone, branch)
        return {"forget_accuracy_train": forgotten.accuracy(), "retain_accuracy_train": retained.accuracy()}

    def _attack(self, place: Place, task: Task, params: Params, last_row: Row) -> None:
        """Write what membership inference finds in the model that has forgotten."""
        named = {**place.keys(last_row["phase"]), "round": last_row["round"]}
        for name in task.cell.job.membership:
            found = attacks.attack(name, task, self._plan.test_labels, params, self._executor)
            self._writer.append("membership", f"{rows.part(named)}-{name}", [{**named, **row} for row in found])

    def _storage(self, place: Place, history: History) -> tuple[int, int]:
        """Return what the method keeps for unlearning: measured, and by the accounting of its paper."""
        cell = place.cell
        if cell.distils if place.method == SHARED else METHODS[place.method].USES_SYNTHETIC:
            counts = place.seed_plan.partition.synthetic_counts(cell.hyper.synthetic.scale)
            return self._executor.storage_bytes(), int(counts.sum()) * cell.model.channels * cell.model.size**2
        stored = getattr(METHODS.get(place.method), "storage_bytes", None)
        return stored(cell.hyper, place.branch, history) if stored else (0, 0)

    def _write_round(self, row: Row, named: Row, result: RoundResult, counts: Counts, kept: Rows | None) -> None:
        part = rows.round_part(named, result.round_number)
        here = {**named, "round": result.round_number, "reused": False}
        classes = [{**here, "class": c, "accuracy": counts.accuracy({c})} for c in range(len(counts.total))]
        self._append("clients", part, rows.client_rows(here, result), kept)
        self._append("classes", part, classes, kept)
        self._append("rounds", part, [row], kept)

    def _append(self, table: str, part: str, found: list[Row], kept: Rows | None) -> None:
        self._writer.append(table, part, found)
        if kept is not None:
            kept.setdefault(table, []).extend(found)
