"""Figure 3: membership inference on F-Set and R-Set after unlearning, beside the retrained model."""

from functools import partial

import pandas as pd
from matplotlib import figure as mpl_figure

from analysis import by_method, compare, style
from analysis.by_method import Paper
from analysis.load import Results
from analysis.outputs import Column, Figure, Missing, Table

JOB = "fig3_membership"
TITLE = "Figure 3: membership inference"
PAPER = Paper("Figure 3", ("cifar10",), 10, "α = 0.1")
SUBSETS = {"forget": "F-Set", "retain": "R-Set"}
FIGURES = ("member_rate", "auc")
COLUMNS = (
    Column("forget.member_rate", "Member rate", "F-Set"),
    Column("forget.gap", "from retrained", "F-Set"),
    Column("forget.auc", "AUC", "F-Set", "number"),
    Column("forget.tpr_at_1pct_fpr", "TPR at 1 % FPR", "F-Set"),
    Column("retain.member_rate", "Member rate", "R-Set"),
    Column("retain.auc", "AUC", "R-Set", "number"),
    Column("retain.tpr_at_1pct_fpr", "TPR at 1 % FPR", "R-Set"),
)
NOTE = "the aim is to equal the retrained model of the same seed and partition, not zero"


def make(results: Results) -> list[Table | Figure]:
    """Make figure and table for each setting that was run."""
    made: list[Table | Figure] = []
    for stem, what, own in by_method.settings(results, JOB):
        made += attack_items(own, stem, f"{TITLE} ({what})", by_method.warnings(own))
    if not made:
        raise Missing(f'qdsim run {JOB}, with membership = ["loss_threshold", "entropy_svm"]')
    return made


def attack_items(results: Results, stem: str, title: str, warnings: list[str]) -> list[Table | Figure]:
    """Return the figure and the table of the attacks; nothing where the job asked for none."""
    if results.membership.empty:
        return []
    by_attack = wide(results.membership)
    covered = PAPER.covers(results.runs.iloc[0])
    rows = ["attack", "cell", "asked", "method"]
    summary = compare.summarize(by_attack, rows, [column.key for column in COLUMNS])
    summary = compare.beside_paper(summary, PAPER.where if covered else None)
    summary.loc[summary["attack"] != "entropy_svm", ["paper", "difference"]] = float("nan")
    summary = by_method.labelled(summary, rows)
    used = [column for column in COLUMNS if (summary["column"] == column.key).any()]
    notes = [NOTE, *([_ranges()] if covered else []), *warnings]
    shown, not_shown = by_method.first_of(by_attack, "cell", "asked")
    return [
        Figure(stem, title, partial(_draw, shown), [*not_shown, *notes]),
        by_method.only_like(Table(stem, title, used, summary.reset_index(drop=True), notes=notes), results),
    ]


def _ranges() -> str:
    """Say what the paper gives as ranges only."""
    value = {
        name: 100 * (compare.paper_value(PAPER.where, row, column) or 0)
        for name, row, column in (
            ("most", "all", "forget.member_rate.most"),
            ("from", "baselines", "retain.member_rate.least"),
            ("to", "baselines", "retain.member_rate.most"),
        )
    }
    return (
        f"the paper's attack: F-Set below {value['most']:g} % for all methods, "
        f"R-Set {value['from']:g} to {value['to']:g} % for the baselines"
    )


def wide(found: pd.DataFrame) -> pd.DataFrame:
    """Return one row per seed, method and attack, F-Set's rate with its distance to the oracle's."""
    keys = ["dataset", *compare.SAME, "attack", "method"]
    found = found.astype({name: str for name in (*keys, "subset") if name != "seed"})
    found = found.sort_values("attack", kind="stable")  # whatever their parts are called
    values = [*FIGURES, "tpr_at_1pct_fpr"]
    wide = found.pivot_table(index=keys, columns="subset", values=values, aggfunc="last", sort=False)
    wide = wide.set_axis([f"{column[1]}.{column[0]}" for column in wide.columns], axis=1).reset_index()
    same = [*compare.SAME, "attack"]
    oracle = wide[wide["method"] == compare.ORACLE][[*same, "forget.member_rate"]]
    wide = wide.merge(oracle.rename(columns={"forget.member_rate": "oracle"}), on=same, how="left")
    return wide.assign(**{"forget.gap": wide["forget.member_rate"] - wide["oracle"]})


def _draw(wide: pd.DataFrame) -> mpl_figure.Figure:
    attacks = sorted(set(wide["attack"]))
    drawn, axes = style.figure(style.COLUMN_WIDTH * len(FIGURES), 2.4 * len(attacks), len(attacks), len(FIGURES))
    methods = style.method_order(wide["method"])
    width = 0.8 / len(methods)
    for i, attack in enumerate(attacks):
        for j, figure in enumerate(FIGURES):
            axis = axes[i * len(FIGURES) + j]
            own = wide[wide["attack"] == attack]
            for k, method in enumerate(methods):
                values = own[own["method"] == method]
                found = [
                    (place, values[f"{s}.{figure}"]) for place, s in enumerate(SUBSETS) if f"{s}.{figure}" in values
                ]
                places = [place + (k - (len(methods) - 1) / 2) * width for place, _ in found]
                means, errors = [v.mean() for _, v in found], [v.std() for _, v in found]  # none of one seed
                color, label = style.method_style(method).color, style.method(method)
                axis.bar(places, means, 0.95 * width, yerr=errors, capsize=2, color=color, label=label)
            axis.set_xticks(range(len(SUBSETS)), list(SUBSETS.values()))
            axis.grid(visible=False, axis="x")
            axis.set_title(f"{attack} attack")
            if figure == "auc":
                axis.axhline(0.5, color="#555555", lw=0.8, ls="--")
                axis.set_ylim(0, 1.02)
                axis.set_ylabel("AUC (dashed: chance)")
            else:
                style.percent_axis(axis, "taken for members")
                axis.set_ylim(0, 1.05)
    style.legend(drawn, axes)
    return drawn
