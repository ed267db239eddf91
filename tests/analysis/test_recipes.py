"""The page of the schema lists each column of each table; that its recipes run is shown where the runs are."""

import re

from qdsim.store.tables import COLUMNS, SCHEMA_VERSION
from tests.conftest import PROJECT

PAGE = (PROJECT / "analysis" / "README.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"```python\n(.*?)```", PAGE.split("### Five recipes")[1], re.DOTALL)


def test_there_are_five():
    """As the page says."""
    assert len(RECIPES) == 5


def test_the_page_lists_every_column():
    """Table by table, with its meaning; and the version that is written."""
    assert f"Schema version {SCHEMA_VERSION}." in PAGE
    for table, columns in COLUMNS.items():
        section = PAGE.split(f"### `{table}`")[1].split("\n### ")[0]
        common = PAGE.split("## The tables")[1].split("\n### ")[0]
        for name, kind, about, _ in columns:
            meaning = about.replace("|", "\\|")  # a bare one would end the cell
            assert f"| `{name}` | {kind} | {meaning} |" in section + common, (table, name)
