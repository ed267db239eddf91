"""The gallery: a few synthetic images leave their clients, only where the user asks for them."""

import io

import numpy as np
import pytest
from PIL import Image

from qdsim.data.clients import normalize, to_bytes
from qdsim.data.datasets import Normalization
from qdsim.experiment import gallery
from tests.runs import run, table


def test_images_come_from_the_largest_owners_in_turn():
    """Class 0: client 1 has 3 and client 0 has 1, so client 1, client 0, client 1 again. Class 1: the only one."""
    counts = np.array([[1, 0], [3, 1]])
    assert gallery.picks(counts, 3) == [(1, 0, 0), (0, 0, 0), (1, 0, 1), (1, 1, 0)]


def test_equal_owners_go_by_their_number_and_a_class_that_nobody_has_gives_none():
    """Clients 0 and 1 own one image of class 0 each; class 1 is empty."""
    assert gallery.picks(np.array([[1, 0], [1, 0]]), 2) == [(0, 0, 0), (1, 0, 0)]


def test_bytes_survive_normalization():
    """Every byte comes back, and what lies out of range is clipped: (2 · 0.25 + 0.9) · 255 > 255."""
    import torch

    pixels = Normalization((0.9,), (0.25,))
    every = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    back = to_bytes(normalize(every, pixels, torch.float32), pixels)
    np.testing.assert_array_equal(back, every.numpy())
    assert to_bytes(torch.full((1, 1, 1, 1), 2.0), pixels).item() == 255
    assert to_bytes(torch.full((1, 1, 1, 1), -9.0), pixels).item() == 0


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    out = tmp_path_factory.mktemp("gallery")
    return table(run(out, requests=[{"kind": "class", "target": 3}], synthetic={"gallery": 2}), "images")


def decode(png):
    return np.asarray(Image.open(io.BytesIO(png)))


def test_each_class_has_its_images_beside_the_real_ones(shown):
    """Ten digits, two images each, 8 x 8 grey; matching has moved each of them, and not far."""
    assert shown.groupby("class").size().tolist() == [2] * 10
    for row in shown.itertuples():
        synthetic, real = decode(row.synthetic), decode(row.real)
        assert synthetic.shape == real.shape == (8, 8)
        assert 0 < np.abs(synthetic.astype(int) - real.astype(int)).mean() < 64


def test_without_matching_the_images_are_the_real_ones(tmp_path):
    """Nothing moved them: the bytes are equal."""
    made = run(tmp_path, requests=[{"kind": "class", "target": 3}], synthetic={"gallery": 1, "matching": False})
    for row in table(made, "images").itertuples():
        np.testing.assert_array_equal(decode(row.synthetic), decode(row.real))


def test_noise_began_as_no_real_image(tmp_path):
    """The column is null."""
    made = run(tmp_path, requests=[{"kind": "class", "target": 3}], synthetic={"gallery": 1, "init": "noise"})
    assert table(made, "images")["real"].isna().all()


def test_nothing_leaves_unasked(tmp_path):
    """By default the table is there and empty."""
    assert len(table(run(tmp_path, requests=[{"kind": "class", "target": 3}]), "images")) == 0


def test_a_reused_training_shows_the_same_images(tmp_path, shown):
    """The second run trains nothing; its images are those of the stored synthetic sets."""
    first = run(tmp_path, requests=[{"kind": "class", "target": 3}])
    assert not table(first, "rounds")["reused"].any()
    second = run(tmp_path, requests=[{"kind": "class", "target": 3}], synthetic={"gallery": 2})
    assert table(second, "rounds")["reused"].any()
    assert table(second, "images")["synthetic"].tolist() == shown["synthetic"].tolist()


@pytest.mark.ray
def test_actors_show_what_one_process_does(tmp_path, cluster_address, shown):
    """Bit for bit; and the steps' time is part of the wait."""
    made = run(
        tmp_path,
        engine="ray",
        address=cluster_address,
        requests=[{"kind": "class", "target": 3}],
        synthetic={"gallery": 2},
        cluster={"clients_per_actor": 5},
    )
    assert table(made, "images")["synthetic"].tolist() == shown["synthetic"].tolist()
    rounds = table(made, "rounds")
    assert (rounds["busy_s"] > 0).all()
    assert (rounds["busy_s"] <= rounds["wall_s"]).all()
    keys = ["method", "phase", "round"]
    steps = table(made, "clients").groupby(keys)["step_s"].sum()
    busy = rounds.set_index(keys)["busy_s"].loc[steps.index]
    assert (busy <= steps + 1e-9).all()  # two actors: no less than half of all, no more than all
    assert (busy >= steps / 2 - 1e-9).all()
