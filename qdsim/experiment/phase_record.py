"""What a phase leaves behind: evaluations, rows, commits and progress. It observes the round loop."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from qdsim.algorithms.history import History
from qdsim.algorithms.phase import Phase
from qdsim.data.forgetting import UnlearningRequest
from qdsim.experiment import rows, sharing
from qdsim.experiment.checkpoint import Checkpoint, Commit
from qdsim.experiment.plan import Plan, Task
from qdsim.experiment.progress import Event, Pace, Progress, Row
from qdsim.experiment.rows import Scores
from qdsim.experiment.work import load_of
from qdsim.federation.evaluation import Evaluation, PendingEvaluation, evaluate, training_counts
from qdsim.federation.executor import Executor
from qdsim.federation.rounds import Round
from qdsim.models import params as P
from qdsim.models.params import Params
from qdsim.store.run_directory import TableWriter

SCORES = ("test_accuracy", "forget_accuracy", "retain_accuracy")
"""What a phase begins with and ends with."""


@dataclass
class RunState:
    """What all phases of a run share."""

    plan: Plan
    executor: Executor
    writer: TableWriter
    checkpoint: Checkpoint
    emit: Callable[[Event], None]
    check_owner: Callable[[], None]
    """Raises where another process has taken the run over."""

    def __post_init__(self) -> None:
        self.pace = Pace({task.key(phase.name): load_of(task, phase) for task, phase in sharing.computed(self.plan)})

    def progress(self, task: Task, phase: str, rounds: int = 0) -> Progress:
        """Return the event that a phase begins with."""
        cell, seed, done = task.point.label, task.federation.seed, self.pace.share_done
        named = (task.index, cell, seed, task.method, task.request.label)
        return Progress(*named, phase, 0, rounds, 0, 0, done, left=self.pace.left())

    def evaluate(self, params: Params, request: UnlearningRequest) -> PendingEvaluation:
        """Have a model evaluated on all that accuracies are made of."""
        return evaluate(self.executor, params, len(self.plan.test_labels), request)


def scores(evaluation: Evaluation, request: UnlearningRequest) -> Scores:
    """Return accuracies; for a client request F-Set is the client's own data (it has no test data)."""
    counts = evaluation.test
    found: Scores = {"test_accuracy": counts.accuracy()}
    if not request.label:
        return found
    if evaluation.forgotten_clients is not None:
        found["retain_accuracy"] = counts.accuracy()
        found["forget_accuracy"] = evaluation.forgotten_clients.accuracy()
    else:
        kept = set(range(len(counts.total))) - request.forgotten.classes
        found["retain_accuracy"] = counts.accuracy(kept)
        found["forget_accuracy"] = counts.accuracy(request.forget.classes)
    return found


@dataclass
class PhaseRecord:
    """One phase of one task; an :class:`~qdsim.federation.rounds.Observer` of its rounds."""

    run: RunState
    task: Task
    phase: Phase
    before: Scores
    """The scores that the phase begins with."""
    storage: tuple[int, int]
    """What the method keeps for unlearning: measured, and by the accounting of its paper."""
    history: History | None = None
    """In training: what the server remembers of it."""
    unlearned: Params | None = None
    """While relearning: the model that had forgotten."""
    continue_from: Commit | None = None
    """Where an earlier attempt at the phase stopped."""
    round_rows: list[Row] = field(default_factory=list)
    """Rows of the rounds that are over."""

    def __post_init__(self) -> None:
        self._key = self.task.key(self.phase.name)
        self._sizes = self.task.sizes(self.phase)
        if self.continue_from is not None:
            self.before = self.continue_from.before
            numbers = range(1, self.continue_from.round_number + 1)
            self.round_rows = [self.run.writer.round_row(self._key.round_part(n)) for n in numbers]
            committed = self.round_rows[-1]["params_sha256"]
            self.run.checkpoint.check_committed(self.continue_from.params, committed, self._key.part)
        self.run.pace.begin(self._key, load_of(self.task, self.phase), len(self.round_rows))
        self.run.emit(self._here(0, 0, 0))

    @property
    def first_round(self) -> int:
        """The round to begin with; beyond the last where the commit has ended the phase."""
        ended = self.continue_from is not None and self.continue_from.ended
        return self.phase.stage.rounds + 1 if ended else len(self.round_rows) + 1

    @property
    def server_state(self) -> Params:
        """What the server's rule remembers of the rounds that are over."""
        return self.continue_from.server_state if self.continue_from is not None else {}

    @property
    def recorded_history(self) -> History | None:
        """What the round loop records updates into: fine-tuning has no updates of the model."""
        return self.history if self.phase.name == "train" else None

    def progress(self, round_number: int, expected: int, done: int) -> None:
        """Pass on that a round has begun, or a client has finished."""
        self.run.pace.clients(done, expected)
        self.run.emit(self._here(round_number, expected, done))

    def evaluate(self, params: Params) -> PendingEvaluation:
        """Have the round's model evaluated."""
        return self.run.evaluate(params, self.task.request)

    def commit(self, finished: Round) -> bool:
        """Write what a round was and commit it; clients may be at work on the next one."""
        assert finished.evaluation is not None
        evaluation = finished.evaluation.result()
        began_s = time.perf_counter()
        number, request = finished.number, self.task.request
        row: Row = {**self._key.columns(), "round": number, **scores(evaluation, request), **rows.costs(finished)}
        self.round_rows.append(row)
        rule = self.phase.ends_by
        over = rule is not None and rule.reached(rows.scores_of(self.phase, self.round_rows, self.before))
        ended = over or number == self.phase.stage.rounds
        if request.label and ended:
            forgotten, retained = training_counts(self.run.executor, finished.params, request)
            row |= {"forget_accuracy_train": forgotten.accuracy(), "retain_accuracy_train": retained.accuracy()}
        row |= {"data_size": int(self._sizes.sum()), "params_sha256": P.sha256(finished.params), "reused": False}
        row["evaluation_s"] = evaluation.elapsed_s + time.perf_counter() - began_s
        self._write(row, finished, evaluation)
        recorded = self.recorded_history
        past = self.history if recorded is None else recorded.until(number)
        states = self.run.executor.states.tags_until(self.phase.name, number) if self.history is not None else None
        self.run.checkpoint.save(
            Commit(
                self._key,
                number,
                ended,
                self.before,
                finished.params,
                finished.server_state,
                self.unlearned,
                past,
                states,
            )
        )
        compute_s, matching_s = (
            sum(getattr(u, name) for u in finished.updates) for name in ("compute_s", "matching_s")
        )
        saving_s, step_s = (sum(getattr(u, name) for u in finished.updates) for name in ("saving_s", "step_s"))
        self.run.pace.round_over(compute_s, matching_s, finished.busy_s, saving_s / step_s if step_s else 0.0)
        self.run.emit(self._here(number, finished.expected, finished.expected, row=row, phase_ended=ended))
        return over

    def finish(self) -> tuple[Scores, Row]:
        """Write the phase's row; return the scores it has ended with, and the row of its last round."""
        self.run.pace.end(self._key)
        summed = rows.stage_row(self._key, self.round_rows, self.phase, self.before, self.storage)
        self.run.writer.append("stages", self._key.part, [summed])
        last = self.round_rows[-1]
        return {name: last.get(name) for name in SCORES if last.get(name) is not None}, last

    def _write(self, row: Row, finished: Round, evaluation: Evaluation) -> None:
        part = self._key.round_part(finished.number)
        self.run.writer.append("clients", part, rows.client_rows(self._key, finished))
        self.run.writer.append("classes", part, rows.class_rows(self._key, finished, evaluation.test))
        self.run.writer.append("rounds", part, [row])

    def _here(
        self, round_number: int, clients: int, done: int, row: Row | None = None, phase_ended: bool = False
    ) -> Progress:
        task = self.task
        return Progress(
            task=task.index,
            cell=task.point.label,
            seed=task.federation.seed,
            method=task.method,
            request=task.request.label,
            phase=self.phase.name,
            round_number=round_number,
            rounds=self.phase.stage.rounds,
            clients_done=done,
            clients=clients,
            share_done=self.run.pace.share_done,
            left=self.run.pace.left(),
            row=row,
            phase_ended=phase_ended,
        )
