"""Figure 3: membership inference on F-Set and R-Set after unlearning, beside the retrained model."""

from functools import partial

import pandas as pd
from matplotlib import figure as mpl_figure

from analysis import by_method, compare, style
from analysis.load import Results
from analysis.outputs import Column, Figure, Missing, Table

JOB = "fig3_membership"
TITLE = "Figure 3: membership inference"
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
    for stem, what, runs in by_method.settings(results, JOB):
        found = results.membership[results.membership["run_id"].isin(runs["run_id"])]
        made += attack_items(stem, f"{TITLE} ({what})", found, by_method.warnings(results, runs))
    return made


def attack_items(stem: str, title: str, found: pd.DataFrame, warnings: list[str]) -> list[Table | Figure]:
    """Return the figure and the table of membership rows."""
    if found.empty:
        raise Missing('a job with membership = ["balanced", "literal"]')
    wide = _wide(found)
    rows = ["attack", "cell", "asked", "method"]
    where = "Figure 3" if set(wide["dataset"]) == {"cifar10"} else None
    summary = compare.beside_paper(compare.summarize(wide, rows, [c.key for c in COLUMNS]), where)
    summary.loc[summary["attack"] != "literal", ["paper", "difference"]] = float("nan")
    ranks = {method: i for i, method in enumerate(style.method_order(summary["method"]))}
    summary = summary.sort_values(["attack", "cell", "asked"], kind="stable").assign(
        rank=lambda s: s["method"].map(ranks)
    )
    summary = summary.sort_values(["attack", "cell", "asked", "rank"], kind="stable")
    many = {name: summary[name].nunique() > 1 for name in ("cell", "asked")}
    summary["row"] = [
        " · ".join([str(s.attack), *(str(getattr(s, name)) for name in many if many[name]), style.method(s.method)])
        for s in summary.itertuples(index=False)
    ]
    used = [column for column in COLUMNS if (summary["column"] == column.key).any()]
    table = Table(stem, title, used, summary.drop(columns="rank").reset_index(drop=True), notes=[NOTE, *warnings])
    return [Figure(stem, title, partial(_draw, wide), [NOTE, *warnings]), table]


def _wide(found: pd.DataFrame) -> pd.DataFrame:
    """Return one row per seed, method and attack, F-Set's rate with its distance to the oracle's."""
    names = ["dataset", *compare.SAME, "attack", "method", "subset"]
    found = found.astype({name: str for name in names if name != "seed"})
    keys = ["dataset", *compare.SAME, "attack", "method"]
    wide = found.pivot_table(index=keys, columns="subset", values=[*FIGURES, "tpr_at_1pct_fpr"], aggfunc="last")
    wide = wide.set_axis([f"{column[1]}.{column[0]}" for column in wide.columns], axis=1)
    wide = wide.reset_index()
    same = [*compare.SAME, "attack"]
    oracle = wide[wide["method"] == compare.ORACLE].drop_duplicates(same).set_index(same)["forget.member_rate"]
    wide = wide.join(oracle.rename("oracle"), on=same)
    return wide.assign(**{"forget.gap": wide["forget.member_rate"] - wide["oracle"]})


def _draw(wide: pd.DataFrame) -> mpl_figure.Figure:
    attacks = sorted(set(wide["attack"]))
    drawn, axes = style.figure(style.COLUMN_WIDTH * len(FIGURES), 2.4 * len(attacks), len(attacks), len(FIGURES))
    methods = style.method_order(wide["method"])
    for i, attack in enumerate(attacks):
        for j, figure in enumerate(FIGURES):
            axis = axes[i * len(FIGURES) + j]
            own = wide[wide["attack"] == attack]
            for k, method in enumerate(methods):
                values = own[own["method"] == method]
                for place, subset in enumerate(SUBSETS):
                    column = f"{subset}.{figure}"
                    if column not in values:
                        continue
                    mean, sd = values[column].mean(), values[column].std()
                    x = place + (k - (len(methods) - 1) / 2) * 0.8 / len(methods)
                    name = style.method(method) if place == 0 else None
                    error = sd if pd.notna(sd) else None
                    axis.bar(
                        x,
                        mean,
                        0.75 / len(methods),
                        yerr=error,
                        capsize=2,
                        color=style.METHOD_COLORS.get(method),
                        label=name,
                    )
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
