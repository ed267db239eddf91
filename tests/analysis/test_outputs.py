"""How tables are written, and what the check of a figure's words sees."""

from functools import partial

import pandas as pd
import pytest

from analysis import by_method, style
from analysis.outputs import Column, Figure, Table
from tests.analysis import texts


def table(groups, row="QuickDrop"):
    """A table with a row and, of each group, so many columns whose heads have 20 letters."""
    columns = [Column(f"{g}{k}", "x" * 20, g, "count") for g, count in groups.items() for k in range(count)]
    figures = [
        {"row": row, "column": c.key, "mean": 1.0, "sd": float("nan"), "n": 1, "paper": 2.0, "difference": -1.0}
        for c in columns
    ]
    return Table("stem", "title", columns, pd.DataFrame(figures))


def columns_of(latex):
    """The column letters of each tabular."""
    start = r"\begin{tabular}"
    return [line.removeprefix(start)[1:-1] for line in latex.splitlines() if line.startswith(start)]


def test_a_table_wider_than_a_page_is_stacked_between_its_groups():
    """A label (9 + 2 letters) and 'difference' (10 + 2) leave 92 of 115: four columns of 22. Groups of 3, 1, 2, 1."""
    text = table({"a": 3, "b": 1, "c": 2, "d": 1}).latex()
    assert columns_of(text) == ["llrrrr", "llrrr"]
    assert text.count(r"\caption") == 1
    assert text.startswith(r"\begin{table*}")
    assert text.count("QuickDrop & n = 1") == 2


def test_a_group_wider_than_a_page_is_cut():
    """Four columns fit: six of one group are four and two, with the group's name over both."""
    text = table({"a": 6}).latex()
    assert columns_of(text) == ["llrrrr", "llrr"]
    assert text.count("{c}{a}") == 2


def test_a_table_longer_than_a_page_goes_on_in_another():
    """A part has 8 lines of rules, heads and ends and 3 of its row, and a gap before it: five are 59 of 60."""
    text = table(dict.fromkeys("abcdef", 4)).latex()
    floats = text.split(r"\begin{table*}")[1:]
    assert [f.count(r"\begin{tabular}") for f in floats] == [5, 1]
    assert [", continued" in f for f in floats] == [False, True]


def test_a_narrow_table_stays_in_its_column_of_the_paper():
    """11 + 12 + 22 letters of the column's 55."""
    assert table({"a": 1}).latex().startswith("\\begin{table}\n")


def test_a_long_label_is_wrapped():
    """40 letters, where 38 are 6 cm."""
    assert columns_of(table({"a": 1}, row="x" * 40).latex()) == ["p{6cm}lr"]


def test_a_hash_is_in_a_label_only_where_nothing_else_tells_rows_apart():
    """Two jobs differ in their names; two settings of one job in nothing but the hash."""
    rows = ["job", "setting", "method"]
    jobs = pd.DataFrame([("a", "0f", "retrain"), ("b", "1e", "retrain")], columns=rows)
    assert list(by_method.labelled(jobs, rows)["row"]) == ["a · Retrain-Or", "b · Retrain-Or"]
    settings = jobs.assign(job="a")
    assert list(by_method.labelled(settings, rows)["row"]) == ["0f · Retrain-Or", "1e · Retrain-Or"]


def _costs(width, values):
    drawn, (axis,) = style.figure(width, 1.9)
    axis.plot(values, range(len(values)))
    style.log_axis(axis, "x", "s")
    return drawn


@pytest.mark.parametrize(("width", "values"), [(2.6, (0.0, 0.05, 220.0)), (1.9, (0.24, 0.34)), (1.9, (0.2871,))])
def test_numbers_of_a_logarithmic_axis_never_lie_on_each_other(width, values):
    """A cost of nothing does not count for the range, which is then 3.6 decades; a narrow range; a single point."""
    assert texts.faults(Figure("costs", "", partial(_costs, width, values))) == []


def _drawn(title):
    drawn, axes = style.figure(4.0, 2.0, 1, 2)
    for axis, phase in zip(axes, ("recover", "unlearn"), strict=True):
        axis.set_title(title)
        axis.plot([0, 1], label="class 0")
        axis.axvspan(0, 1, label=phase)
    style.legend(drawn, axes)
    return drawn


def test_words_on_each_other_and_cut_off_are_seen():
    """A title of 60 letters over half of 4 inches reaches into the other's, and out of the picture."""
    assert texts.faults(Figure("short", "", partial(_drawn, "title"))) == []
    seen = texts.faults(Figure("long", "", partial(_drawn, "x" * 60)))
    assert any("lies on" in fault for fault in seen)
    assert any("cut off" in fault for fault in seen)


def test_a_legend_has_the_phases_first_and_in_their_order():
    """The panels name class 0, recover, class 0, unlearn."""
    (legend,) = _drawn("title").legends
    assert [word.get_text() for word in legend.get_texts()] == ["unlearn", "recover", "class 0"]
