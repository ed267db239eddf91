"""Figure 4: accuracy of each class while one class after the other is forgotten, with shaded stages."""

from functools import partial

import pandas as pd
from matplotlib import figure as mpl_figure

from analysis import by_method, style
from analysis.fig2_class_accuracy import shade, trained
from analysis.load import Results
from analysis.outputs import Figure

JOB = "fig4_sequential"
TITLE = "Figure 4: sequential requests"


def make(results: Results) -> list[Figure]:
    """Make the figure for each setting that was run, and each of its methods."""
    made = []
    for stem, what, runs in by_method.settings(results, JOB):
        classes = results.classes[results.classes["run_id"].isin(runs["run_id"])]
        notes = ["mean over seeds", *by_method.warnings(results, runs)]
        made.append(sequence_figure(stem, f"{TITLE} ({what})", classes, notes))
    return made


def sequence_figure(stem: str, title: str, classes: pd.DataFrame, notes: list[str]) -> Figure:
    """Return a figure with a panel for each method."""
    return Figure(stem, title, partial(_draw, classes), notes)


def positions(requests: list[str]) -> list[str]:
    """Return a sequence's requests in their order: ``1:class:5, 2:class:8``."""
    return sorted(requests, key=lambda request: int(request.split(":")[0]))


def _draw(classes: pd.DataFrame) -> mpl_figure.Figure:
    served = classes[classes["method"] != "shared"].astype({"asked": str, "method": str})
    methods = style.method_order(served["method"])
    drawn, axes = style.figure(style.TEXT_WIDTH, 2.5 * len(methods) + 0.5, len(methods), 1, sharey=True)
    for axis, method in zip(axes, methods, strict=True):
        rows = served[served["method"] == method]
        before = trained(classes)
        parts, at = [before.assign(x=0)], 0
        for request in positions(list(set(rows["asked"]))):
            forgotten = request.rpartition(":")[2]
            begin = at
            for phase in ("unlearn", "recover"):
                own = rows[(rows["asked"] == request) & (rows["phase"] == phase)]
                if own.empty:
                    continue
                last = int(own["round"].max())
                parts.append(own.assign(x=at + own["round"]))
                shade(axis, [(phase, at, at + last)])
                at += last
            axis.text((begin + at) / 2, 1.03, forgotten, ha="center", va="bottom", fontsize=8)
        line = pd.concat(parts)
        means = line.groupby(["class", "x"], observed=True)["accuracy"].mean()
        for c in sorted(set(line["class"])):
            axis.plot(means[c].index, means[c], style.class_style(c), color=style.class_color(c), label=f"class {c}")
        style.percent_axis(axis, "test accuracy")
        axis.set_xlim(0, at)
        axis.set_xlabel("round after training; above: the class or client forgotten")
        axis.set_title(style.method(method), pad=14)
    style.legend(drawn, axes)
    return drawn
