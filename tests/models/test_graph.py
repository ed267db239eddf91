"""CUDA graphs: when a function is captured, and what happens where it cannot be."""

import pytest
import torch

from qdsim.bench.fake_cuda import CUDA, Values, pretended
from qdsim.errors import CannotPlace
from qdsim.models.compute import make_compute
from qdsim.models.convnet import ConvNet
from qdsim.models.fast.cuda import Fused
from qdsim.models.fast.graph import LEAST_CALLS, Graphs
from qdsim.models.module import ModuleModel
from qdsim.models.numerics import Numerics

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def adds_up(total):
    """A function that changes what it holds, and counts how often the host ran it."""

    def add(x, *, ran):
        ran.append(len(x))
        total.add_(x.sum())
        return total * 2

    return add


def test_a_function_is_run_twice_then_captured_and_replayed():
    """1 + 2 + 3 + 4 = 10, doubled; the host ran the first two and the capture. Another shape goes its own way."""
    with pretended(Values()):
        total, ran = torch.zeros((), device=CUDA), []
        step = Graphs("on").replayed(adds_up(total), LEAST_CALLS)
        left = [float(step(torch.tensor([float(i)]).to(CUDA), ran=ran)) for i in range(1, 5)]
        assert (left, ran) == ([2.0, 6.0, 12.0, 20.0], [1, 1, 1])
        assert float(step(torch.ones(5).to(CUDA), ran=ran)) == 30.0
        assert ran == [1, 1, 1, 5]


def test_off_and_few_calls_leave_a_function_alone():
    """And so does a network that autograd differentiates class by class."""
    step = adds_up(torch.zeros(()))
    assert Graphs("off").replayed(step, 100) is step
    assert Graphs("on").replayed(step, LEAST_CALLS - 1) is step
    for model, is_left in ((ModuleModel("lenet", 1, 12, 3), True), (ConvNet(1, 8, 3, 4, 2), False)):
        compute = make_compute(model, torch.device("cuda:0"), Numerics(), "on")
        assert (compute.replayed(step, 100) is step) == is_left
    assert make_compute(model, torch.device("cpu"), Numerics(), "on").graphs.wanted == "off"


@WITHOUT_GPU
def test_where_capturing_fails_auto_goes_on_and_says_why():
    """Torch refuses here, with its own words: every call is run as it is, and nothing is tried again."""
    graphs, total, ran = Graphs("auto"), torch.zeros(()), []
    step = graphs.replayed(adds_up(total), LEAST_CALLS)
    assert [float(step(torch.tensor([1.0]), ran=ran)) for _ in range(4)] == [2.0, 4.0, 6.0, 8.0]
    assert len(ran) == 4
    assert graphs.why_not
    assert "\n" not in graphs.why_not
    assert graphs.replayed(step, 100) is step


@WITHOUT_GPU
def test_where_capturing_fails_on_refuses():
    """Exit 3 with the setting, in an actor that starts as well as in a step."""
    with pytest.raises(
        CannotPlace, match=r'asked for cluster.cuda_graphs = "on", found that a step cannot be captured'
    ):
        Graphs("on").try_out(lambda x: x + 1, torch.ones(2))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x + 1, ""),
        (lambda x: x + float(x.sum()), "CUDA error: operation not permitted when stream is capturing"),
        (lambda x, calls=[]: (calls.append(1), x * len(calls))[1], "a replayed graph gave other bits"),
    ],
    ids=["same", "asks the device", "a number of the host"],
)
def test_an_actor_tries_it_as_it_starts(function, reason):
    """What waits for the device cannot be captured; what differs from run to run would not be replayed."""
    with pretended(Values()):
        graphs = Graphs("auto")
        graphs.try_out(function, torch.ones(2).to(CUDA))
        assert graphs.why_not == reason


def test_both_kinds_of_a_step_are_tried():
    """The gradients by class and those of pixels, on a device that is only claimed: they can be captured."""
    with pretended(Values()):
        graphs = Graphs("auto")
        Fused(ConvNet(1, 8, 3, 4, 2), 32).try_out(graphs)
        assert graphs.why_not == ""
