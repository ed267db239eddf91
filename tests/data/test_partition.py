"""Splits are complete, disjoint and the same for the same seed; the official one is the paper's own."""

import numpy as np
import pytest

from qdsim.data import partition
from qdsim.errors import BadInput
from qdsim.store import arrays

CIFAR_LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5000))


def split(labels=CIFAR_LABELS, **changes):
    settings = {"kind": "dirichlet", "clients": 10, "alpha": 0.1, "seed": 0, "min_size": 10, **changes}
    return partition.split(labels, 10, **settings)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "official"])
@pytest.mark.parametrize("seed", range(5))
def test_every_sample_has_one_owner(kind, seed):
    """The shards are disjoint, together they are everything, and the counts are theirs."""
    found = split(kind=kind, seed=seed, min_size=1)
    assert sorted(np.concatenate(found.indices)) == list(range(50_000))
    for rows, counts in zip(found.indices, found.counts, strict=True):
        assert (np.bincount(CIFAR_LABELS[rows], minlength=10) == counts).all()


def test_the_official_split_of_ten_clients():
    """Golden sizes from the paper's code: CIFAR-10, seed 42, α = 0.1."""
    found = split(kind="official", seed=42)
    assert found.counts.sum(1).tolist() == [1774, 3337, 3794, 350, 2678, 13855, 7855, 8293, 4063, 4001]
    assert found.counts[:, 9].tolist() == [12, 0, 2456, 0, 285, 2116, 83, 0, 47, 1]
    assert found.synthetic_counts(100).sum() == 539


def test_the_official_split_of_twenty_clients():
    """Golden sizes from the paper's code: client 19 holds 2,948 of the 5,000 images of class 9."""
    found = split(kind="official", seed=42, clients=20)
    sizes = "2384,171,1262,209,3127,4353,4043,1646,619,5719,954,740,2244,838,308,3800,1659,5206,5378,5340"
    assert found.counts.sum(1).tolist() == [int(n) for n in sizes.split(",")]
    assert (found.counts[:, 9] > 0).sum() == 9
    assert found.counts[19, 9] == 2948
    assert found.synthetic_counts(100).sum() == 578


def test_synthetic_counts_round_up_and_stay_zero_where_a_class_is_absent():
    """ceil(n / s): 0, 1, 1, 1 and 2 for 0, 1, 99, 100 and 101 samples at s = 100."""
    found = partition.Partition((), np.array([[0, 1, 99, 100, 101]]))
    assert found.synthetic_counts(100).tolist() == [[0, 1, 1, 1, 2]]


def test_iid_shards_are_alike():
    """50,000 over 7 clients: sizes differ by one at most, and so does each class."""
    found = split(kind="iid", clients=7)
    assert np.ptp(found.counts.sum(1)) <= 1
    assert (np.ptp(found.counts, axis=0) <= 1).all()


def test_smaller_alpha_is_more_uneven():
    """The largest class share of a client falls as α grows."""
    top = [
        float(np.mean(found.counts.max(1) / found.counts.sum(1)))
        for found in (split(alpha=alpha, min_size=0 if alpha < 1 else 10) for alpha in (0.1, 1.0, 100.0))
    ]
    assert top[0] > 0.4 > top[1] > 0.15 > top[2]


def test_the_same_seed_gives_the_same_split():
    """Two draws agree in every index, another seed's does not."""
    assert split(seed=3).sha256 == split(seed=3).sha256 != split(seed=4).sha256


def test_small_clients_are_drawn_again():
    """With a minimum of 300 the split differs from the first draw, and holds."""
    assert split(min_size=300).counts.sum(1).min() >= 300


def test_an_impossible_minimum_is_refused_with_the_best_size_reached():
    """10 clients of 5,000 need perfect balance, which Dir(0.1) never gives."""
    with pytest.raises(BadInput, match=r"reached \d+ samples in 1000 draws"):
        split(labels=np.repeat(np.arange(10), 20), min_size=20, alpha=0.01)
    with pytest.raises(BadInput, match="200 samples allow at most 100 clients of 2"):
        split(labels=np.repeat(np.arange(10), 20), min_size=2, clients=101)


def test_a_split_is_saved_as_it_is(tmp_path):
    """What is read back are the same indices."""
    found = split(kind="official", seed=42)
    arrays.write(arrays.ArrayFile(tmp_path / "seed-0.npz", "run", "a partition"), found.to_arrays())
    with np.load(tmp_path / "seed-0.npz") as saved:
        assert all((saved[f"client_{i}"] == rows).all() for i, rows in enumerate(found.indices))
