"""Work through a plan on one executor: train each federation once, then every method and request from there."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from qdsim import seeds
from qdsim.algorithms.history import History
from qdsim.algorithms.methods import METHODS
from qdsim.algorithms.phase import Phase
from qdsim.data.forgetting import NOTHING, Branch
from qdsim.experiment import gallery, rows
from qdsim.experiment.checkpoint import Checkpoint, Commit
from qdsim.experiment.plan import Cell, Plan, SeedPlan, Task
from qdsim.experiment.progress import Progress, Row
from qdsim.experiment.rows import SHARED, Place, Scores
from qdsim.experiment.trained import Rows, Store, Trained, check_same, description
from qdsim.federation import client_host, membership
from qdsim.federation.client_host import Keep, Shard
from qdsim.federation.evaluation import Counts
from qdsim.federation.rounds import Executor, Looked, RoundResult, Then, run_rounds
from qdsim.models import params as P
from qdsim.models.params import Params
from qdsim.store import arrays, lock, run_directory
from qdsim.store.run_directory import TableWriter
from qdsim.store.storage import Folder

TRAINING = Branch("", NOTHING)
IN_TRAINING = -1
SERVE_AGAIN = "delete it, and the request is served again"
SCORES = ("test_accuracy", "forget_accuracy", "retain_accuracy")
"""What a phase begins with and ends with."""


class Experiment:
    """One plan, one executor, one run directory."""

    def __init__(
        self, plan: Plan, executor: Executor, run_dir: Folder, emit: Callable[[Progress], None], owner: str = ""
    ):
        self._plan, self._executor, self._emit = plan, executor, emit
        self._still_own = partial(lock.check, run_dir, owner)
        self._writer = TableWriter(run_dir)
        self._store = Store(run_dir.parent)
        self._models = run_dir / "models"
        self._checkpoint = Checkpoint(run_dir)
        self._commit: Commit | None = None
        """Where an earlier attempt stopped, until that phase is reached."""
        self._expected = max(plan.total_work(), 1.0)
        self._done = 0.0

    def run(self) -> None:
        """Federation by federation; a task whose model lies in the run was done before the run was resumed."""
        self._models.mkdir(exist_ok=True)
        self._commit = self._checkpoint.load()
        numbered = list(enumerate(self._plan.tasks()))
        for cell, seed_plan in self._plan.federations():
            own = [(i, task) for i, task in numbered if task.cell is cell and task.seed_plan is seed_plan]
            trained = None
            if all(self._served(task) for _, task in own):
                self._done += sum(cell.work(phase, seed_plan) for phase in cell.training())
            else:
                trained = self._train(cell, seed_plan)
            reached: dict[str, Params] = {}
            for i, task in own:
                place = Place(i, cell, seed_plan, task.method, task.branch)
                path = self._model_path(task)
                if trained is None or self._served(task):
                    stored = P.from_numpy(arrays.read(path, SERVE_AGAIN))
                    reached[task.method] = cell.model.checked(stored, path, SERVE_AGAIN)
                    self._pass_over(place, task.phases())
                    continue
                start = reached.get(task.method, trained.params) if cell.job.sequence else trained.params
                reached[task.method] = self._serve(place, task, start, trained.history)
        self._still_own()
        self._checkpoint.clear()

    def _served(self, task: Task) -> bool:
        """Tell whether a request was served before the run was resumed: its model and all its rows are there."""
        if not self._model_path(task).exists():
            return False
        named = [rows.keys(task.cell, task.seed_plan, task.method, task.branch.label, p.name) for p in task.phases()]
        forgot = [rows.part(keys) for keys in named if keys["phase"] != "relearn"][-1:]
        attacked = [("membership", f"{part}-{attack}") for part in forgot for attack in task.cell.job.membership]
        parts = [("stages", rows.part(keys)) for keys in named] + attacked
        return all(self._writer.has(table, part) for table, part in parts)

    def _model_path(self, task: Task) -> Folder:
        return self._models / f"{run_directory.file_name(task.name)}.npz"

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
        check_same(self._models / f"{run_directory.file_name(rows.part(place.keys('')))}.json", described[-1])
        trained, ready = self._find(described)
        learns = any(phase.learns for phase in phases)
        keep = self._folder_for_states(place) if learns else None
        commit = self._stopped_in(place, phases[ready:], keep)
        states: dict[int, str] | None = {} if keep != "nowhere" else None
        if trained is None:
            trained = Trained(self._init(place, request="", phase="train"), History(), {})
        self._copy(place, phases[:ready], trained.rows)
        if commit is not None:
            behind = [phase.name for phase in phases].index(commit.named["phase"])
            for phase in phases[ready:behind]:
                trained = replace(trained, rows=self._rows_of(place, phase, trained.rows))
            ready = behind
            trained = Trained(commit.params, commit.history or trained.history, trained.rows)
            if commit.states and keep is not None and keep != "nowhere":
                states = dict(commit.states)
                self._executor.restore(keep, states)
        for phase, state in zip(phases[ready:], described[ready:], strict=True):
            params, _, _ = self._run_phase(
                place,
                phase,
                trained.params,
                {},
                storage=self._storage(place, trained.history),
                history=trained.history,
                commit=commit,
                keep=keep if phase.learns else None,
                states=states,
            )
            commit = None
            trained = Trained(params, trained.history, self._rows_of(place, phase, trained.rows))
            stored = self._store.save(state, trained, self._executor, len(shards))
            if stored and phase is phases[-1]:
                self._executor.settle(self._store.path(state) / "clients")
                self._checkpoint.forget_states(rows.part(place.keys("")))
            elif not stored:
                unseen = "the trained state is not stored, since not all nodes see --out: nothing can reuse it"
                self._emit(replace(place.progress(phase.name, 0, self._share()), note=unseen))
        if cell.distils and cell.job.synthetic.gallery:
            self._show(place, trained.rows["rounds"][-1])
        return trained

    def _folder_for_states(self, place: Place) -> Folder | Literal["nowhere"]:
        """Return the folder where the clients of a training keep their states, if all nodes see it."""
        folder = self._checkpoint.states(rows.part(place.keys("")))
        folder.mkdir(parents=True, exist_ok=True)
        if self._executor.sees(folder):
            return folder
        unseen = "not all nodes see --out: a training that is interrupted begins anew, and a lost client ends the run"
        self._emit(replace(place.progress("train", 0, self._share()), note=unseen))
        return "nowhere"

    def _stopped_in(self, place: Place, phases: list[Phase], keep: Keep) -> Commit | None:
        """Return the commit if it is one of these phases of training, and the clients' states are there as well."""
        commit = self._commit
        if commit is None or not any(commit.is_at(place.keys(phase.name)) for phase in phases):
            return None
        if keep is None:
            return commit
        if keep == "nowhere" or commit.states is None:
            return None
        # a state that is gone: the training was stored as a whole, and somebody has deleted it
        there = [client_host.state_path(keep, i, last).exists() for i, last in commit.states.items()]
        return commit if all(there) else None

    def _rows_of(self, place: Place, phase: Phase, earlier: Rows) -> Rows:
        """Return the rows of a training phase that has ended, after those of the phases before it."""
        named = place.keys(phase.name)
        found: Rows = {"stages": self._writer.read("stages", rows.part(named))}
        rounds = found["stages"][0]["rounds_run"]
        for table in ("rounds", "clients", "classes"):
            parts = (self._writer.read(table, rows.round_part(named, n + 1)) for n in range(rounds))
            found[table] = [row for part in parts for row in part]
        return {table: [*earlier.get(table, []), *own] for table, own in found.items()}

    def _show(self, place: Place, last: Row) -> None:
        """Write the few synthetic images that the user asked to see."""
        hyper, split = place.cell.hyper.synthetic, place.seed_plan.partition
        picks = gallery.picks(split.synthetic_counts(hyper.scale), place.cell.job.synthetic.gallery)
        shown = self._executor.gallery(picks, hyper.init)
        named = {**place.keys(last["phase"]), "round": last["round"]}
        self._writer.append("images", rows.part(named), [{**named, **row} for row in gallery.rows(picks, shown)])

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
        phases = task.phases(history)
        names = [phase.name for phase in phases]
        commit = self._commit if self._commit and self._commit.is_at(place.keys(self._commit.named["phase"])) else None
        passed = phases[: names.index(commit.named["phase"])] if commit else []
        if not all(self._writer.has("stages", rows.part(place.keys(phase.name))) for phase in passed):
            commit = None  # rows of an earlier phase are gone: the request is served again from its beginning
        forgot, last_row = params, None
        if commit is not None:
            scores, forgot = commit.before, commit.forgot or commit.params
            self._done += sum(place.cell.work(phase, place.seed_plan) for phase in passed)
            phases = phases[len(passed) :]
            if commit.named["phase"] == "relearn":
                last_row = self._last_row(place, passed[-1]) if passed else None
        else:
            found: list[Looked] = []
            self._look(params, task.branch, found.append)
            self._executor.finish_look()
            scores = self._scores(task.cell, task.branch, found[0])
        if not names:  # the last class of a sequence: trained on nothing, a model is an untrained one
            forgot = self._init(place, request=task.branch.label, phase="unlearn")
        storage = self._storage(place, history)
        for phase in (p for p in phases if p.name != "relearn"):
            forgot, scores, last_row = self._run_phase(place, phase, forgot, scores, storage=storage, commit=commit)
            commit = None
        if last_row is not None and (commit is None or commit.named["phase"] != "relearn"):
            self._attack(place, task, forgot, last_row)
        for phase in (p for p in phases if p.name == "relearn"):
            self._run_phase(place, phase, forgot, scores, storage=storage, commit=commit, forgot=forgot)
        arrays.write(self._model_path(task), P.to_numpy(forgot))
        name = names[-1] if names else ""
        self._emit(replace(place.progress(name, 0, self._share()), row=last_row, finished=True))
        return forgot

    def _last_row(self, place: Place, phase: Phase) -> Row:
        """Return the last row of a phase that is over."""
        named = place.keys(phase.name)
        (stage,) = self._writer.read("stages", rows.part(named))
        return self._writer.round_row(rows.round_part(named, stage["rounds_run"]))

    def _run_phase(
        self,
        place: Place,
        phase: Phase,
        params: Params,
        before: Scores,
        *,
        storage: tuple[int, int],
        history: History | None = None,
        forgot: Params | None = None,
        commit: Commit | None = None,
        keep: Keep = None,
        states: dict[int, str] | None = None,
    ) -> tuple[Params, Scores, Row]:
        """Run a phase and write its rows; return the model, its scores and its last row.

        ``before`` are the scores it begins with. ``history`` records the updates, in training. ``commit`` is where an
        earlier attempt at the phase stopped, ``keep`` the folder for the states that clients change, ``states`` what is
        there already.
        """
        cell, seed_plan, branch = place.cell, place.seed_plan, place.branch
        named = place.keys(phase.name)
        done: list[Row] = []
        if commit is None:
            params = self._start(place, phase, params)
        else:
            params, before = self._checkpoint.checked(commit.params, cell.model), commit.before
            done = [self._writer.round_row(rows.round_part(named, n + 1)) for n in range(commit.round_number)]
        sizes = cell.sizes(phase, seed_plan)
        work = cell.work(phase, seed_plan)
        until = self._done + work
        self._done += work * len(done) / max(phase.stage.rounds, 1)
        at = place.progress(phase.name, phase.stage.rounds, self._share())
        self._emit(at)

        def on_client(round_number: int, expected: int, done: int) -> None:
            here = replace(at, round_number=round_number, clients_done=done, clients=expected)
            self._emit(replace(here, share_done=self._share()))

        rule = phase.ends_by
        first = phase.stage.rounds + 1 if commit and commit.ended else len(done) + 1
        recording = history if phase.name == "train" else None

        def end_round(result: RoundResult, looked: Looked) -> None:
            """Write what a round was and commit it; clients may be at work on the next one."""
            began_s = time.perf_counter()
            row = {**named, "round": result.round_number, **self._scores(cell, branch, looked), **rows.costs(result)}
            done.append(row)
            ended = over() or result.round_number == phase.stage.rounds
            if branch.label and ended:
                row |= self._own_scores(result.params, seed_plan, branch)
            row |= {"data_size": int(sizes.sum()), "params_sha256": P.sha256(result.params), "reused": False}
            row["evaluation_s"] = looked.elapsed_s + time.perf_counter() - began_s
            self._still_own()
            self._write_round(row, named, result, looked.test)
            if keep is not None and states is not None:
                states.update(
                    dict.fromkeys((u.client_id for u in result.updates), client_host.tag(phase.name, row["round"]))
                )
            past = recording.until(row["round"]) if recording is not None else history
            self._checkpoint.save(Commit(named, row["round"], ended, before, result.params, forgot, past, states))
            self._done += work / phase.stage.rounds
            on_row = replace(at, round_number=result.round_number, clients_done=result.expected)
            here = replace(on_row, clients=result.expected, share_done=self._share())
            self._emit(replace(here, row=row, phase_ended=ended))

        def over() -> bool:
            return rule is not None and rule.reached(rows.scores_of(phase, done, before))

        for result in run_rounds(
            phase, params, sizes, self._executor, seed_plan.seed, branch.label, on_client, recording, first, keep
        ):
            params = result.params
            self._look(params, branch, partial(end_round, result))
            if rule is not None or result.round_number == phase.stage.rounds:
                self._executor.finish_look()
                if over():
                    break
        self._done = until
        self._writer.append("stages", rows.part(named), [rows.stage_row(named, done, phase, before, storage)])
        ended_with: Scores = {name: done[-1].get(name) for name in SCORES if done[-1].get(name) is not None}
        return params, ended_with, done[-1]

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

    def _look(self, params: Params, branch: Branch, then: Then) -> None:
        """Ask for all that accuracies are made of: the test set, and a forgotten client's own data."""
        num_test = len(self._plan.test_labels)
        self._executor.look(params, num_test, sorted(branch.forget.clients), branch, then)

    def _scores(self, cell: Cell, branch: Branch, looked: Looked) -> Scores:
        """Test accuracies; for a client request F-Set is the client's own data (it has no test data)."""
        counts = looked.test
        scores: Scores = {"test_accuracy": counts.accuracy()}
        if not branch.label:
            return scores
        if looked.own is not None:
            scores["retain_accuracy"] = counts.accuracy()
            scores["forget_accuracy"] = looked.own.accuracy()
        else:
            kept = set(range(cell.model.num_classes)) - branch.gone.classes
            scores["retain_accuracy"] = counts.accuracy(kept)
            scores["forget_accuracy"] = counts.accuracy(branch.forget.classes)
        return scores

    def _own_scores(self, params: Params, seed_plan: SeedPlan, branch: Branch) -> Scores:
        everyone = list(range(len(seed_plan.labels)))
        forgotten, retained = self._executor.own_counts(params, everyone, branch)
        return {"forget_accuracy_train": forgotten.accuracy(), "retain_accuracy_train": retained.accuracy()}

    def _attack(self, place: Place, task: Task, params: Params, last_row: Row) -> None:
        """Write what membership inference finds in the model that has forgotten."""
        named = {**place.keys(last_row["phase"]), "round": last_row["round"]}
        for name in task.cell.job.membership:
            at = task.seed_plan
            found = membership.attack(
                name, task.branch, at.seed, at.labels, self._plan.test_labels, params, self._executor
            )
            self._writer.append("membership", f"{rows.part(named)}-{name}", [{**named, **row} for row in found])

    def _storage(self, place: Place, history: History) -> tuple[int, int]:
        """Return what the method keeps for unlearning: measured, and by the accounting of its paper."""
        cell = place.cell
        if cell.distils if place.method == SHARED else METHODS[place.method].uses_synthetic:
            counts = place.seed_plan.partition.synthetic_counts(cell.hyper.synthetic.scale)
            return self._executor.storage_bytes(), int(counts.sum()) * cell.model.channels * cell.model.size**2
        if place.method == SHARED:
            return 0, 0
        stored = getattr(METHODS[place.method].load(), "storage_bytes", None)
        settings = cell.hyper.methods.get(place.method)
        return stored(cell.hyper, settings, place.branch, history) if stored else (0, 0)

    def _write_round(self, row: Row, named: Row, result: RoundResult, counts: Counts) -> None:
        part = rows.round_part(named, result.round_number)
        here = {**named, "round": result.round_number, "reused": False}
        classes = [{**here, "class": c, "accuracy": counts.accuracy({c})} for c in range(len(counts.total))]
        self._writer.append("clients", part, rows.client_rows(here, result))
        self._writer.append("classes", part, classes)
        self._writer.append("rounds", part, [row])
