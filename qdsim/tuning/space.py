"""What a search varies and what it wants: ``train.lr=loguniform(0.001, 0.1)`` and ``recover.retain_accuracy``."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qdsim.errors import BadInput
from qdsim.experiment.config import Job
from qdsim.store import tables

if TYPE_CHECKING:
    import pandas as pd

KINDS = {
    "uniform": 2,
    "quniform": 3,
    "loguniform": 2,
    "qloguniform": 3,
    "randint": 2,
    "qrandint": 3,
    "lograndint": 2,
    "qlograndint": 3,
    "choice": None,
}
"""Ray Tune's own functions, each with the number of its arguments; None: any."""
EXAMPLE = "write KEY=KIND(…), for example train.lr=loguniform(0.001,0.1), recover.steps=randint(1,20)"
SHARED_PHASES = ("train", "finetune")
METRICS = tuple(
    column.name
    for column in tables.COLUMNS["stages"]
    if str(column.type) in ("double", "int64") and column.name != "seed"
)


@dataclass(frozen=True)
class Range:
    """What values a key may take: one of Ray Tune's functions with its arguments."""

    key: str
    kind: str
    arguments: tuple[Any, ...]

    @staticmethod
    def parse(text: str) -> Range:
        """Read ``KEY=KIND(…)``; nothing of it is evaluated."""
        key, equals, rest = text.partition("=")
        try:
            call = ast.parse(rest.strip(), mode="eval").body
        except (SyntaxError, ValueError):
            call = None
        if not equals or not key.strip() or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise BadInput("--over", text, EXAMPLE)
        kind = call.func.id
        if kind not in KINDS or call.keywords:
            raise BadInput("--over", text, f"no such kind of range; allowed: {', '.join(KINDS)}")
        try:
            arguments = tuple(_literal(argument) for argument in call.args)
        except ValueError:
            raise BadInput("--over", text, "the arguments are numbers, words, texts in quotes or lists") from None
        found = Range(key.strip(), kind, arguments)
        found._check(text)
        return found

    def _check(self, text: str) -> None:
        wanted = KINDS[self.kind]
        if wanted is None:
            if not self.arguments:
                raise BadInput("--over", text, "list at least one value")
            return
        numbers = all(isinstance(a, int | float) and not isinstance(a, bool) for a in self.arguments)
        if len(self.arguments) != wanted or not numbers:
            raise BadInput("--over", text, f"{self.kind} takes {wanted} numbers")
        low, high = self.arguments[:2]
        if not low < high or ("log" in self.kind and low <= 0):
            above = " above 0" if "log" in self.kind else ""
            raise BadInput("--over", text, f"{self.kind} takes a lower bound{above}, then a higher one")
        if "int" in self.kind and not all(isinstance(a, int) for a in self.arguments):
            raise BadInput("--over", text, f"{self.kind} takes whole numbers")
        if self.kind.startswith("q") and not self.arguments[2] > 0:
            raise BadInput("--over", text, f"{self.kind} takes a step above 0 as its third number")

    def ends(self) -> list[Any]:
        """Return the values at the ends of the range, or all that it lists: each must suit the job."""
        if self.kind == "choice":
            return list(self.arguments)
        low, high = self.arguments[:2]
        below = 1 if self.kind in ("randint", "lograndint") else 0  # these leave their upper bound out
        return [low, high - below] if "int" in self.kind else [float(low), float(high)]

    def of_tune(self) -> Any:
        """Return it as Ray Tune's."""
        from ray import tune

        if self.kind == "choice":
            return tune.choice(list(self.arguments))
        return getattr(tune, self.kind)(*self.arguments)


def _literal(node: ast.expr) -> Any:
    """Return a value as it is written; a bare word is a text, and true and false are TOML's."""
    if isinstance(node, ast.Name):
        return {"true": True, "false": False}.get(node.id, node.id)
    return ast.literal_eval(node)


@dataclass(frozen=True)
class Term:
    """A column of the table ``stages`` for a method's phase, added or taken off."""

    sign: int
    method: str
    phase: str
    column: str


@dataclass(frozen=True)
class Metric:
    """What a search compares trials by: one column, or a sum and difference of several."""

    text: str
    terms: tuple[Term, ...]

    @staticmethod
    def parse(text: str, job: Job) -> Metric:
        """Read ``[METHOD.]PHASE.COLUMN``, several with + and - between them; without a method the job's first is meant.

        Training belongs to no method: ``train.test_accuracy``.
        """
        pieces = re.split(r"\s*([+-])\s*", text.strip())
        signs = [1, *(1 if sign == "+" else -1 for sign in pieces[1::2])]
        terms = tuple(_term(name, sign, job) for name, sign in zip(pieces[::2], signs, strict=True))
        return Metric(text, terms)

    def value(self, stages: pd.DataFrame) -> float:
        """Return the metric of a run, each term as its mean over seeds and requests."""
        total = 0.0
        for term in self.terms:
            rows = stages[(stages["method"] == term.method) & (stages["phase"] == term.phase)]
            value = float(rows[term.column].mean()) if len(rows) else float("nan")
            if value != value:
                missing = f"the run has no {term.column} of {term.method} in the phase {term.phase}"
                raise BadInput("--metric", self.text, missing)
            total += term.sign * value
        return total


def _term(name: str, sign: int, job: Job) -> Term:
    parts = name.split(".")
    if len(parts) not in (2, 3):
        raise BadInput(
            "--metric", name, "write PHASE.COLUMN or METHOD.PHASE.COLUMN, for example recover.retain_accuracy"
        )
    method, phase, column = parts if len(parts) == 3 else ("", *parts)
    if phase not in tables.PHASES:
        raise BadInput("--metric", name, f"phases are {', '.join(tables.PHASES)}")
    if column not in METRICS:
        raise BadInput("--metric", name, f"no such column of the table stages; allowed: {', '.join(METRICS)}")
    if phase in SHARED_PHASES:
        return Term(sign, "shared", phase, column)
    known = [*job.methods_by_name]
    if method and method not in known:
        raise BadInput("--metric", name, f"methods of the job are {', '.join(known)}")
    return Term(sign, method or known[0], phase, column)
