"""The answer of an experiment: who came closest to retraining, how far and at what cost; a sentence and a small table.

Closest is the method whose F-Set and R-Set accuracy together are the fewest points from those of the model retrained
with the same seed, partition and request, as means over seeds.
"""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd

from analysis import by_method, compare, fig3_membership, style
from analysis.load import Results
from analysis.outputs import Column, Table, text

ATTACK = "loss_threshold"
"""The one whose rates are the clearest, see docs/jobs.md; else the first that was asked for."""
COST, SPEEDUP = "total.client_compute_s", "speedup.client_compute_s"
COLUMNS = (
    Column("final.forget_accuracy", "F-Set"),
    Column("final.retain_accuracy", "R-Set"),
    Column("forget.member_rate", "Members"),
    Column("forget.gap", "from Retrain-Or", kind="points"),
    Column(COST, "Cost", kind="seconds"),
    Column(SPEEDUP, "Speed-up", kind="times"),
)
SAME_POINTS = 0.05
"""Below it a difference is written as none: figures in the sentence have one digit."""
LOWERED = ("Of ", "Compared ", "There ")
"""How a sentence begins that may stand after a colon; others begin with a method's name."""
CLOSEST = "closest: the fewest points from Retrain-Or, F-Set and R-Set taken together"


@dataclass(frozen=True)
class Verdict:
    """What is said first of an experiment."""

    sentence: str
    table: Table | None
    """None where no request has been served yet."""
    best: set[tuple[str, str]] = field(default_factory=set)
    """Cell and method that came closest."""
    trained: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    """F-Set and R-Set accuracy before the request, by cell and request."""

    def html(self) -> str:
        """Return the table for the page: a heading for each setting and request, then a row for each method."""
        return _html(self) if self.table else ""


def make(results: Results, stem: str, title: str) -> Verdict:
    """Judge runs of one experiment, finished or not; finished ones on the seeds that all methods have."""
    outcomes = compare.outcomes(results)
    left_out: list[str] = []
    if len(outcomes) and results.runs["sound"].all():
        outcomes, left_out = compare.paired(outcomes)
    begun = len(outcomes) > 0
    if begun:
        outcomes = outcomes.dropna(subset=[COST])  # what is being served has no result yet
    state = str(results.runs["state"].iloc[-1])
    if outcomes.empty:
        return Verdict(_opening(results, state, _nothing_yet(state, begun)), None)
    outcomes, attack = _with_membership(results, outcomes)
    if SPEEDUP in outcomes:  # retraining against itself says nothing
        outcomes[SPEEDUP] = outcomes[SPEEDUP].where(outcomes["method"] != compare.ORACLE)
    table = by_method.build(stem, title, outcomes, COLUMNS, None, [*left_out, *notes(outcomes, attack)])
    said, best = judge(outcomes, _methods(results))
    found = _opening(results, state, said)
    return Verdict(found, table, best, _before(outcomes))


def notes(outcomes: pd.DataFrame, attack: str | None) -> list[str]:
    """Explain the columns, as this experiment measures them."""
    asked = " ".join(set(outcomes["asked"].astype(str)))
    forget, rest = [], []
    if "class:" in asked:
        forget.append("test images of the class to forget")
        rest.append("test images of the other classes")
    if "client:" in asked:
        forget.append("the leaving client's own images")
        rest.append("all test images" if rest else "the test images")
    said = [
        f"F-Set: accuracy on {' or '.join(forget) or 'what is to be forgotten'}",
        f"R-Set: accuracy on {' or '.join(rest) or 'the rest'}",
        "both are after unlearning and recovery; the aim is Retrain-Or, the model retrained without what is forgotten",
    ]
    if attack:
        said.append(
            f"Members: share of the forgotten training samples that a membership attack ({attack}) takes for samples "
            "that the model has seen; from Retrain-Or: how many points from the share in the retrained model"
        )
    if set(outcomes["method"]) - {compare.ORACLE} and compare.ORACLE in set(outcomes["method"]):
        said.append(CLOSEST)
    said.append("Cost: seconds of computing for unlearning and recovery, summed over the clients")
    if SPEEDUP in outcomes and outcomes[SPEEDUP].notna().any():
        said.append("Speed-up: the cost of retraining over that of the method, seed by seed")
    return [*said, "n: seeds, over which mean ± standard deviation are taken"]


def _methods(results: Results) -> list[str]:
    """Return the methods that the jobs ask for, whether or not they were reached."""
    found: dict[str, None] = {}
    for manifest in results.manifests.values():
        found |= dict.fromkeys(manifest.get("method_names") or (manifest.get("config") or {}).get("methods") or [])
    return [str(method) for method in found]


def _with_membership(results: Results, outcomes: pd.DataFrame) -> tuple[pd.DataFrame, str | None]:
    if results.membership.empty:
        return outcomes, None
    wide = fig3_membership.wide(results.membership)
    attacks = list(dict.fromkeys(wide["attack"]))
    attack = ATTACK if ATTACK in attacks else attacks[0]
    keys = [*compare.SAME, "method"]
    columns = [c for c in ("forget.member_rate", "forget.gap") if c in wide]
    own = wide.loc[wide["attack"] == attack, [*keys, *columns]]
    merged = outcomes.merge(own, on=keys, how="left")
    if "forget.gap" in merged:  # retraining is no distance from itself
        merged["forget.gap"] = merged["forget.gap"].where(merged["method"] != compare.ORACLE)
    return merged, str(attack)


def _before(outcomes: pd.DataFrame) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the accuracies before each request, where all methods start from the same model."""
    found = {}
    for (cell, asked), own in outcomes.groupby(["cell", "asked"], sort=False):
        if re.match(r"(?!1:)\d+:", str(asked)):
            continue  # in a sequence each method starts from what it left before
        first = own.drop_duplicates(["partition", "seed"])
        found[str(cell), str(asked)] = tuple(float(first[f"before.{score}"].mean()) for score in compare.SCORES)
    return found  # type: ignore[return-value]


# --- the sentence


@dataclass(frozen=True)
class _Candidate:
    """A method at a point of the sweep, beside retraining at the same."""

    cell: str
    method: str
    requests: int
    seeds: int
    scores: tuple[float, float]
    aims: tuple[float, float]
    gaps: tuple[float, float]
    """Points from retraining: with a sign for one request, else the mean of the distances."""
    cost: float
    oracle_cost: float
    times: float
    """Retraining's cost over its own: for one request as in the table, for several of the sums; nan if not known."""

    @property
    def distance(self) -> float:
        return round(abs(self.gaps[0]) + abs(self.gaps[1]), 6)


def _opening(results: Results, state: str, said: str) -> str:
    if results.runs["sound"].all():
        return said[0].upper() + said[1:]
    prefix = {
        "running": "The run is still going on; so far: ",
        "interrupted": "The run was interrupted; up to there: ",
        "failed": "The run failed; up to there: ",
    }.get(state, "The run is not whole; what there is of it: ")
    return prefix + said[0].lower() + said[1:] if said.startswith(LOWERED) else prefix + said


def _nothing_yet(state: str, begun: bool) -> str:
    if state == "running":
        return "the first request is being served." if begun else "no request has been served yet."
    return "no request was served to its end." if begun else "no request was served."


def judge(outcomes: pd.DataFrame, asked_for: Sequence[str]) -> tuple[str, set[tuple[str, str]]]:
    """Return the sentence, and which cell and method it is about; ``asked_for`` are the methods of the jobs."""
    others = outcomes[outcomes["method"] != compare.ORACLE]
    seeds = int(outcomes["seed"].nunique())
    if others.empty:
        scores = [float(outcomes[f"final.{score}"].mean()) for score in compare.SCORES]
        alone = "only" if list(asked_for) in ([compare.ORACLE], []) else "so far only"
        sentence = f"there is {alone} the retrained model, with {_both(scores)}, at {_cost(outcomes[COST].mean())}"
        return _sentence(sentence, seeds), set()
    found = _candidates(outcomes, others)
    if not found:
        why = (
            "retraining is not among the methods"
            if compare.ORACLE not in {*asked_for, *outcomes["method"]}
            else "retraining of the same seed and request is not at hand"
        )
        return _sentence(f"there is nothing to compare with, as {why}: {_alone(others)}", seeds), set()
    best = min(found, key=lambda c: (c.distance, c.cost))
    cells, methods = {c.cell for c in found}, {c.method for c in found}
    of = _number_of(len(cells), len(methods))
    if of:
        equal = [_named(c, cells) for c in found if c.distance == best.distance and c is not best]
        as_close = by_method.joined(equal) if 0 < len(equal) < 3 else f"{len(equal)} others"
        tie = f" ({as_close} as close, at more cost)" if equal else ""
        sentence = f"of {of}, {_named(best, cells)} comes closest to retraining{tie}, "
    else:
        sentence = f"compared with retraining, {style.method(best.method)} ends "
    over = f" on average over {best.requests} requests" if best.requests > 1 else ""
    sentence += f"{_beside(best)}{over}, {_at(best)}"
    return _sentence(sentence, best.seeds), {(best.cell, best.method)}


def _named(candidate: _Candidate, cells: set[str]) -> str:
    at = f" with {by_method.cell_words(candidate.cell)}" if len(cells) > 1 else ""
    return f"{style.method(candidate.method)}{at}"


def _candidates(outcomes: pd.DataFrame, others: pd.DataFrame) -> list[_Candidate]:
    """Return each cell and method that has retraining beside it for each request that the method has served there."""
    final = [f"final.{score}" for score in compare.SCORES]
    oracle = outcomes[outcomes["method"] == compare.ORACLE][[*compare.SAME, *final, COST]]
    both = others.merge(oracle, on=compare.SAME, suffixes=("", ".oracle"))
    found = []
    most = both.groupby("cell")["asked"].nunique().to_dict()
    for (cell, method), own in both.groupby(["cell", "method"], sort=False):
        if own["asked"].nunique() < most[cell]:
            continue  # of fewer requests than the others: no mean to set beside theirs
        by_request = own.groupby("asked", sort=False)
        gaps = [100 * (by_request[name].mean() - by_request[f"{name}.oracle"].mean()) for name in final]
        if any(gap.isna().any() for gap in gaps):
            continue
        one = len(by_request) == 1
        comparable = own[SPEEDUP].notna().all() if SPEEDUP in own else False
        costs = [float(by_request[name].mean().sum()) for name in (COST, f"{COST}.oracle")]
        times = float(own[SPEEDUP].mean()) if one and comparable else costs[1] / costs[0] if costs[0] else 0.0
        found.append(
            _Candidate(
                str(cell),
                str(method),
                len(by_request),
                int(by_request["seed"].nunique().min()),
                (float(own[final[0]].mean()), float(own[final[1]].mean())),
                (float(own[f"{final[0]}.oracle"].mean()), float(own[f"{final[1]}.oracle"].mean())),
                tuple(float(gap.iloc[0] if one else gap.abs().mean()) for gap in gaps),  # type: ignore[arg-type]
                costs[0],
                costs[1],
                times if comparable else float("nan"),
            )
        )
    return found


def _beside(best: _Candidate) -> str:
    parts = []
    for name, score, aim, gap in zip(("F-Set", "R-Set"), best.scores, best.aims, best.gaps, strict=True):
        if best.requests > 1:
            parts.append(f"{_points(gap)} away in {name} accuracy")
        elif abs(gap) < SAME_POINTS:
            parts.append(f"the same {name} accuracy ({_percent(aim)})")
        else:
            way = "higher" if gap > 0 else "lower"
            parts.append(f"an {name} accuracy {_points(abs(gap))} {way} ({_percent(score)} against {_percent(aim)})")
    return ("" if best.requests > 1 else "with ") + " and ".join(parts)


def _at(best: _Candidate) -> str:
    sums = " in all" if best.requests > 1 else ""
    times = best.times
    if not times > 0:
        return f"at {_cost(best.cost)}{sums}"
    costs = f"({_seconds(best.cost)} against {_seconds(best.oracle_cost)}{sums})"
    if 0.95 <= times <= 1.05:
        return f"at about the same client compute {costs}"
    more = "less" if times > 1 else "more"
    return f"at {_times(max(times, 1 / times))} times {more} client compute {costs}"


def _alone(others: pd.DataFrame) -> str:
    """Say what methods without a retrained model beside them came to."""
    means = others.groupby(["cell", "method"], sort=False)[
        [f"{stage}.{score}" for stage in ("before", "final") for score in compare.SCORES] + [COST]
    ].mean()
    names = [
        f"{style.method(method)}{f' with {by_method.cell_words(cell)}' if others['cell'].nunique() > 1 else ''}"
        for cell, method in means.index
    ]
    requests = int(others["asked"].nunique())
    over = f", on average over {requests} requests" if requests > 1 else ""
    if len(means) == 1:
        row = means.iloc[0]
        changes = [
            f"{name} accuracy from {_percent(row[f'before.{score}'])} to {_percent(row[f'final.{score}'])}"
            for name, score in zip(("F-Set", "R-Set"), compare.SCORES, strict=True)
        ]
        return f"{names[0]} takes {' and '.join(changes)}{over}, at {_cost(row[COST])}{' each' if over else ''}"
    parts = []
    for name, word, score in (("F-Set", "lowest", "forget_accuracy"), ("R-Set", "highest", "retain_accuracy")):
        values = (100 * means[f"final.{score}"]).round(1)
        top = values.min() if word == "lowest" else values.max()
        having = [n for n, value in zip(names, values, strict=True) if value == top]
        who = by_method.joined(having) if len(having) < 4 else f"{len(having)} of {len(names)}"
        alike = len(having) == len(names)
        said = f"{_percent(top / 100)} with each of them" if alike else f"{word} with {who} ({_percent(top / 100)})"
        parts.append(f"{name} accuracy is {said}")
    cells, methods = others["cell"].nunique(), others["method"].nunique()
    return f"of {_number_of(cells, methods)}, {', '.join(parts)}{over}"


def _number_of(cells: int, methods: int) -> str:
    of = [f"{cells} settings"] if cells > 1 else []
    return " and ".join([*of, *([f"{methods} methods"] if methods > 1 else [])])


def _sentence(said: str, seeds: int) -> str:
    return f"{said[0].upper()}{said[1:]}{f'; means over {seeds} seeds' if seeds > 1 else ''}."


def _both(scores: Sequence[float]) -> str:
    return f"F-Set accuracy {_percent(scores[0])} and R-Set accuracy {_percent(scores[1])}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _points(value: float) -> str:
    return f"{value:.1f} {'point' if f'{value:.1f}' == '1.0' else 'points'}"


def _seconds(value: float) -> str:
    return f"{text('seconds', value)} s"


def _cost(value: float) -> str:
    return f"{_seconds(value)} of client compute"


def _times(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


# --- the table on the page


def _html(verdict: Verdict) -> str:
    assert verdict.table is not None
    columns, figures = verdict.table.columns, verdict.table.figures
    heads = "".join(f'<th scope="col">{html.escape(column.head)}</th>' for column in columns)
    groups = [(str(cell), str(asked), own) for (cell, asked), own in figures.groupby(["cell", "asked"], sort=False)]
    single = len(groups) > 1 and figures["method"].nunique() == 1  # then a row is a request or a setting, not a method
    body = ""
    for cell, asked, own in groups:
        label = " · ".join(filter(None, (by_method.request_words(asked), by_method.cell_words(cell))))
        if single:
            body += _row(verdict, columns, cell, str(own["method"].iloc[0]), own, label)
            continue
        before = verdict.trained.get((cell, asked))
        known = before and not any(map(pd.isna, before))
        percents = " %, R-Set ".join(text("percent", value) for value in before or ())
        said = f' <span class="faint">before: F-Set {percents} %</span>' if known else ""
        body += (
            f'<tr class="group"><th colspan="{len(columns) + 2}" scope="rowgroup">{html.escape(label)}{said}</th></tr>'
        )
        for method, row in own.groupby("method", sort=False):
            body += _row(verdict, columns, cell, str(method), row, style.method(method))
    first = style.method(figures["method"].iloc[0]) if single else "Method"
    head = f'<tr><th scope="col">{html.escape(first)}</th>{heads}<th scope="col">n</th></tr>'
    return f'<table class="headline cards"><thead>{head}</thead><tbody>{body}</tbody></table>'


def _row(verdict: Verdict, columns: Sequence[Column], cell: str, method: str, row: pd.DataFrame, label: str) -> str:
    found = {str(figure["column"]): figure for figure in row.to_dict("records")}
    n = int(row["n"].max())
    cells = ""
    for column in columns:
        figure = found.get(column.key)
        value = text(column.kind, float(figure["mean"])) if figure else "–"
        if figure and not pd.isna(figure["sd"]):
            value += f' <span class="sd">± {text(column.kind, float(figure["sd"])).strip("+×")}</span>'
        cells += f'<td data-label="{html.escape(column.head)}">{value}</td>'
    css = "oracle" if method == compare.ORACLE else "best" if (cell, method) in verdict.best else ""
    mark = {"oracle": ' <span class="mark">the aim</span>', "best": ' <span class="mark">closest</span>'}.get(css, "")
    return f'<tr class="{css}"><th scope="row">{html.escape(label)}{mark}</th>{cells}<td data-label="n">{n}</td></tr>'
