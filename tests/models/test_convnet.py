"""The ConvNet has the paper's size, and no sample sees another."""

import pytest
import torch

from qdsim.models.convnet import ConvNet


@pytest.mark.parametrize(
    ("channels", "size", "width", "depth", "expected"),
    [(3, 32, 128, 3, 320_010), (1, 28, 128, 3, 317_706), (1, 8, 32, 2, 320 + 64 + 9_248 + 64 + 1_290)],
)
def test_number_of_parameters(channels, size, width, depth, expected):
    """The paper's two, and by hand for 8x8: 32·9+32, 64, 32·32·9+32, 64, 10·(32·2·2)+10."""
    model = ConvNet(channels, size, 10, width, depth)
    params = model.init(torch.Generator().manual_seed(0))
    assert sum(tensor.numel() for tensor in params.values()) == model.num_params == expected
    images = torch.zeros(2, channels, size, size)
    assert model.forward(params, images).shape == (2, 10)


def test_28_pixels_behave_like_32():
    """Padding 3 makes 28x28 into 32x32 maps, so 4x4 are left after three poolings."""
    assert ConvNet(1, 28, 10).feature_size == ConvNet(3, 32, 10).feature_size == 4


def test_initial_weights_are_within_torchs_own_bounds():
    """±1/sqrt(fan_in): 1/sqrt(9·3) for the first convolution, and nearly reached; γ = 1, β = 0."""
    params = ConvNet(3, 32, 10).init(torch.Generator().manual_seed(0))
    bound = 27**-0.5
    assert 0.95 * bound < params["conv0.weight"].abs().max() <= bound
    assert (params["norm0.weight"] == 1).all()
    assert (params["norm0.bias"] == 0).all()


def test_forward_agrees_with_torch_modules():
    """The same weights in torch's own layers give the same logits."""
    model = ConvNet(3, 32, 10, width=8, depth=3)
    params = model.init(torch.Generator().manual_seed(1))
    layers: list[torch.nn.Module] = []
    for block in range(3):
        conv = torch.nn.Conv2d(3 if block == 0 else 8, 8, 3, padding=1)
        norm = torch.nn.GroupNorm(8, 8)
        conv.load_state_dict({k: params[f"conv{block}.{k}"] for k in ("weight", "bias")})
        norm.load_state_dict({k: params[f"norm{block}.{k}"] for k in ("weight", "bias")})
        layers += [conv, norm, torch.nn.ReLU(), torch.nn.AvgPool2d(2)]
    linear = torch.nn.Linear(8 * 16, 10)
    linear.load_state_dict({k: params[f"linear.{k}"] for k in ("weight", "bias")})
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    expected = torch.nn.Sequential(*layers, torch.nn.Flatten(), linear)(images)
    torch.testing.assert_close(model.forward(params, images), expected)


def test_samples_do_not_see_each_other():
    """Instance normalisation: a sample's logits are the same alone and in a batch."""
    model = ConvNet(1, 8, 3, width=4, depth=2)
    params = model.init(torch.Generator().manual_seed(0), torch.float64)
    images = torch.randn(5, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    together = model.forward(params, images)
    alone = torch.cat([model.forward(params, image[None]) for image in images])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
