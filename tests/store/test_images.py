"""Images are decoded as images: nothing in them is run, and none fills the memory."""

import io
import os
import struct
import zlib

import numpy as np
import pytest
from matplotlib.image import imread
from PIL import Image

from analysis.gallery import _decode
from qdsim.data import datasets
from qdsim.errors import BadInput, MissingData
from qdsim.store.images import FORMATS, decode_image

POSTSCRIPT = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 8 8
(run) print
showpage
"""


def encoded(kind="PNG", shape=(4, 4)):
    """Return noise in a format, and its pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue(), pixels


def png_of(width, height):
    """Return a PNG whose header claims so many pixels, and which has none."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", FORMATS)
def test_the_formats_of_image_folders_are_read(kind):
    """Grey pixels come back as they were; JPEG's and WEBP's with a loss, in the same shape."""
    data, pixels = encoded(kind)
    found = np.asarray(decode_image(data).convert("L"))
    assert found.shape == pixels.shape
    if kind not in ("JPEG", "WEBP"):
        assert np.array_equal(found, pixels)


def image_folder(folder, content):
    """Write a data set of two classes; ``content`` is the first training image."""
    for split in ("train", "test"):
        for name in ("a", "b"):
            (folder / split / name).mkdir(parents=True)
            (folder / split / name / "0.png").write_bytes(encoded()[0])
    (folder / "train" / "a" / "0.png").write_bytes(content)


def test_postscript_under_the_name_of_a_picture_is_not_opened(tmp_path):
    """Pillow would hand it to Ghostscript, which runs it; the line says what it is not."""
    image_folder(tmp_path, POSTSCRIPT)
    with pytest.raises(MissingData, match=r"train/a/0\.png cannot be decoded \(it is none of PNG, JPEG"):
        datasets.load(f"folder:{tmp_path}", "")


@pytest.mark.parametrize("size", [(60_000, 60_000), (9_000, 9_000), (1, 2**30)])
def test_a_picture_of_too_many_pixels_is_refused(tmp_path, size):
    """3.6 billion pixels, 81 million, which Pillow takes without a word, and a single column: exit code 2."""
    image_folder(tmp_path, png_of(*size))
    with pytest.raises(BadInput, match="pixels"):
        datasets.load(f"folder:{tmp_path}", "")
    with pytest.raises(ValueError, match="pixels"):
        _decode(png_of(*size))


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", encoded()[0][:60], b"not an image"])
def test_a_damaged_picture_gets_one_line(tmp_path, content):
    """Empty, a head without a body, half a file, text."""
    image_folder(tmp_path, content)
    with pytest.raises(MissingData, match="cannot be decoded") as caught:
        datasets.load(f"folder:{tmp_path}", "")
    assert "\n" not in str(caught.value)


def test_a_pipe_is_not_waited_for(tmp_path):
    """Nobody would ever write into it."""
    image_folder(tmp_path, b"")
    (tmp_path / "train" / "a" / "0.png").unlink()
    os.mkfifo(tmp_path / "train" / "a" / "0.png")
    with pytest.raises(MissingData, match="is not a regular file"):
        datasets.load(f"folder:{tmp_path}", "")


@pytest.mark.parametrize("shape", [(5, 5), (5, 5, 3)])
def test_the_gallery_sees_what_matplotlib_sees(shape):
    """Fractions of grey or of three colours, to the last bit."""
    data, _ = encoded(shape=shape)
    assert np.array_equal(_decode(data), imread(io.BytesIO(data), format="png"))
