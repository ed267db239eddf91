"""Random numbers depend on names, and on nothing else."""

import torch

from qdsim import seeds

NAMES = {"request": "class:9", "phase": "train", "round_number": 3, "client_id": 5}


def stream(run_seed=0, purpose="batches", **changes):
    return torch.rand(4, generator=seeds.generator(run_seed, purpose, **{**NAMES, **changes})).tolist()


def test_the_same_names_give_the_same_stream():
    """Nothing outside the names enters: the global generator may be anywhere."""
    first = stream()
    torch.manual_seed(99)
    torch.rand(7)
    assert stream() == first


def test_each_name_alone_changes_the_stream():
    """Run seed, purpose, request, phase, round and client each matter."""
    others = [
        stream(run_seed=1),
        stream(purpose="init"),
        stream(request="class:8"),
        stream(phase="recover"),
        stream(round_number=4),
        stream(client_id=6),
    ]
    assert len({tuple(values) for values in [stream(), *others]}) == 7


def test_names_do_not_run_into_each_other():
    """(request 'a', phase 'b') is not (request 'ab', phase '')."""
    assert seeds.seed_of(0, "x", request="a", phase="b") != seeds.seed_of(0, "x", request="ab", phase="")


def test_pinned_values_hold_across_versions():
    """Pinned from the first version: results of the same job stay comparable.

    The first 8 bytes of sha256("(0, 'init', '', 'train', 0, -1)"), shifted right by one bit.
    """
    assert seeds.seed_of(0, "init", phase="train") == 9201370646290094967
