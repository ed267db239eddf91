"""Rows follow from the declaration of the columns."""

from dataclasses import fields

from qdsim.algorithms.phase import ClientUpdate
from qdsim.experiment import rows
from qdsim.store import tables


def test_a_phase_sums_clocks_and_counts():
    """Not accuracies, nor the size of the data, which is the same in each round."""
    clocks = ["wall_s", "client_compute_s", "critical_path_s", "evaluation_s", "aggregation_s", "wait_s", "busy_s"]
    counts = ["samples", "gradients", "bytes_up", "bytes_down", "participants_expected", "participants_received"]
    assert list(rows.SUMMED) == [*clocks, *counts]
    assert set(rows.SUMMED) <= set(tables.names("rounds"))


def test_a_client_is_asked_for_what_its_row_has():
    """Each of its columns, but for those that say where the row belongs, is a field of its update."""
    measured = ["loss", "compute_s", "matching_s", "step_s", "node_id", "gpu_id", "peak_memory_bytes"]
    assert list(rows.CLIENT_COLUMNS) == ["client_id", "num_samples", *measured]
    assert set(rows.CLIENT_COLUMNS) <= {field.name for field in fields(ClientUpdate)}


def test_every_column_says_what_it_means():
    """And stands in its table once."""
    for table, columns in tables.COLUMNS.items():
        assert len({column.name for column in columns}) == len(columns), table
        assert all(column.about for column in columns), table
