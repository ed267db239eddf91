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

    class Counting(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.register_buffer("scale", torch.tensor(2.0))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.linear = nn.Linear(inputs, outputs)

        def forward(self, x):
            self.calls += 1
            return self.scale * self.linear(x.flatten(1))

    def counting(*, channels, size, num_classes):
        return Counting(channels * size * size, num_classes)

    class Scaled(Counting):
        def forward(self, x):
            return self.scale * self.linear(x.flatten(1))

    def scaled(*, channels, size, num_classes):
        return Scaled(channels * size * size, num_classes)

    class Rests(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.classifier = nn.Linear(5, outputs)
            self.inner = nn.Linear(inputs, 5)
            self.never = nn.Linear(5, 7)

        def forward(self, x):
            return self.classifier(self.inner(x.flatten(1)).tanh())

    def rests(*, channels, size, num_classes):
        return Rests(channels * size * size, num_classes)

    def convolutions(*, channels, size, num_classes, tensors=("0.weight", "0.bias"), convolution="0", activation="1"):
        from qdsim.models.model import PrunableLayer

        layers = [nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.Conv2d(4, num_classes, size - 2), nn.Flatten()]
        found = nn.Sequential(*layers)
        found.prunable = (PrunableLayer(tuple(tensors), activation, convolution),)
        return found

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

    for found in (module._factory, module._module_of, module._constants_of, module._constants_on):
        found.cache_clear()


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


def test_features_are_of_the_last_layer_that_is_executed(outside):
    """Declared: classifier, inner, never; executed: inner, classifier, whose input has five numbers.

    A network of convolutions alone has none, and says so.
    """
    model = outside("rests")
    params = model.init(torch.Generator().manual_seed(0), torch.float64)
    images = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = model.features(params, images)
    inner = images.flatten(1) @ params["inner.weight"].T + params["inner.bias"]
    torch.testing.assert_close(found, inner.tanh())
    model = outside("convolutions")
    with pytest.raises(
        BadInput, match=r"it executes no torch\.nn\.Linear, so there are no features before a classifier"
    ):
        model.features(model.init(torch.Generator()), images.float())


def test_constants_are_copied_once(outside):
    """The buffer 2 doubles the logits, in the precision of the images; a second call has the very same tensors."""
    from qdsim.models import module

    model = checked_model(outside("scaled"), distils=True)
    for dtype in (torch.float32, torch.float64):
        params = model.init(torch.Generator().manual_seed(0), dtype)
        images = torch.ones(2, 1, 8, 8, dtype=dtype)
        plain = images.flatten(1) @ params["linear.weight"].T + params["linear.bias"]
        torch.testing.assert_close(model.forward(params, images), 2 * plain)
        held = module._constants_on(model, images.device, dtype)
        assert held["scale"].dtype == dtype
        assert held["calls"].dtype == torch.int64
        misses = module._constants_on.cache_info().misses
        assert torch.equal(model.forward(params, images), model.forward(params, images))
        assert module._constants_on.cache_info().misses == misses


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
        ("counting", "its buffer calls is changed by a call: a step must be a function of its values"),
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


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            '{"tensors": ["2.weight"]}',
            r"submodule 1 has 4 channels and its parameter 2.weight the shape \(10, 4, 6, 6\)",
        ),
        ('{"convolution": "2"}', r"submodule 2 has 10 channels and its parameter 0.weight the shape \(4, 1, 3, 3\)"),
        ('{"tensors": ["9.weight"]}', "its attribute prunable names 9.weight, which it does not have"),
        ('{"activation": "relu"}', "its attribute prunable names relu, which it does not have"),
        ('{"tensors": []}', "which names no tensors or no submodule"),
    ],
)
def test_prunable_channels_must_have_a_row_each(outside, options, why):
    """FU-MP sets row j of each tensor to zero to silence channel j, so there are as many rows as channels.

    In (0.weight, 0.bias) there are: four, and as many channels in the outputs of submodules 0 and 1.
    """
    checked_model(outside("convolutions"), distils=False)
    with pytest.raises(BadInput, match=why):
        checked_model(outside("convolutions", options), distils=False)


def test_a_prunable_layer_serves_the_hook_that_it_names(outside):
    """With its activation alone a layer serves fump.hook = "activation", and the other hook is refused by name."""
    model = checked_model(outside("convolutions", '{"convolution": ""}'), distils=False)
    params, images = model.init(torch.Generator().manual_seed(0)), torch.ones(2, 1, 8, 8)
    _, (activity,) = model.activity(params, images, "activation")
    expected = torch.nn.functional.conv2d(images, params["0.weight"], params["0.bias"]).relu().mean((2, 3))
    torch.testing.assert_close(activity, expected)
    with pytest.raises(BadInput, match=r"its attribute prunable names no convolution, which fump\.hook asks for"):
        model.activity(params, images, "convolution")


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
