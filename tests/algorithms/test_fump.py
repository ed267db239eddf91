"""FU-MP: scores by hand, what pruning silences, and that it stays silent."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from qdsim.algorithms import fump
from qdsim.algorithms.history import History
from qdsim.algorithms.methods import METHODS
from qdsim.data.forgetting import View
from tests.algorithms.federations import CLASS_2, COMPUTE, clients, largest_difference, run, start
from tests.algorithms.settings import FUMP, HYPER
from tests.conftest import CTX

TOP, BOTTOM = FUMP, replace(FUMP, side="bottom")
LAYERS = COMPUTE.model.prunable
PRUNE, RECOVER = fump.phases(HYPER, FUMP, CLASS_2, History())


def test_scores_by_hand():
    """Three classes, two channels, target class 2.

    Channel 0 is active on class 2 alone: TF = 3/4, above its mean on one class, IDF = log(4/2).
    Channel 1 is equally active on all: TF = 1/4, not below its mean on any of three, IDF = log(4/4) = 0.
    """
    activity = torch.tensor([[0.0, 1.0], [0.0, 1.0], [3.0, 1.0]], dtype=torch.float64)
    found = fump.scores(activity, torch.tensor([True, True, True]), 2)
    assert found.tolist() == pytest.approx([0.75 * math.log(2), 0.0])


def test_classes_that_nobody_has_do_not_count():
    """Without class 0 there are two classes: IDF = log(3/2) for the channel above its mean on one of them."""
    activity = torch.tensor([[9.0, 9.0], [0.0, 1.0], [3.0, 1.0]], dtype=torch.float64)
    found = fump.scores(activity, torch.tensor([False, True, True]), 2)
    assert found.tolist() == pytest.approx([0.75 * math.log(3 / 2), 0.25 * math.log(3 / 3)])


def test_a_dead_layer_has_no_scores_that_are_not_numbers():
    """No activity at all: zeros, not 0 / 0."""
    assert fump.scores(torch.zeros(3, 2, dtype=torch.float64), torch.ones(3, dtype=torch.bool), 1).tolist() == [0, 0]


def test_one_ranking_over_all_layers_from_either_side():
    """Scores 0.1 … 0.8 in two layers of four: a quarter are two channels, 0.8 and 0.7 or 0.1 and 0.2."""
    layers = [torch.tensor([0.8, 0.1, 0.3, 0.4]), torch.tensor([0.5, 0.6, 0.7, 0.2])]
    none = [torch.zeros(4, dtype=torch.bool) for _ in layers]
    assert [m.tolist() for m in fump.choose(layers, none, TOP)] == [[True, False, False, False],
                                                                    [False, False, True, False]]  # fmt: skip
    assert [m.tolist() for m in fump.choose(layers, none, BOTTOM)] == [[False, True, False, False],
                                                                       [False, False, False, True]]  # fmt: skip


def test_a_second_request_prunes_others_and_a_layer_keeps_one_channel():
    """What is gone stays gone and is not counted again; three of four in the first layer, never the fourth."""
    layers = [torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([0.1, 0.2, 0.3, 0.4])]
    gone = [torch.tensor([True, False, False, False]), torch.zeros(4, dtype=torch.bool)]
    found = fump.choose(layers, gone, replace(TOP, prune=0.5))
    assert [m.tolist() for m in found] == [[True, True, True, False], [False, False, True, True]]


def statistics(i, params, hook="activation"):
    step = fump.phases(HYPER, replace(TOP, hook=hook), CLASS_2, History())[0].client_step
    return step(clients()[i], params, ctx=CTX, compute=COMPUTE)[1]


@pytest.mark.parametrize("hook", ["activation", "convolution"])
def test_statistics_are_sums_of_activity_by_class(hook):
    """Client 2 has one sample of class 0 and three of class 2: rows 0 and 2 are filled, row 1 is zero."""
    params = start()
    sent = statistics(2, params, hook).delta
    assert sent["counts"].tolist() == [1, 0, 3]
    samples = clients()[2].samples(View("real"))
    images, _ = samples.batch(np.arange(4), COMPUTE.device, torch.float64)
    for block, activity in enumerate(COMPUTE.model.activity(params, images, hook)[1]):
        assert torch.allclose(sent[f"activity{block}"][0], activity[0])
        assert torch.allclose(sent[f"activity{block}"][2], activity[1:].sum(0))
        assert sent[f"activity{block}"][1].abs().sum() == 0


def test_the_two_hooks_read_different_things():
    """After normalisation and ReLU, and the ReLU of the bare convolution."""
    params = start()
    after, bare = (statistics(0, params, hook).delta["activity0"] for hook in ("activation", "convolution"))
    assert not torch.allclose(after, bare)


def test_class_means_are_weighted_by_counts():
    """The clients' sums and counts add up: the result is that of one client with all samples."""
    params = start()
    together = [statistics(i, params) for i in (0, 1, 2)]
    pooled = {n: sum(u.delta[n] for u in together) for n in together[0].delta}
    one = replace(together[0], delta=pooled)
    split = fump.prune(params, together, CTX, layers=LAYERS, settings=TOP, target=2)
    assert largest_difference(split, fump.prune(params, [one], CTX, layers=LAYERS, settings=TOP, target=2)) == 0


def test_pruned_channels_are_silent_and_stay_so_through_three_rounds():
    """A quarter of 8 channels: two whose output is exactly zero after pruning, after recovery, and on new images."""
    params = start(torch.float32)
    for block in range(2):
        params[f"norm{block}.bias"] += 0.5  # a shift that a bare zeroed filter would let through
    pruned = run(PRUNE, params, CLASS_2)
    masks = fump.pruned(pruned, LAYERS)
    assert sum(int(m.sum()) for m in masks) == 2
    assert all((pruned[f"norm{b}.{part}"][m] == 0).all() for b, m in enumerate(masks) for part in ("weight", "bias"))
    recover = replace(RECOVER, stage=replace(RECOVER.stage, rounds=3))
    after = run(recover, pruned, CLASS_2)
    assert largest_difference(after, pruned) > 1e-3
    images = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    for block, activity in enumerate(COMPUTE.model.activity(after, images, "activation")[1]):
        assert (activity[:, masks[block]] == 0).all()
        assert (activity[:, ~masks[block]] != 0).any()
    assert [m.tolist() for m in fump.pruned(after, LAYERS)] == [m.tolist() for m in masks]


def test_a_zeroed_filter_alone_would_not_be_silent():
    """Instance normalisation turns a constant map into β: with β = 0.5 the channel says 0.5."""
    params = start(torch.float32)
    params["norm0.bias"][:] = 0.5
    params["conv0.weight"][1] = 0
    params["conv0.bias"][1] = 0
    images = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    assert COMPUTE.model.activity(params, images, "activation")[1][0][:, 1].tolist() == pytest.approx([0.5, 0.5])


def test_masks_hold_even_against_a_step_that_would_regrow_them():
    """hold() zeroes all four parts of a channel, on whatever it is given."""
    params = start()
    masks = [torch.tensor([True, False, False, False]), torch.zeros(4, dtype=torch.bool)]
    held = fump.hold({name: tensor + 1 for name, tensor in params.items()}, LAYERS, masks)
    assert LAYERS[0].tensors == ("conv0.weight", "conv0.bias", "norm0.weight", "norm0.bias")
    assert all((held[name][0] == 0).all() for name in LAYERS[0].tensors)
    assert (held["conv0.weight"][1] == params["conv0.weight"][1] + 1).all()


def test_nothing_is_relearned_and_no_client_is_forgotten():
    """Two phases, with the reasons for what is missing."""
    assert [(p.name, p.stage.rounds) for p in (PRUNE, RECOVER)] == [("unlearn", 1), ("recover", 4)]
    assert set(METHODS["fump"].reasons) == {"client", "relearn"}
