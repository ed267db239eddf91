"""Figure 4: accuracy of each class while one class after the other is forgotten, with shaded stages."""

from functools import partial

import pandas as pd
from matplotlib import figure as mpl_figure
from matplotlib.ticker import MaxNLocator

from analysis import by_method, style
from analysis.fig2_class_accuracy import plot_classes, shade, timeline
from analysis.load import Results
from analysis.outputs import Figure, Missing

JOB = "fig4_sequential"
TITLE = "Figure 4: sequential requests"


def make(results: Results) -> list[Figure]:
    """Make the figure for each setting that was run, with a panel for each of its methods."""
    made = []
    for stem, what, own in by_method.settings(results, JOB):
        made += sequence_figure(own, stem, f"{TITLE} ({what})", by_method.warnings(own))
    if not made:
        raise Missing(f"qdsim run {JOB}, with sequence = true")
    return made


def in_sequence(results: Results) -> bool:
    """Tell whether the requests follow each other."""
    return bool(results.classes["request"].astype(str).str.match(r"\d+:").any())


def sequence_figure(results: Results, stem: str, title: str, notes: list[str]) -> list[Figure]:
    """Return a figure with a panel for each method."""
    if not in_sequence(results):
        return []
    classes, shown = by_method.first_of(results.classes, "cell")
    return [Figure(stem, title, partial(_draw, classes), ["mean over seeds", *shown, *notes])]


def _draw(classes: pd.DataFrame) -> mpl_figure.Figure:
    served = classes[classes["method"] != "shared"]
    methods = style.method_order(served["method"].astype(str))
    drawn, axes = style.figure(style.TEXT_WIDTH, 2.5 * len(methods) + 0.5, len(methods), 1, sharey=True)
    for axis, method in zip(axes, methods, strict=True):
        rows = served[served["method"] == method]
        requests = sorted(set(rows["asked"].astype(str)), key=lambda request: int(request.split(":")[0]))
        phases, asked = [], []
        for request in requests:
            for phase in ("unlearn", "recover"):
                own = rows[(rows["asked"] == request) & (rows["phase"] == phase)]
                if len(own):
                    phases.append(own)
                    asked.append(request)
        line, spans = timeline(classes, phases)
        shade(axis, spans)
        for request in requests:
            places = [span for span, name in zip(spans, asked, strict=True) if name == request]
            if places:
                middle = (places[0][1] + places[-1][2]) / 2
                axis.text(middle, 1.03, request.rpartition(":")[2], ha="center", va="bottom", fontsize=8)
        plot_classes(axis, line)
        style.percent_axis(axis, "test accuracy")
        axis.set_xlim(0, max(line.index))
        axis.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        axis.set_xlabel("round after training; above: the class or client forgotten")
        axis.set_title(style.method(method), pad=14)
    style.legend(drawn, axes)
    return drawn
