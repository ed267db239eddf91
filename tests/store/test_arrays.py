"""Arrays in files: whose they are, and that damage is named."""

import io

import numpy as np
import pytest

from qdsim.errors import BadInput
from qdsim.store import arrays
from qdsim.store.arrays import ArrayFile

FIX = "delete it"


@pytest.fixture
def file(tmp_path):
    """A file of run a."""
    written = ArrayFile(tmp_path / "a.npz", "run-a", "client 3")
    arrays.write(written, {"x": np.arange(3)})
    return written


def test_arrays_come_back_to_their_owner(file):
    """And to whoever does not ask whose they are."""
    for found in (arrays.read(file, FIX), arrays.load(file.path, FIX)):
        assert list(found) == ["x"]
        assert found["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("other", [{"owner": "run-b"}, {"content": "client 4"}])
@pytest.mark.parametrize("unnamed", [False, True])
def test_the_file_of_another_is_named(file, other, unnamed):
    """Another run's, another client's; also where files without an owner would be taken."""
    asked = file._replace(**other, unnamed=unnamed)
    with pytest.raises(BadInput, match=r"a\.npz.*is client 3 of run-a, not client \d of run-.; delete it"):
        arrays.read(asked, FIX)


def test_a_file_without_an_owner_is_taken_only_from_an_older_version(file):
    """As numpy writes it for that version."""
    np.savez(file.path, x=np.arange(3), **{arrays.NAMES: np.array(["x"])})
    assert arrays.read(file._replace(unnamed=True), FIX)["x"].tolist() == [0, 1, 2]
    with pytest.raises(BadInput, match="says nothing of whose it is, not client 3 of run-a"):
        arrays.read(file, FIX)


def with_header(text):
    """Return an npz whose array has this header."""
    import zipfile

    head = text.encode().ljust(117) + b"\n"
    member = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as packed:
        packed.writestr("x.npy", member)
    return whole.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK",
        with_header("{'descr': '<f8', 'fortran_order': False, 'shape': (4611686018427387,)}"),  # more than any memory
        with_header("{'descr': '<f8', 'fortran_order': False, 'shape': (3L"),  # a token that does not end
        with_header("(" * 100),
    ],
)
def test_damage_is_named_in_one_line(file, content):
    """Nothing, half a head, an array larger than memory, headers that do not parse: exit code 2."""
    file.path.write_bytes(content)
    with pytest.raises(BadInput, match=r"a\.npz.*cannot be read.*delete it") as caught:
        arrays.read(file, FIX)
    assert "\n" not in str(caught.value)
