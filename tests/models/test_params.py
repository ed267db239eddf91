"""Arithmetic on parameters."""

import numpy as np
import pytest
import torch

from qdsim.models import params as P


def test_weighted_mean_of_deltas():
    """θ = 1; Δ = 4 with weight 1 and Δ = 8 with weight 3: 1 + (4 + 24) / 4 = 8."""
    theta = {"w": torch.tensor([1.0])}
    deltas = [(1, {"w": torch.tensor([4.0])}), (3, {"w": torch.tensor([8.0])})]
    assert P.add_weighted_mean(theta, deltas)["w"].item() == 8.0
    assert theta["w"].item() == 1.0


def test_the_mean_of_nothing_is_an_error():
    """No client, no mean."""
    with pytest.raises(ValueError, match="no updates"):
        P.add_weighted_mean({"w": torch.zeros(1)}, [])


def test_step_in_place():
    """3 - 0.5·4 = 1."""
    theta = {"w": torch.tensor([3.0])}
    P.step_(theta, {"w": torch.tensor([4.0])}, -0.5)
    assert theta["w"].item() == 1.0


def test_hash_sees_every_bit_and_every_name():
    """One bit, another shape, another name: another hash; a copy has the same."""
    theta = {"w": torch.tensor([1.0, 2.0])}
    same = P.sha256(theta)
    assert P.sha256(P.clone(theta)) == same
    nudged = {"w": torch.nextafter(theta["w"], torch.tensor([2.0, 2.0]))}
    others = [nudged, {"w": theta["w"][None]}, {"v": theta["w"]}, {"w": theta["w"].double()}]
    assert same not in {P.sha256(other) for other in others}


def test_numpy_there_and_back_from_read_only_memory():
    """Ray hands out read-only arrays; tensors made of them are writable and their own."""
    arrays = P.to_numpy({"w": torch.tensor([1.0, 2.0])})
    arrays["w"].setflags(write=False)
    back = P.from_numpy(arrays)
    back["w"] += 1
    assert back["w"].tolist() == [2.0, 3.0]
    assert np.array_equal(arrays["w"], [1.0, 2.0])


def test_sizes_and_finiteness():
    """Six float32 numbers take 24 bytes; one NaN is found."""
    theta = {"w": torch.zeros(2, 2), "b": torch.zeros(2)}
    assert P.size_bytes(theta) == 24
    assert P.is_finite(theta)
    theta["b"][1] = float("nan")
    assert not P.is_finite(theta)


@pytest.mark.parametrize(
    "made",
    [
        {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7.0), "c": torch.zeros(0), "d": torch.ones(1, 2, 1)},
        {"sums": torch.ones(2, dtype=torch.float64), "counts": torch.tensor([3])},
        {},
    ],
    ids=["one type", "two types", "nothing"],
)
def test_what_is_packed_for_a_message_comes_out_as_it_was(made):
    """Names in order, shapes, types and bits; and the tensors may be written to, though Ray's arrays may not."""
    packed = P.pack(made)
    if isinstance(packed.numbers, np.ndarray):
        packed.numbers.setflags(write=False)
    found = P.unpack(packed)
    assert list(found) == list(made)
    for name, tensor in made.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        found[name] += 1
