"""The notebook of the documentation runs from top to bottom, in Jupyter."""

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import PROJECT

NOTEBOOK = PROJECT / "docs" / "notebook.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The notebook as it is after running."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PROJECT))
        NotebookClient(notebook, timeout=90, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def outputs(notebook, kind):
    """What cells show of a kind, joined."""
    return [o["data"][kind] for cell in notebook.cells for o in cell.get("outputs", []) if kind in o.get("data", {})]


def test_the_notebook_runs(executed):
    """No cell fails; there are figures, the table of the first run, and that of the method that the notebook writes."""
    assert len(outputs(executed, "image/png")) >= 2
    tables = outputs(executed, "text/html")
    assert any("<td>QuickDrop</td>" in html for html in tables)
    assert any("<td>Fade</td>" in html for html in tables)


def test_progress_takes_one_output_of_its_cell(executed):
    """The live screen is replaced, not added to; in the end it says where the results are, and no escape codes."""
    (cell,) = [cell for cell in executed.cells if "run = qdsim.run(" in cell.source]
    (shown,) = [output for output in cell.outputs if output.output_type == "display_data"]
    assert "results in runs/quickstart-" in shown["data"]["text/html"]
    assert "\x1b" not in shown["data"]["text/plain"]


def test_what_is_committed_is_what_ran(executed):
    """Each code cell has been run, in order, and shows as many outputs as it does now."""
    committed = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    now = [len(cell.outputs) for cell in executed.cells if cell.cell_type == "code"]
    assert [len(cell.outputs) for cell in cells] == now
