"""Where the time of a round went: computing, matching, transfer and waiting, aggregation, evaluation."""

from functools import partial

import pandas as pd
from matplotlib import figure as mpl_figure

from analysis import style
from analysis.load import Results
from analysis.outputs import Figure

PARTS = {
    "compute": ("client steps", "#0072B2"),
    "matching": ("matching", "#56B4E9"),
    "transfer": ("transfer and waiting", "#E69F00"),
    "aggregation": ("aggregation", "#009E73"),
    "evaluation": ("evaluation", "#BBBBBB"),
}
NOTE = (
    "mean over rounds; client steps and matching: a lower bound on the workers there were; "
    "transfer and waiting: the rest of the time until the last update was there"
)


def split(rounds: pd.DataFrame, clients: pd.DataFrame) -> pd.DataFrame:
    """Return the mean seconds of a round's parts by method and phase; rounds copied from earlier runs count as well."""
    keys = ["run_id", "cell", "seed", "method", "request", "phase", "round"]
    sums = clients.groupby(keys, observed=True)[["compute_s", "matching_s"]].sum()
    share = (sums["matching_s"] / sums["compute_s"]).rename("share")
    rounds = rounds.join(share, on=keys)
    busy = rounds["busy_s"].fillna(rounds["wait_s"])
    share = rounds["share"].fillna(0)
    parts = pd.DataFrame(
        {
            "compute": busy * (1 - share),
            "matching": busy * share,
            "transfer": (rounds["wall_s"] - busy - rounds["aggregation_s"]).clip(lower=0),
            "aggregation": rounds["aggregation_s"],
            "evaluation": rounds["evaluation_s"],
        }
    )
    parts[["method", "phase"]] = rounds[["method", "phase"]].astype(str)
    return parts.groupby(["method", "phase"])[list(PARTS)].mean()


def make(results: Results, stem: str, title: str, notes: list[str]) -> list[Figure]:
    """Make the figure of these runs, finished or not."""
    rounds = results.rounds
    if rounds.empty:
        return []
    older = "busy_s was not measured in all of these runs: there the whole wait counts as client steps"
    said = [NOTE, *([older] if rounds["busy_s"].isna().any() else []), *notes]
    return [Figure(stem, title, partial(_draw, split(rounds, results.clients)), said)]


def _draw(parts: pd.DataFrame) -> mpl_figure.Figure:
    methods = ["shared", *style.METHODS]
    order = sorted(
        parts.index, key=lambda k: (methods.index(k[0]) if k[0] in methods else 99, style.PHASES.index(k[1]))
    )
    parts = parts.loc[order[::-1]]
    drawn, (axis,) = style.figure(style.TEXT_WIDTH, 1.0 + 0.25 * len(parts))
    left = pd.Series(0.0, index=parts.index)
    places = range(len(parts))
    for name, (label, color) in PARTS.items():
        axis.barh(places, parts[name], left=left, color=color, label=label)
        left = left + parts[name]
    names = [phase if m == "shared" else f"{style.method(m)} {phase}" for m, phase in parts.index]
    axis.set_yticks(places, names)
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("seconds of a round")
    drawn.legend(loc="outside lower center", ncols=5)
    return drawn
