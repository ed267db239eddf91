"""Work through a plan on one executor: train each federation once, then every method and request from there."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from qdsim import seeds
from qdsim.algorithms.history import History
from qdsim.algorithms.phase import Phase
from qdsim.errors import BadInput
from qdsim.experiment import gallery, rows, sharing
from qdsim.experiment.checkpoint import Checkpoint, Commit
from qdsim.experiment.phase_record import PhaseRecord, RunState, scores
from qdsim.experiment.plan import SHARED, PhaseKey, Plan, Task, storage_of
from qdsim.experiment.progress import Event, Notice, Row, Step
from qdsim.experiment.resume import Action, Continue, Outputs, Skip, is_served, plan_request, plan_training
from qdsim.experiment.trained import Rows, Trained, TrainedStore, check_same_training, description
from qdsim.federation import attacks, evaluation, membership
from qdsim.federation.client_host import Shard
from qdsim.federation.client_states import StateFolder, state_file
from qdsim.federation.executor import Executor
from qdsim.federation.rounds import run_phase
from qdsim.models import params as P
from qdsim.models.model import Model, check_params
from qdsim.models.params import Params
from qdsim.store import arrays, lock, run_directory
from qdsim.store.arrays import ArrayFile
from qdsim.store.run_directory import START_ANEW, TableWriter
from qdsim.store.storage import StoragePath

SERVE_AGAIN = "delete it, and the request is served again"
NOT_SHARED = "--out is not shared by all nodes: "
COPIED = ("clients", "classes", "rounds", "stages")
"""The tables of a phase, in the order in which its rows are written."""


def ignore_owner() -> None:
    """Stand in for the check of the lock where there is none."""


class Experiment:
    """One plan, one executor, one run directory."""

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        run_dir: StoragePath,
        emit: Callable[[Event], None],
        owner: str = "",
        trained_in: StoragePath | None = None,
    ):
        self._plan, self._executor, self._emit = plan, executor, emit
        check_owner = partial(lock.check, run_dir, owner) if owner else ignore_owner
        self._writer = TableWriter(run_dir, check_owner)
        self._checkpoint = Checkpoint(run_dir, check_owner)
        self._owner = run_directory.identity(run_dir)
        self._run_state = RunState(plan, executor, self._writer, self._checkpoint, emit, check_owner)
        self._store = TrainedStore(trained_in or run_dir.parent)
        self._takes_turns = trained_in is not None
        """Others beside it come to the same trainings: it waits for theirs."""
        self._models = run_dir / "models"
        self._tasks = {task.key(): task for task in plan.tasks()}
        self._commit: Commit | None = None
        """Where an earlier attempt at the run stopped."""

    def run(self) -> None:
        """Train each federation and serve its requests; what was done before the run was resumed is skipped."""
        self._models.mkdir(exist_ok=True)
        self._commit = self._checkpoint.load()
        for training, tasks in self._plan.trainings():
            served = [is_served(self._outputs(task), self._written(task)) for task in tasks]
            with ExitStack() as turn:
                trained = None if all(served) else self._train(training, turn)
            if trained is None:
                for phase in training.phases():
                    self._run_state.pace.end(training.key(phase.name))
            reached: dict[str, Params] = {}
            for task, is_done in zip(tasks, served, strict=True):
                if trained is None or is_done:
                    reached[task.method] = self._read_model(task)
                    self._say_skipped(task, task.phases())
                    continue
                start = reached.get(task.method, trained.params) if task.point.job.sequence else trained.params
                reached[task.method] = self._serve(task, start, trained.history)
        self._checkpoint.clear()

    # -- training ------------------------------------------------------------------------------------------------------

    def _train(self, training: Task, turn: ExitStack) -> Trained:
        """Train, or take the state that an earlier training of the same fields left."""
        point, federation, phases = training.point, training.federation, training.phases()
        parts = zip(federation.partition.indices, federation.labels, strict=True)
        shards = [Shard(i, indices, labels) for i, (indices, labels) in enumerate(parts)]
        synthetic = point.hyper.synthetic if point.distils else None
        self._emit(Step(f"giving {len(shards)} clients their samples"))
        self._executor.broadcast("assign_clients", point.model, federation.seed, shards, synthetic, setup=True)
        self._writer.append("partitions", training.key().part, rows.partition_rows(training))
        described = self._described(training, phases)
        trained, stored_phases = self._find_stored(described, point.model, len(shards))
        if self._takes_turns and stored_phases < len(phases):
            waiting = Notice("another run does the same training: waiting for what it stores")
            turn.enter_context(self._store.turn(described[0], partial(self._emit, waiting)))
            trained, stored_phases = self._find_stored(described, point.model, len(shards))
        if trained is None:
            trained = Trained(self._initial_params(training, request="", phase="train"), History(), {})
        self._copy_rows(training, phases[:stored_phases], trained.rows)
        actions = self._resume_training(training, phases, stored_phases)
        for number in range(stored_phases, len(phases)):
            phase, action = phases[number], actions[number]
            if action == Skip():
                trained = replace(trained, rows=self._rows_of(training, phase, trained.rows))
                continue
            commit = self._commit if isinstance(action, Continue) else None
            if commit is not None:
                trained = Trained(commit.params, commit.history or trained.history, trained.rows)
            storage = self._storage(training, trained.history)
            record = PhaseRecord(
                self._run_state, training, phase, {}, storage, history=trained.history, continue_from=commit
            )
            params = run_phase(
                phase,
                self._start(training, phase, trained.params, commit),
                training.sizes(phase),
                self._executor,
                record,
                run_seed=federation.seed,
                first_round=record.first_round,
                server_state=record.server_state,
                history=record.recorded_history,
            )
            record.finish()
            trained = Trained(params, trained.history, self._rows_of(training, phase, trained.rows))
            described = self._described(training, phases)  # an actor may have been replaced on another device
            self._store_training(training, described[number], trained, len(shards), is_last=phase is phases[-1])
        if point.distils and point.job.synthetic.gallery:
            self._write_gallery(training, trained.rows["rounds"][-1])
        return trained

    def _described(self, training: Task, phases: list[Phase]) -> list[dict[str, Any]]:
        """Return what the states after each of the phases depend on; refuse what differs from before a resumption."""
        file = self._models / f"{run_directory.file_name(training.key().part)}.json"
        device, mixed = self._executor.device, training.point.job.cluster.mixed_devices
        last = description(self._plan, training, phases, device)
        device = check_same_training(file, last, mixed_devices=mixed)
        return [description(self._plan, training, phases[: n + 1], device) for n in range(len(phases))]

    def _find_stored(self, described: list[dict[str, Any]], model: Model, clients: int) -> tuple[Trained | None, int]:
        """Return the furthest state that is stored, and how many phases it has behind it."""
        for stored_phases in range(len(described), 0, -1):
            trained = self._store.load(described[stored_phases - 1], model, self._executor, clients)
            if trained is not None:
                return trained, stored_phases
        return None, 0

    def _resume_training(self, training: Task, phases: list[Phase], stored_phases: int) -> tuple[Action, ...]:
        """Say what to do with each phase; have the clients' states written, and read where an attempt stopped."""
        commit, keys = self._commit, [training.key(phase.name) for phase in phases]
        folder, readable = None, True
        if any(phase.learns for phase in phases) and stored_phases < len(phases):
            folder = self._states_folder(training)
            readable = commit is not None and self._states_readable(commit, folder)
        cursor = commit.cursor if commit else None
        actions = plan_training(keys, commit=cursor, stored_phases=stored_phases, states_readable=readable)
        continues = any(isinstance(action, Continue) for action in actions)
        if folder is not None:
            states = self._executor.states
            states.keep_in(folder, commit.states if commit and continues else None)
            if continues:
                clients = range(len(training.federation.labels))
                self._executor.broadcast("load_states", states.files(clients), START_ANEW)
        return actions

    def _states_folder(self, training: Task) -> StateFolder | None:
        """Return the folder where the clients of a training write their states, if all nodes can access it."""
        folder = self._checkpoint.states_folder(training.key().part)
        folder.path.mkdir(parents=True, exist_ok=True)
        if all(self._executor.broadcast("can_access", folder.path)):
            return folder
        lost = "an interrupted training restarts at round 1, and a lost client ends the run"
        self._emit(Notice(NOT_SHARED + lost))
        return None

    @staticmethod
    def _states_readable(commit: Commit, folder: StateFolder | None) -> bool:
        """Tell whether the states that a commit names are there: a training may be stored as a whole, and deleted."""
        if folder is None or commit.states is None:
            return False
        return all(state_file(folder, i, last).path.exists() for i, last in commit.states.items())

    def _store_training(
        self, training: Task, described: dict[str, Any], trained: Trained, clients: int, *, is_last: bool
    ) -> None:
        """Store a training for later runs, where all nodes can access the storage."""
        self._run_state.check_owner()
        stored = self._store.save(described, trained, self._executor, clients)
        if not stored:
            self._emit(Notice(NOT_SHARED + "the trained state is not stored, and no other run can reuse it"))
        elif is_last:
            self._executor.states.freeze(self._store.clients_folder(described))
            self._checkpoint.forget_states(training.key().part)

    def _rows_of(self, training: Task, phase: Phase, earlier: Rows) -> Rows:
        """Return the rows of a training phase that has ended, after those of the phases before it."""
        key = training.key(phase.name)
        found: Rows = {"stages": self._writer.read("stages", key.part)}
        rounds = found["stages"][0]["rounds_run"]
        for table in ("rounds", "clients", "classes"):
            parts = (self._writer.read(table, key.round_part(n + 1)) for n in range(rounds))
            found[table] = [row for part in parts for row in part]
        return {table: [*earlier.get(table, []), *own] for table, own in found.items()}

    def _copy_rows(self, training: Task, phases: list[Phase], stored: Rows) -> None:
        """Write the rows of a training that was done before, so that the run's tables are complete."""
        for phase in phases:
            if not self._writer.has("stages", training.key(phase.name).part):  # else a resumed run's own training
                self._copy_phase(training.key(phase.name), stored)
        if phases:
            self._say_skipped(training, phases)

    def _copy_phase(self, key: PhaseKey, stored: Rows) -> None:
        """Write the rows of a phase that was done elsewhere, in the order in which one that runs writes them.

        A round's row after those of its clients and classes, and the phase's row last: whatever cuts this off, what is
        there looks like rounds that were done.
        """
        for table in COPIED:
            mine = [{**row, **key.columns(), "reused": True} for row in stored[table] if row["phase"] == key.phase]
            for number in dict.fromkeys(row["round"] for row in mine):
                # under the names of rows that are written here, so that neither stands beside the other
                part = key.part if table == "stages" else key.round_part(number)
                self._writer.append(table, part, [row for row in mine if row["round"] == number])

    def _write_gallery(self, training: Task, last: Row) -> None:
        """Write the few synthetic images that the user asked to see."""
        settings, split = training.point.job.synthetic, training.federation.partition
        picks = gallery.picks(split.synthetic_counts(settings.scale), settings.gallery)
        pairs = evaluation.image_pairs(self._executor, picks, settings.init)
        key = training.key(last["phase"])
        named = {**key.columns(), "round": last["round"]}
        self._writer.append("images", key.part, [{**named, **row} for row in gallery.rows(picks, pairs)])

    # -- requests ------------------------------------------------------------------------------------------------------

    def _serve(self, task: Task, params: Params, history: History) -> Params:
        """Serve a request; return the model that has unlearned, before it relearns anything."""
        phases, outputs = task.phases(history), self._outputs(task)
        cursor = self._commit.cursor if self._commit else None
        actions = plan_request(outputs, commit=cursor, written=self._written(task))
        commit = self._commit if any(isinstance(action, Continue) for action in actions) else None
        unlearned = (commit.unlearned or commit.params) if commit else params
        storage = self._storage(task, history)
        shared = sharing.key_of(self._plan, task, phases, params, storage, self._executor.device)
        if shared and commit is None:
            earlier = self._served_alike(shared, task)
            if earlier is not None:
                return self._copy_served(earlier, task, phases)
        if not phases:  # the last class of a sequence: trained on nothing, a model is an untrained one
            unlearned = self._initial_params(task, request=task.request.label, phase="unlearn")
        before = (
            commit.before if commit else scores(self._run_state.evaluate(params, task.request).result(), task.request)
        )
        last_row = None
        for phase, action in zip(phases, actions, strict=True):
            if action == Skip():
                self._run_state.pace.end(task.key(phase.name))
                last_row = self._last_row(task, phase)
                continue
            relearns = phase.name == "relearn"
            here = commit if isinstance(action, Continue) else None
            if relearns and here is not None and last_row is not None:
                self._checkpoint.check_committed(unlearned, last_row["params_sha256"], f"its {last_row['phase']}")
            if relearns:
                self._attack(task, unlearned, last_row)
            record = PhaseRecord(
                self._run_state,
                task,
                phase,
                before,
                storage,
                unlearned=unlearned if relearns else None,
                continue_from=here,
            )
            params = run_phase(
                phase,
                self._start(task, phase, unlearned, here),
                task.sizes(phase),
                self._executor,
                record,
                run_seed=task.federation.seed,
                request=task.request.label,
                first_round=record.first_round,
                server_state=record.server_state,
            )
            before, row = record.finish()
            if not relearns:
                unlearned, last_row = params, row
        self._attack(task, unlearned, last_row)
        if shared:
            self._checkpoint.note_served(shared, task.key())
        self._run_state.check_owner()
        arrays.write(self._model_file(task), P.to_numpy(unlearned))
        name = phases[-1].name if phases else ""
        self._emit(replace(self._run_state.progress(task, name), row=last_row, finished=True))
        return unlearned

    def _served_alike(self, shared: str, task: Task) -> Task | None:
        """Return the task of an earlier cell whose result this one's is, if all of it is there."""
        key = self._checkpoint.served(shared)
        other = self._tasks.get(key) if key is not None else None
        if other is None or other.index >= task.index:
            return None
        return other if is_served(self._outputs(other), self._written(other)) else None

    def _copy_served(self, earlier: Task, task: Task, phases: Sequence[Phase]) -> Params:
        """Take the rows and the model of an earlier cell's task, so that the run's tables are complete."""
        params, last_row = self._read_model(earlier), None
        for phase in phases:
            self._copy_phase(task.key(phase.name), self._rows_of(earlier, phase, {}))
            self._run_state.pace.end(task.key(phase.name))
            last_row = self._last_row(task, phase) if phase.name != "relearn" else last_row
        for part, copied in zip(self._attack_parts(earlier), self._attack_parts(task), strict=True):
            found = self._writer.read("membership", part)
            self._writer.append("membership", copied, [{**row, "cell": task.point.label} for row in found])
        self._run_state.check_owner()
        arrays.write(self._model_file(task), P.to_numpy(params))
        name, cell = phases[-1].name if phases else "", earlier.point.label
        self._emit(replace(self._run_state.progress(task, name), row=last_row, finished=True, reused_from=cell))
        return params

    def _outputs(self, task: Task) -> Outputs:
        """Return what the request will have left in the run directory once it is served."""
        keys = tuple(task.key(phase.name) for phase in task.phases())
        return Outputs(keys, f"models/{task.key().part}", tuple(f"membership/{p}" for p in self._attack_parts(task)))

    def _written(self, task: Task) -> set[str]:
        """Return which of a request's outputs are there."""
        found = set()
        for name in self._outputs(task).names:
            table, _, part = name.partition("/")
            there = self._model_file(task).path.exists() if table == "models" else self._writer.has(table, part)
            if there:
                found.add(name)
        return found

    def _attack_parts(self, task: Task) -> list[str]:
        """Return the names of the parts that membership inference writes: after the last phase that forgets."""
        forgetting = [task.key(phase.name) for phase in task.phases() if phase.name != "relearn"]
        names = [attacks.find(name).name for name in task.point.job.membership]
        return [f"{key.part}-{name}" for key in forgetting[-1:] for name in names]

    def _attack(self, task: Task, params: Params, last_row: Row | None) -> None:
        """Write what membership inference finds in the model that has unlearned, unless it is written.

        A part without rows is made again: it takes no time where there is nobody to ask for.
        """
        if last_row is None:
            return
        key, at = task.key(last_row["phase"]), task.federation
        named = {**key.columns(), "round": last_row["round"]}
        for name, part in zip(task.point.job.membership, self._attack_parts(task), strict=True):
            if self._writer.has("membership", part) and self._writer.read("membership", part):
                continue
            found = membership.attack(
                name, task.request, at.seed, at.labels, self._plan.test_labels, params, self._executor
            )
            self._writer.append("membership", part, [{**named, **row} for row in found])

    def _last_row(self, task: Task, phase: Phase) -> Row:
        """Return the last row of a phase that is over."""
        key = task.key(phase.name)
        (stage,) = self._writer.read("stages", key.part)
        return self._writer.round_row(key.round_part(stage["rounds_run"]))

    def _read_model(self, task: Task) -> Params:
        """Return the model that a served request has left."""
        file = self._model_file(task)
        stored = P.from_numpy(arrays.read(file, SERVE_AGAIN))
        forgetting = [phase for phase in task.phases() if phase.name != "relearn"]
        if forgetting and P.sha256(stored) != self._last_row(task, forgetting[-1])["params_sha256"]:
            why = f"holds another model than its rows in tables/rounds say; {SERVE_AGAIN}"
            raise BadInput("file", str(file.path), why)
        return check_params(task.point.model, stored, file.path, SERVE_AGAIN)

    def _model_file(self, task: Task) -> ArrayFile:
        part = task.key().part
        path = self._models / f"{run_directory.file_name(part)}.npz"
        return ArrayFile(path, self._owner.run_id, f"the model of {part}", self._owner.unnamed)

    # -- both ----------------------------------------------------------------------------------------------------------

    def _start(self, task: Task, phase: Phase, params: Params, commit: Commit | None) -> Params:
        """Return the model that a phase begins with."""
        if commit is not None:
            return self._checkpoint.checked(commit.params, task.point.model)
        if phase.start == "current":
            return params
        if phase.start == "initial":  # θ_0 has the names of training, so that anybody can draw it again
            return self._initial_params(task, request="", phase="train")
        return self._initial_params(task, request=task.request.label, phase=phase.name)

    @staticmethod
    def _initial_params(task: Task, *, request: str, phase: str) -> Params:
        return task.point.model.init(seeds.generator(task.federation.seed, "init", request=request, phase=phase))

    def _storage(self, task: Task, history: History) -> tuple[int, int]:
        """Return what the method keeps for unlearning: measured, and by the accounting of its paper."""
        point = task.point
        method = None if task.method == SHARED else point.job.methods_by_name[task.method]
        if point.distils if method is None else method.uses_synthetic:
            counts = task.federation.partition.synthetic_counts(point.hyper.synthetic.scale)
            measured = sum(self._executor.broadcast("storage_bytes"))
            return measured, int(counts.sum()) * point.model.channels * point.model.size**2
        if method is None:
            return 0, 0
        return storage_of(method, point.hyper, task.request, history)

    def _say_skipped(self, task: Task, phases: Sequence[Phase]) -> None:
        """Say that phases had been done before."""
        for phase in phases:
            self._run_state.pace.end(task.key(phase.name))
        name = phases[-1].name if phases else ""
        self._emit(replace(self._run_state.progress(task, name), finished=True))
