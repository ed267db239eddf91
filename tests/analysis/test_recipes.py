"""The page of the schema: its recipes run, and it lists each column of each table."""

import re

import pandas as pd
import pytest

import analysis
from qdsim.tables import COLUMNS, SCHEMA_VERSION
from tests.conftest import PROJECT

PAGE = (PROJECT / "analysis" / "README.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"```python\n(.*?)```", PAGE.split("### Five recipes")[1], re.DOTALL)


def test_there_are_five():
    """As the page says."""
    assert len(RECIPES) == 5


def test_the_recipes_run_one_after_the_other(all_jobs):
    """On a real run with two seeds and three methods; each ends in a table with a number in it."""
    names = {"analysis": analysis, "results": analysis.load(next(all_jobs.glob("table2_cifar10-*")))}
    found = []
    for recipe in RECIPES:
        *lines, last = recipe.strip().splitlines()
        exec("\n".join(lines), names)
        found.append(eval(last, names))
    for value in found:
        assert isinstance(value, pd.DataFrame | pd.Series)
        assert value.notna().any().any() if isinstance(value, pd.DataFrame) else value.notna().any()
    means, times, curve, share, worst = found
    stages = names["results"].stages
    recovered = stages[(stages["method"] == "quickdrop") & (stages["phase"] == "recover")]["retain_accuracy"].mean()
    assert means.loc["quickdrop", ("retain_accuracy", "mean")] == pytest.approx(recovered)
    assert times["retrain"].tolist() == pytest.approx([1.0, 1.0])
    assert curve.shape == (3, 2)
    assert ((share > 0) & (share < 1)).all()
    assert len(worst) == 5


def test_the_page_lists_every_column():
    """Table by table, with its meaning; and the version that is written."""
    assert f"Schema version {SCHEMA_VERSION}." in PAGE
    for table, columns in COLUMNS.items():
        section = PAGE.split(f"### `{table}`")[1].split("\n### ")[0]
        common = PAGE.split("## The tables")[1].split("\n### ")[0]
        for name, kind, about in columns:
            meaning = about.replace("|", "\\|")  # a bare one would end the cell
            assert f"| `{name}` | {kind} | {meaning} |" in section + common, (table, name)
