"""Requests and views: which samples a phase may touch."""

import numpy as np
import pytest

from qdsim.data.forgetting import ForgetSet, UnlearningRequest, View
from tests.conftest import make_client

REAL = np.array([[200, 0, 50], [100, 300, 0], [0, 10, 10]])
SYNTHETIC = np.array([[2, 0, 1], [1, 3, 0], [0, 1, 1]])
CLASS_2 = ForgetSet(classes=frozenset([2]))
CLIENT_1 = ForgetSet(clients=frozenset([1]))


def test_a_class_request_covers_its_class_everywhere():
    """Class 2 at any client."""
    labels = np.array([0, 2, 1, 2])
    assert CLASS_2.covers(0, labels).tolist() == [False, True, False, True]
    assert CLIENT_1.covers(1, labels).all()
    assert not CLIENT_1.covers(0, labels).any()


@pytest.mark.parametrize(
    ("view", "sizes"),
    [
        (View("real"), [250, 400, 20]),
        (View("synthetic", only=CLASS_2), [1, 0, 1]),
        (View("synthetic", only=CLIENT_1), [0, 4, 0]),
        (View("augmented", without=CLASS_2), [4, 8, 2]),
        (View("real", without=CLASS_2 | CLIENT_1), [200, 0, 10]),
        (View("synthetic", only=CLIENT_1, without=ForgetSet(classes=frozenset([1]))), [0, 1, 0]),
    ],
)
def test_sizes_of_views(view, sizes):
    """By hand from the two count matrices; augmented counts each synthetic sample and its real one."""
    assert view.sizes(REAL, SYNTHETIC).tolist() == sizes


def test_driver_and_client_agree_on_sizes():
    """What the driver counts from the partition is what the client finds in its shard."""
    client = make_client(0, [0] * 5 + [2] * 3)
    counts = np.array([[5, 0, 3]])
    for view in (View("real"), View("real", only=CLASS_2), View("real", without=CLASS_2)):
        assert len(client.samples(view)) == view.sizes(counts, counts)[0]


def test_a_sequence_remembers_what_is_gone():
    """After class 2, the request for client 1 must keep class 2 out as well."""
    second = UnlearningRequest("2:client:1", CLIENT_1, previously_forgotten=CLASS_2)
    assert second.forgotten == ForgetSet(classes=frozenset([2]), clients=frozenset([1]))
