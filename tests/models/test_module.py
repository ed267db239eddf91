"""Any torch.nn.Module as a function of its parameters; those that cannot serve are refused with the way out."""

import pickle
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from qdsim.errors import BadInput
from qdsim.models.module import ModuleModel, checked_model

MODULE = """
    import torch
    from torch import nn

    calls = 0

    def plain(*, channels, size, num_classes, hidden=3):
        inner = [nn.Linear(channels * size * size, hidden), nn.Tanh()]
        return nn.Sequential(nn.Flatten(), *inner, nn.Linear(hidden, num_classes))

    def batch_norm(*, channels, size, num_classes):
        linear = nn.Linear(4 * (size - 2) ** 2, num_classes)
        return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), linear)

    def dropout(*, channels, size, num_classes, p=0.5):
        return nn.Sequential(nn.Flatten(), nn.Dropout(p), nn.Linear(channels * size * size, num_classes))

    class Coupled(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.linear = nn.Linear(inputs, outputs)

        def forward(self, x):
            x = x.flatten(1)
            return self.linear(x - x.mean(0))

    def coupled(*, channels, size, num_classes):
        return Coupled(channels * size * size, num_classes)

    def other_each_time(*, channels, size, num_classes):
        global calls
        calls += 1
        found = plain(channels=channels, size=size, num_classes=num_classes)
        found[1].weight.data.fill_(calls)
        return found

    def eleven_logits(*, channels, size, num_classes):
        return plain(channels=channels, size=size, num_classes=11)

    def too_small(*, channels, size, num_classes):
        return nn.Conv2d(channels, 4, 99)

    def no_module(*, channels, size, num_classes):
        return "a network"

    def fails(*, channels, size, num_classes):
        raise KeyError("width")

    def empty(*, channels, size, num_classes):
        return nn.Flatten()

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            return g * 2

    class OnceNet(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.linear = nn.Linear(inputs, outputs)

        def forward(self, x):
            return Once.apply(self.linear(x.flatten(1)))

    def once(*, channels, size, num_classes):
        return OnceNet(channels * size * size, num_classes)

    number = 3
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A module of somebody's own, in the folder where the command runs; a model of it by the factory's name."""
    Path(tmp_path / "their_networks.py").write_text(textwrap.dedent(MODULE), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield lambda name, options="{}": ModuleModel(f"their_networks:{name}", 1, 8, 10, options)
    sys.modules.pop("their_networks", None)
    from qdsim.models import module

    module._factory.cache_clear()
    module._module_of.cache_clear()


@pytest.mark.parametrize("kind", ["mlp", "lenet", "resnet", "torchvision:resnet18", "torchvision:squeezenet1_1"])
def test_a_model_is_a_value_and_a_function_of_its_parameters(kind):
    """It survives pickling as an equal one; the same generator gives the same parameters, and these the same logits.

    Another call of init moves neither torch's global generator nor the answers for the old parameters.
    """
    options = '{"dropout": 0.0}' if "squeezenet" in kind else "{}"
    model = checked_model(ModuleModel(kind, 1, 32, 10, options), distils=True)
    again = pickle.loads(pickle.dumps(model))
    assert again == model
    before = torch.get_rng_state()
    one, other = (m.init(torch.Generator().manual_seed(3)) for m in (model, again))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(not torch.equal(t, one[n]) for n, t in model.init(torch.Generator().manual_seed(4)).items())
    assert model.num_params == sum(tensor.numel() for tensor in one.values())
    images = torch.randn(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    logits = model.forward(one, images)
    assert logits.shape == (2, 10)
    assert torch.equal(again.forward(other, images), logits)


def test_the_layers_by_hand():
    """mlp 64-200-200-10: 64·200 + 200 + 200·200 + 200 + 200·10 + 10 numbers, twice the products in operations.

    Its outputs are 64 (flattened), 200, 200 (ReLU), 200, 200 and 10 numbers of four bytes.
    """
    model = ModuleModel("mlp", 1, 8, 10)
    assert model.num_params == 64 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10
    assert model.forward_flops == 2 * (64 * 200 + 200 * 200 + 200 * 10)
    assert model.activation_bytes == 4 * (64 + 4 * 200 + 10)
    assert model.prunable == ()


def test_features_are_what_the_last_layer_sees():
    """Features times the classifier's matrix, plus its bias, are the logits."""
    for kind, linear in (("mlp", "5"), ("lenet", "linear3"), ("resnet", "linear")):
        model = ModuleModel(kind, 1, 12, 4)
        params = model.init(torch.Generator().manual_seed(0), torch.float64)
        images = torch.randn(3, 1, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        answer = model.features(params, images) @ params[f"{linear}.weight"].T + params[f"{linear}.bias"]
        torch.testing.assert_close(answer, model.forward(params, images))


@pytest.mark.parametrize("kind", ["lenet", "resnet"])
@pytest.mark.parametrize("hook", ["activation", "convolution"])
def test_a_channel_with_zeros_is_silent(kind, hook):
    """Channel 1 of each prunable layer: no activity once its rows are zero, some before."""
    model = ModuleModel(kind, 1, 12, 4)
    params = model.init(torch.Generator().manual_seed(0))
    images = torch.randn(3, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    logits, before = model.activity(params, images, hook)
    assert torch.equal(logits, model.forward(params, images))
    for layer in model.prunable:
        for name in layer.tensors:
            params[name][1] = 0
    _, after = model.activity(params, images, hook)
    assert len(before) == len(after) == len(model.prunable) > 1
    assert all((activity[:, 1] == 0).all() for activity in after)
    assert all((activity[:, 1] != 0).any() for activity in before)
    assert all((activity[:, 0] != 0).any() for activity in after)


def test_options_are_the_factorys_keywords(outside):
    """hidden = 5: the second layer has five inputs; an unknown one is refused with those that there are."""
    params = checked_model(outside("plain", '{"hidden": 5}'), distils=True).init(torch.Generator())
    assert params["3.weight"].shape == (10, 5)
    with pytest.raises(BadInput, match=r"model.options = .*takes hidden, not depth"):
        checked_model(outside("plain", '{"depth": 5}'), distils=True)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("batch_norm", "its layer 1 is a BatchNorm2d: its statistics couple the samples.*GroupNorm"),
        ("dropout", r"its layer 1 is a Dropout with p = 0.5: a step must be a function of its values"),
        ("coupled", "differ by .* when it is alone: samples of a batch see each other"),
        ("other_each_time", "differ between two calls with the same seed"),
        ("eleven_logits", r"for 3 images it returns \(3, 11\), wanted are logits of shape \(3, 10\)"),
        ("too_small", r"on images of \(1, 8, 8\) it fails: RuntimeError"),
        ("no_module", "'str' object has no attribute 'eval'|it returned a str"),
        ("fails", r"KeyError: 'width' \(their_networks.py, line \d+\)"),
        ("empty", "has no parameters to train"),
        ("once", "a layer cannot be differentiated twice, which matching needs"),
        ("number", "is no factory but a int"),
        ("missing", "their_networks has no missing; it has .*plain"),
    ],
)
def test_what_cannot_serve_is_refused_in_one_line(outside, name, why):
    """One line, with the reason and the setting to change."""
    with pytest.raises(BadInput, match=why) as refused:
        checked_model(outside(name), distils=True)
    assert str(refused.value).startswith("model.")
    assert "\n" not in str(refused.value)


def test_layers_that_rest_or_are_not_asked_for_are_fine(outside):
    """Dropout with p = 0 does nothing; a network that is not differentiated twice need not be differentiable twice."""
    checked_model(outside("dropout", '{"p": 0.0}'), distils=True)
    checked_model(outside("once"), distils=False)


def test_torchvisions_networks_have_group_normalisation():
    """resnet18 has 20 normalisations, each by groups; a network that does not let one choose is refused."""
    from qdsim.models.module import _module_of

    layers = list(_module_of(ModuleModel("torchvision:resnet18", 3, 32, 10)).modules())
    assert sum(isinstance(layer, nn.GroupNorm) for layer in layers) == 20
    with pytest.raises(BadInput, match="BatchNorm2d"):
        checked_model(ModuleModel("torchvision:vgg11_bn", 3, 32, 10, '{"dropout": 0.0}'), distils=True)
    with pytest.raises(BadInput, match="torchvision has no such network"):
        checked_model(ModuleModel("torchvision:resnet17", 3, 32, 10), distils=True)


def test_a_residual_network_has_6n_plus_2_layers():
    """depth = 10 is refused; 14 has two blocks a stage."""
    with pytest.raises(BadInput, match=r"6n \+ 2 layers"):
        checked_model(ModuleModel("resnet", 3, 32, 10, '{"depth": 10}'), distils=True)
    assert len(ModuleModel("resnet", 3, 32, 10, '{"depth": 14}').prunable) == 6
