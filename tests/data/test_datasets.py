"""Data sets are bytes, whatever they lie as; what is missing or damaged is named with its remedy."""

import io
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from qdsim.data import datasets
from qdsim.data.clients import normalize
from qdsim.errors import BadInput, MissingData


def encoded(seed: int, *, mode: str = "RGB", size: int = 6) -> tuple[bytes, np.ndarray]:
    """Return a random image as PNG bytes, and its pixels (c, h, w)."""
    shape = (size, size) if mode == "L" else (size, size, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue(), pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


def write_parquet(folder: Path, name: str, seeds: list[int], labels: list[int], **image: object) -> np.ndarray:
    folder.mkdir(exist_ok=True)
    images = [encoded(seed, **image) for seed in seeds]
    column = [{"bytes": raw, "path": None} for raw, _ in images]
    pq.write_table(pa.table({"img": column, "label": labels}), folder / name)
    return np.stack([pixels for _, pixels in images])


def test_digits_need_no_files(tmp_path):
    """1,797 images of 8x8: 1,437 to train and 360 to test, every class in both."""
    digits = datasets.load("digits", str(tmp_path))
    assert digits.train_images.shape == (1437, 1, 8, 8)
    assert digits.test_images.shape == (360, 1, 8, 8)
    assert digits.train_images.dtype == np.uint8
    assert digits.train_images.max() == 255
    assert set(digits.train_labels) == set(digits.test_labels) == set(range(10))


def test_statistics_are_exact_and_normalise():
    """Two pixels, 0 and 255: mean 0.5, deviation 0.5, so they become -1 and +1."""
    images = np.array([[[[0]]], [[[255]]]], dtype=np.uint8)
    pixels = datasets._pixel_statistics(images)
    assert (pixels.mean, pixels.std) == ((0.5,), (0.5,))
    assert normalize(torch.from_numpy(images), pixels, torch.float32).flatten().tolist() == [-1.0, 1.0]


def test_parquet_in_the_layout_of_hugging_face(tmp_path):
    """Parts are read in the order of their names; pixels and labels come back as they were written."""
    first = write_parquet(tmp_path / "d", "train-00000-of-00002.parquet", [1, 2], [0, 1])
    second = write_parquet(tmp_path / "d", "train-00001-of-00002.parquet", [3], [2])
    test = write_parquet(tmp_path / "d", "test-00000-of-00001.parquet", [4], [1])
    found = datasets.load(f"parquet:{tmp_path / 'd'}", "unused")
    assert (found.train_images == np.concatenate([first, second])).all()
    assert (found.test_images == test).all()
    assert found.train_labels.tolist() == [0, 1, 2]
    assert found.num_classes == 3


def test_grey_images_have_one_channel_and_can_be_resized(tmp_path):
    """6x6 grey images become (1, 4, 4) with data.size = 4."""
    write_parquet(tmp_path / "d", "train-0.parquet", [1, 2], [0, 1], mode="L")
    write_parquet(tmp_path / "d", "test-0.parquet", [3], [0], mode="L")
    assert datasets.load(f"parquet:{tmp_path / 'd'}", "").train_images.shape == (2, 1, 6, 6)
    assert datasets.load(f"parquet:{tmp_path / 'd'}", "", size=4).train_images.shape == (2, 1, 4, 4)


def test_folders_of_images(tmp_path):
    """train/ and test/ with a folder for each class, numbered in alphabetical order."""
    for split, count in (("train", 2), ("test", 1)):
        for label, name in enumerate(("cat", "dog")):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                (folder / f"{i}.png").write_bytes(encoded(10 * label + i)[0])
    found = datasets.load(f"folder:{tmp_path}", "")
    assert found.train_labels.tolist() == [0, 0, 1, 1]
    assert (found.train_images[2] == encoded(10)[1]).all()
    (tmp_path / "test" / "emu").mkdir()
    (tmp_path / "test" / "emu" / "0.png").write_bytes(encoded(0)[0])
    with pytest.raises(BadInput, match=r"differ in the classes \['emu'\]"):
        datasets.load(f"folder:{tmp_path}", "")


def write_svhn(root: Path) -> np.ndarray:
    """Write tiny files in SVHN's format: X (32, 32, 3, n), the digit 0 stored as 10."""
    images = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 3), dtype=np.uint8)
    for split in ("train", "extra", "test"):
        savemat(root / f"{split}_32x32.mat", {"X": images, "y": np.array([[1], [10], [9]])})
    return images


def test_svhn_files_with_other_checksums_are_refused_unless_told_otherwise(tmp_path):
    """data.verify = false admits them, and the note says that they are not SVHN's."""
    images = write_svhn(tmp_path)
    with pytest.raises(MissingData, match=r"train_32x32\.mat does not have SVHN's checksum.*data\.verify=false"):
        datasets.load("svhn", str(tmp_path))
    found = datasets.load("svhn", str(tmp_path), verify=False)
    assert found.train_labels.tolist() == [1, 0, 9]
    assert (found.train_images[1] == images[:, :, :, 1].transpose(2, 0, 1)).all()
    assert found.note.startswith("not SVHN's own data: train_32x32.mat, test_32x32.mat")
    assert len(datasets.load("svhn+extra", str(tmp_path), verify=False).train_labels) == 6


def test_missing_data_name_file_place_and_remedy(tmp_path):
    """One line each: which file, where it was looked for, what fetches it."""
    files = {"mnist": "train-images-idx3-ubyte", "cifar10": "CIFAR10", "svhn": "train_32x32.mat"}
    for dataset, file in files.items():
        with pytest.raises(MissingData) as caught:
            datasets.load(dataset, str(tmp_path))
        text = str(caught.value)
        assert file in text
        assert str(tmp_path) in text
        assert "--set data.download=true" in text
        assert "\n" not in text
        with pytest.raises(MissingData, match=re.escape(text)):
            datasets.check_there(dataset, str(tmp_path))
        datasets.check_there(dataset, str(tmp_path), download=True)
    with pytest.raises(MissingData, match=r"no train-\*\.parquet"):
        datasets.load(f"parquet:{tmp_path}", "")
    with pytest.raises(BadInput, match="allowed: digits, mnist"):
        datasets.load("imagenet", str(tmp_path))


def test_damaged_files_are_named(tmp_path):
    """A truncated Parquet part, an image that is none, a .mat of rubbish, a label below zero."""
    folder = tmp_path / "d"
    write_parquet(folder, "train-0.parquet", [1], [0])
    write_parquet(folder, "test-0.parquet", [1], [0])
    whole = (folder / "train-0.parquet").read_bytes()
    (folder / "train-0.parquet").write_bytes(whole[:-20])
    with pytest.raises(MissingData, match=r"train-0\.parquet is damaged"):
        datasets.load(f"parquet:{folder}", "")
    pq.write_table(pa.table({"img": [{"bytes": b"no image"}], "label": [0]}), folder / "train-0.parquet")
    with pytest.raises(MissingData, match="image 0 cannot be decoded"):
        datasets.load(f"parquet:{folder}", "")
    for label in ("cat", 0.5):
        write_parquet(folder, "train-0.parquet", [1], [label])
        with pytest.raises(MissingData, match=r"train-0\.parquet has columns img: struct.*needed: .*integer label"):
            datasets.load(f"parquet:{folder}", "")
    write_parquet(folder, "train-0.parquet", [1], [-1])
    with pytest.raises(BadInput, match="a training label is -1"):
        datasets.load(f"parquet:{folder}", "")
    for split in ("train", "test"):
        (tmp_path / f"{split}_32x32.mat").write_bytes(b"rubbish")
    with pytest.raises(MissingData, match=r"train_32x32\.mat is damaged"):
        datasets.load("svhn", str(tmp_path), verify=False)


@pytest.mark.parametrize("content", [b"", b"rubbish" * 9, b"\0\0\x08\x03" + (2).to_bytes(4, "big") * 3 + b"1234567"])
def test_a_damaged_idx_file_is_named(tmp_path, content):
    """Empty, no idx at all, or a header that promises 2x2x2 = 8 pixels where 7 are."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    (raw / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(MissingData, match=rf"train-images-idx3-ubyte is damaged: {len(content)} bytes"):
        datasets.load("mnist", str(tmp_path))


def test_images_of_several_sizes_ask_for_one(tmp_path):
    """The message names both sizes and the setting."""
    folder = tmp_path / "d"
    folder.mkdir()
    column = [{"bytes": encoded(1, size=s)[0]} for s in (6, 7)]
    for split in ("train", "test"):
        pq.write_table(pa.table({"image": column, "label": [0, 1]}), folder / f"{split}-0.parquet")
    with pytest.raises(BadInput, match=r"image 1 is \(7, 7\) pixels, the first one \(6, 6\); set data.size"):
        datasets.load(f"parquet:{folder}", "")
    assert datasets.load(f"parquet:{folder}", "", size=6).train_images.shape == (2, 3, 6, 6)


def test_real_mnist(real_data_root):
    """60,000 + 10,000 images of 28x28; mean 0.1307 and deviation 0.3081 as everybody quotes them."""
    mnist = datasets.load("mnist", real_data_root)
    assert mnist.train_images.shape == (60000, 1, 28, 28)
    assert mnist.test_images.shape == (10000, 1, 28, 28)
    assert mnist.normalization.mean[0] == pytest.approx(0.1307, abs=1e-4)
    assert mnist.normalization.std[0] == pytest.approx(0.3081, abs=1e-4)


@pytest.mark.slow
def test_real_cifar10_as_parquet(real_data_root):
    """50,000 + 10,000 colour images, 5,000 and 1,000 of each class."""
    cifar = datasets.load("cifar10", real_data_root)
    assert cifar.train_images.shape == (50000, 3, 32, 32)
    assert (np.bincount(cifar.train_labels) == 5000).all()
    assert (np.bincount(cifar.test_labels) == 1000).all()


@pytest.mark.parametrize("made", [(6, 8, 8), (6, 1, 8, 8), (6, 8, 8, 3)])
def test_images_lie_in_memory_as_in_a_new_array(made):
    """Grey ones with a new axis, plain ones, and colours moved to the front: strides c·64, 64, 8, 1 in all."""
    raw = np.arange(np.prod(made), dtype=np.uint8).reshape(made)
    colours = raw.ndim == 4 and made[3] == 3
    images = raw.transpose(0, 3, 1, 2) if colours else raw.reshape(6, 8, 8)[:, None] if raw.ndim == 3 else raw
    found = datasets._in_plain_order(images)
    channels = images.shape[1]
    assert found.strides == (64 * channels, 64, 8, 1)
    assert (found == images).all()


def test_names_of_classes(tmp_path):
    """Folders have their classes' names, Hugging Face's files their own, and some sets are known to everybody."""
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "f" / split / name).mkdir(parents=True)
            (tmp_path / "f" / split / name / "1.png").write_bytes(encoded(1)[0])
    assert datasets.load(f"folder:{tmp_path / 'f'}", "unused").class_names == ("cat", "dog")
    names = {"info": {"features": {"label": {"names": ["ant", "bee"], "_type": "ClassLabel"}}}}
    for metadata, expected in ((json.dumps(names), ("ant", "bee")), ('{"info": 3}', ()), ("[", ())):
        for split in ("train", "test"):
            write_parquet(tmp_path / "p", f"{split}-0.parquet", [1, 2], [0, 1])
            table = pq.read_table(tmp_path / "p" / f"{split}-0.parquet")
            pq.write_table(
                table.replace_schema_metadata({"huggingface": metadata}), tmp_path / "p" / f"{split}-0.parquet"
            )
        assert datasets.load(f"parquet:{tmp_path / 'p'}", "unused").class_names == expected
    assert datasets.load("digits", "").class_names[9] == "9"
    assert {name: len(names) for name, names in datasets.CLASS_NAMES.items()} == {
        name: datasets.SHAPES[name][4] if name in datasets.SHAPES else 10 for name in datasets.CLASS_NAMES
    }


@pytest.mark.parametrize(("kind", "lacks"), [("folder", "no folder train"), ("parquet", "no train-*.parquet")])
def test_a_folder_that_is_not_there_is_blamed_on_the_name_that_has_it(tmp_path, kind, lacks):
    """``data.root`` has nothing to do with it; it is told before anything is read, and survives pickling."""
    there = f"{kind}:{tmp_path / 'nowhere'}"
    with pytest.raises(MissingData) as refused:
        datasets.check_there(there, "unused")
    assert str(pickle.loads(pickle.dumps(refused.value))).startswith(f"data.dataset = '{there}': {lacks} in ")
