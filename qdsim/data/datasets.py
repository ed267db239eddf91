"""Data sets as uint8 arrays: read once, kept as bytes, normalised batch by batch on the device.

``load`` is the entry; ``check_there`` says at once what it would miss. The libraries that read a format (torchvision,
scikit-learn, pyarrow, Pillow) are imported where they are used: a client actor needs none of them.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qdsim import plugins
from qdsim.errors import BadInput, MissingData
from qdsim.store.images import decode_image

DIGITS_TEST_SHARE = 0.2
CLASS_NAMES = {
    **dict.fromkeys(("digits", "mnist", "svhn", "svhn+extra"), tuple("0123456789")),
    "fashion_mnist": (
        *("t-shirt", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "boot"),
    ),
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}
"""Of data sets that everybody knows; others bring theirs along."""
MOST_CLASSES = 100_000
"""A larger label is no class: tables and counts have a row for each."""
IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
SVHN_SPLITS = {"svhn": ("train",), "svhn+extra": ("train", "extra")}
CIFAR_FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
"""Of torchvision's files."""


@dataclass(frozen=True)
class Normalization:
    """What a batch of bytes needs to become a batch of normalised floats."""

    mean: tuple[float, ...]
    """Per channel, of pixels scaled to [0, 1]."""
    std: tuple[float, ...]


@dataclass(frozen=True)
class Dataset:
    """Training and test images; all arrays are read-only to everybody."""

    name: str
    train_images: np.ndarray
    """uint8 (n, c, h, w)."""
    train_labels: np.ndarray
    """int64 (n,)."""
    test_images: np.ndarray
    test_labels: np.ndarray
    num_classes: int
    normalization: Normalization
    note: str = ""
    """Said in the manifest and under each result, for example that a checksum did not match."""
    class_names: tuple[str, ...] = ()
    """By which requests may name the classes, in their order; empty where they have numbers only."""

    def sha256(self) -> str:
        """Hash of every image and label: what trained states are stored under depends on it."""
        digest = hashlib.sha256()
        for array in (self.train_images, self.train_labels, self.test_images, self.test_labels):
            digest.update(f"{array.shape}{array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return what the manifest says of the data."""
        return {
            "name": self.name,
            "train": len(self.train_labels),
            "test": len(self.test_labels),
            "classes": self.num_classes,
            "image": list(self.train_images.shape[1:]),
            "mean": self.normalization.mean,
            "std": self.normalization.std,
            "note": self.note,
        }


SHAPES = {
    "mnist": (60_000, 10_000, 1, 28, 10),
    "fashion_mnist": (60_000, 10_000, 1, 28, 10),
    "cifar10": (50_000, 10_000, 3, 32, 10),
    "cifar100": (50_000, 10_000, 3, 32, 100),
    "svhn": (73_257, 26_032, 3, 32, 10),
    "svhn+extra": (604_388, 26_032, 3, 32, 10),
}
"""Training and test images, channels, pixels and classes of data sets that everybody has in the same form."""


def stand_in(dataset: str) -> Dataset:
    """Return black images in the shape of a known data set, classes of equal size: enough to plan with."""
    train, test, channels, size, classes = SHAPES[dataset]
    images = [np.broadcast_to(np.uint8(0), (count, channels, size, size)) for count in (train, test)]
    labels = [np.arange(count) % classes for count in (train, test)]
    normalization = Normalization((0.5,) * channels, (0.25,) * channels)
    note = f"{dataset} is not here: planned with classes of equal size"
    names = CLASS_NAMES.get(dataset, ())
    return Dataset(dataset, images[0], labels[0], images[1], labels[1], classes, normalization, note, names)


KINDS = ("digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "svhn", "svhn+extra", "parquet", "folder")
OF_FOLDERS = ("parquet", "folder")


OUTSIDE = "outside"
"""The kind of a data set that a function of somebody else reads."""


def _named(dataset: str) -> tuple[str, Path]:
    """Return the kind of a data set, and the folder where its name has one."""
    kind, _, folder = dataset.partition(":")
    if kind not in KINDS and plugins.reference_of("data set", dataset):
        return OUTSIDE, Path()
    if kind not in KINDS or (kind in OF_FOLDERS) != bool(folder):
        names = [*(f"{k}:DIR" if k in OF_FOLDERS else k for k in KINDS), *plugins.declared("data set")]
        raise BadInput("data.dataset", dataset, f"allowed: {', '.join(names)}, package.module:reader")
    return kind, Path(folder)


def is_outside(dataset: str) -> bool:
    """Tell whether a function outside qdsim reads a data set."""
    return dataset.partition(":")[0] not in KINDS


@contextmanager
def _blamed_on(dataset: str) -> Iterator[None]:
    """Have what is missing of ``folder:DIR`` or ``parquet:DIR`` blamed on that name, and not on ``data.root``."""
    try:
        yield
    except MissingData as error:
        if dataset.partition(":")[0] not in OF_FOLDERS:
            raise
        raise MissingData(f"{error.file} in {error.looked_in}", dataset, error.fix, "data.dataset") from None


def check_there(dataset: str, root: str, *, download: bool = False) -> None:
    """Refuse a data set whose files are not there, before anything is imported that could read them."""
    with _blamed_on(dataset):
        _check_files(dataset, root, download)


def _check_files(dataset: str, root: str, download: bool) -> None:
    kind, folder = _named(dataset)
    place = Path(root)
    if kind in ("cifar10", "cifar100") and list((place / kind).glob("*.parquet")):
        kind, folder = "parquet", place / kind
    if kind == "parquet":
        for split in ("train", "test"):
            if not list(folder.glob(f"{split}-*.parquet")):
                fix = "needed are train-*.parquet and test-*.parquet"
                raise MissingData(f"no {split}-*.parquet", str(folder), fix)
    if kind == "folder":
        for split in ("train", "test"):
            if not (folder / split).is_dir():
                fix = "needed are train/CLASS/ and test/CLASS/ with images"
                raise MissingData(f"no folder {split}", str(folder), fix)
    if download:
        return
    if kind in ("mnist", "fashion_mnist"):
        _check_idx_files("MNIST" if kind == "mnist" else "FashionMNIST", place)
    if kind in ("cifar10", "cifar100") and not (place / CIFAR_FOLDERS[kind]).exists():
        raise _no_cifar(kind, place, "is not there")
    for split in (*SVHN_SPLITS[kind], "test") if kind in SVHN_SPLITS else ():
        file = f"{split}_32x32.mat"
        if not _mat_path(file, place).exists():
            raise MissingData(f"{file} of SVHN is not there", f"{place} and {place / 'svhn'}", _fetch_command("SVHN"))


def load(dataset: str, root: str, *, verify: bool = True, download: bool = False, size: int | None = None) -> Dataset:
    """Read a data set by the name that ``data.dataset`` gives it."""
    check_there(dataset, root, download=download)
    kind, folder = _named(dataset)
    readers: dict[str, Callable[[], _Parts]] = {
        "digits": _digits,
        "mnist": lambda: _mnist("MNIST", Path(root), download),
        "fashion_mnist": lambda: _mnist("FashionMNIST", Path(root), download),
        "cifar10": lambda: _cifar(kind, Path(root), download),
        "cifar100": lambda: _cifar(kind, Path(root), download),
        "svhn": lambda: _svhn(dataset, Path(root), verify, download),
        "svhn+extra": lambda: _svhn(dataset, Path(root), verify, download),
        "parquet": lambda: _parquet(folder, size),
        "folder": lambda: _folder(folder, size),
        OUTSIDE: lambda: _outside(dataset, Path(root)),
    }
    with _blamed_on(dataset):
        return _assemble(dataset, readers[kind]())


@dataclass
class _Parts:
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    num_classes: int | None = None
    note: str = ""
    class_names: tuple[str, ...] = ()


def _assemble(name: str, parts: _Parts) -> Dataset:
    images, labels = parts.train_images, parts.train_labels.astype(np.int64)
    test_labels = parts.test_labels.astype(np.int64)
    if len(labels) == 0 or len(test_labels) == 0:
        raise BadInput("data.dataset", name, f"{len(labels)} training and {len(test_labels)} test images")
    if images.shape[1:] != parts.test_images.shape[1:]:
        raise BadInput(
            "data.dataset", name, f"training images are {images.shape[1:]}, test images {parts.test_images.shape[1:]}"
        )
    if images.shape[2] != images.shape[3]:
        raise BadInput("data.dataset", name, f"images are {images.shape[2:]} pixels; set data.size for squares")
    classes = parts.num_classes or int(max(labels.max(), test_labels.max())) + 1
    if classes > MOST_CLASSES:
        raise BadInput("data.dataset", name, f"the largest label is {classes - 1}; allowed are 0 to {MOST_CLASSES - 1}")
    for split, values in (("training", labels), ("test", test_labels)):
        if values.min() < 0 or values.max() >= classes:
            bad = int(values.min()) if values.min() < 0 else int(values.max())
            raise BadInput("data.dataset", name, f"a {split} label is {bad}; allowed are 0 to {classes - 1}")
    statistics = _pixel_statistics(images)
    images, test_images = _in_plain_order(images), _in_plain_order(parts.test_images)
    names = parts.class_names or CLASS_NAMES.get(name, ())
    return Dataset(name, images, labels, test_images, test_labels, classes, statistics, parts.note, names)


def _in_plain_order(images: np.ndarray) -> np.ndarray:
    """Return the array with the strides of a new one.

    An axis of one entry, such as the channel of grey images, may have any stride, and torch chooses its convolution by
    them: the same image would give other last digits here than from Ray's store, where every array is a new one.
    """
    plain = np.ascontiguousarray(images)
    strides = np.cumprod([plain.itemsize, *plain.shape[:0:-1]])[::-1]
    return np.lib.stride_tricks.as_strided(plain, strides=tuple(int(stride) for stride in strides), writeable=False)


def _pixel_statistics(images: np.ndarray) -> Normalization:
    """Exact mean and deviation per channel from histograms of bytes: no float copy of the data."""
    values = np.arange(256) / 255.0
    means, deviations = [], []
    for channel in range(images.shape[1]):
        counts = sum(
            np.bincount(images[start : start + 10_000, channel].reshape(-1), minlength=256)
            for start in range(0, len(images), 10_000)
        )
        mean = float((counts * values).sum() / np.sum(counts))
        variance = float((counts * (values - mean) ** 2).sum() / np.sum(counts))
        means.append(mean)
        deviations.append(max(variance**0.5, 1e-6))
    return Normalization(tuple(means), tuple(deviations))


def _digits() -> _Parts:
    """1,797 handwritten digits of 8x8 pixels, a fifth of each class kept for testing."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    raw = load_digits()
    images = np.rint(raw.images * (255 / 16)).astype(np.uint8)[:, None]
    split = train_test_split(images, raw.target, test_size=DIGITS_TEST_SHARE, random_state=0, stratify=raw.target)
    return _Parts(split[0], split[2], split[1], split[3], num_classes=10)


def _outside(name: str, root: Path) -> _Parts:
    """What a function of somebody else returns: training images and labels, test images and labels."""
    reference = plugins.reference_of("data set", name)
    assert reference is not None
    reader = plugins.load("data.dataset", name, reference)
    if not callable(reader):
        raise BadInput("data.dataset", name, f"is no function but a {type(reader).__name__}")
    with plugins.calling("data.dataset", name, "calling it"):
        arrays = [np.asarray(array) for array in reader(root)]
    wanted = "wanted are train_images, train_labels, test_images, test_labels"
    if len(arrays) != 4:
        raise BadInput("data.dataset", name, f"it returned {len(arrays)} arrays; {wanted}")
    for images, labels in (arrays[:2], arrays[2:]):
        if images.ndim != 4 or images.dtype != np.uint8:
            what = f"its images are {images.dtype} of shape {images.shape}"
            raise BadInput("data.dataset", name, f"{what}; wanted is uint8 (n, channels, height, width)")
        if labels.shape != images.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
            what = f"its labels are {labels.dtype} of shape {labels.shape} for {len(images)} images"
            raise BadInput("data.dataset", name, f"{what}; wanted is one integer for each")
    return _Parts(arrays[0], arrays[1], arrays[2], arrays[3])


def _fetch_command(dataset: str) -> str:
    return f"add --set data.download=true to fetch it, or set data.root to where {dataset} lies"


def _mnist(name: str, root: Path, download: bool) -> _Parts:
    from torchvision import datasets

    reader = getattr(datasets, name)
    folder = root / name / "raw"
    if download:
        try:
            reader(root, download=True)
        except Exception as error:  # also what an old .pt file makes torch raise
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            cause = f"{name} could not be fetched ({said})"
            raise MissingData(cause, str(folder), "put its four files there") from None
    _check_idx_files(name, root)
    train, train_labels, test, test_labels = (_read_idx(folder / file) for file in IDX_FILES)
    return _Parts(train[:, None], train_labels, test[:, None], test_labels, num_classes=10)


def _read_idx(path: Path) -> np.ndarray:
    """Read a file that :func:`_check_idx` has taken; torchvision would prefer an old ``.pt`` file beside it."""
    data = np.fromfile(path, np.uint8)
    rank = int(data[3])
    shape = data[4 : 4 + 4 * rank].view(">u4").astype(int)
    return data[4 + 4 * rank :].reshape(shape)


def _check_idx_files(name: str, root: Path) -> None:
    for file in IDX_FILES:
        _check_idx(root / name / "raw" / file, name)


def _check_idx(path: Path, name: str) -> None:
    """Refuse an idx file that is not there, or not as long as its own header says."""
    if not path.exists():
        raise MissingData(f"{path.name} of {name} is not there", str(path.parent), _fetch_command(name))
    with open(path, "rb") as file:
        head = file.read(16)
    rank = head[3] if len(head) == 16 and head[:3] == b"\x00\x00\x08" else 0
    dimensions = [int.from_bytes(head[4 + 4 * i : 8 + 4 * i], "big") for i in range(min(rank, 3))]
    expected, found = 4 + 4 * rank + math.prod(dimensions), path.stat().st_size
    if rank not in (1, 3) or expected != found:
        cause = f"{path.name} is damaged: {found:,} bytes" + (f" instead of {expected:,}" if rank else "")
        raise MissingData(cause, str(path.parent), f"delete it and {_fetch_command(name)}")


def _cifar(kind: str, root: Path, download: bool) -> _Parts:
    folder = root / kind
    if list(folder.glob("*.parquet")):
        return _parquet(folder, None)
    from torchvision import datasets

    reader = getattr(datasets, kind.upper())
    try:
        train, test = reader(root, train=True, download=download), reader(root, train=False, download=download)
    except (RuntimeError, OSError, EOFError, KeyError, ValueError) as error:
        raise _no_cifar(kind, root, f"is missing or damaged ({str(error).splitlines()[0]})") from None
    images = [np.ascontiguousarray(part.data.transpose(0, 3, 1, 2)) for part in (train, test)]
    labels = [np.asarray(part.targets) for part in (train, test)]
    return _Parts(images[0], labels[0], images[1], labels[1], len(train.classes), class_names=tuple(train.classes))


def _no_cifar(kind: str, root: Path, why: str) -> MissingData:
    where = f"{root / CIFAR_FOLDERS[kind]} and {root / kind}/*.parquet"
    return MissingData(f"{kind.upper()} {why}", where, _fetch_command(kind.upper()))


def _svhn(dataset: str, root: Path, verify: bool, download: bool) -> _Parts:
    """SVHN's ``.mat`` files, in ``root`` or ``root/svhn``; the digit 0 is stored as 10."""
    from torchvision.datasets import SVHN
    from torchvision.datasets.utils import check_integrity, download_url

    notes: list[str] = []

    def find(split: str) -> Path:
        url, file, md5 = SVHN.split_list[split]
        path = _mat_path(file, root)
        if not path.exists():
            try:
                download_url(url, str(path.parent), file, md5)
            except (RuntimeError, OSError) as error:
                raise MissingData(f"{file} could not be fetched ({error})", str(path.parent), f"fetch {url}") from None
        if not check_integrity(str(path), md5):
            if verify:
                fix = f"delete it and {_fetch_command('SVHN')}, or admit other files with data.verify=false"
                raise MissingData(f"{file} does not have SVHN's checksum", str(path), fix)
            notes.append(file)
        return path

    paths = [find(split) for split in SVHN_SPLITS[dataset]]
    images, labels = _read_mats(paths)
    test_images, test_labels = _read_mats([find("test")])
    note = f"not SVHN's own data: {', '.join(notes)} have other checksums (data.verify = false)" if notes else ""
    return _Parts(images, labels, test_images, test_labels, num_classes=10, note=note)


def _mat_path(file: str, root: Path) -> Path:
    return next((p for p in (root / file, root / "svhn" / file) if p.exists()), root / "svhn" / file)


def _read_mats(paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Read files one after the other into one array: beside it only one of them is in memory at a time."""
    from scipy.io import loadmat, whosmat

    images, labels, filled = np.empty(0, np.uint8), [], 0
    for path in paths:
        try:
            if not filled:
                shapes = [{name: shape for name, shape, _ in whosmat(file)}["X"] for file in paths]
                images = np.empty((sum(shape[3] for shape in shapes), 3, 32, 32), np.uint8)
            raw = loadmat(path)
            own = raw["y"].reshape(-1).astype(np.int64)
            images[filled : filled + len(own)] = raw.pop("X").transpose(3, 2, 0, 1)
        except Exception as error:  # scipy raises what the damaged bytes make it raise
            cause = f"{path.name} is damaged ({type(error).__name__})"
            raise MissingData(cause, str(path), f"delete it and {_fetch_command('SVHN')}") from None
        labels.append(np.where(own == 10, 0, own))
        filled += len(own)
    return images, np.concatenate(labels)


def _parquet(folder: Path, size: int | None) -> _Parts:
    """Image classification in the layout of Hugging Face: ``train-*.parquet`` and ``test-*.parquet``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names: tuple[str, ...] = ()

    def read(split: str) -> tuple[np.ndarray, np.ndarray]:
        nonlocal names
        encoded: list[bytes | None] = []
        labels: list[np.ndarray] = []
        for file in sorted(folder.glob(f"{split}-*.parquet")):
            try:
                if not file.is_file():  # a pipe would be waited for
                    raise OSError("is not a regular file")
                table = pq.read_table(file)
            except (pa.ArrowException, OSError) as error:
                cause = f"{file.name} is damaged ({str(error).splitlines()[0]})"
                raise MissingData(cause, str(file), "fetch it again") from None
            column = next((f.name for f in table.schema if _holds_images(f.type)), None)
            labelled = "label" in table.column_names and pa.types.is_integer(table.schema.field("label").type)
            if column is None or not labelled:
                cause = f"{file.name} has columns {', '.join(f'{f.name}: {f.type}' for f in table.schema)}"
                fix = "needed: an image struct with encoded bytes, and an integer label"
                raise MissingData(cause, str(file), fix)
            names = names or _hugging_face_names(table.schema.metadata)
            encoded += table.column(column).combine_chunks().field("bytes").to_pylist()
            labels.append(table.column("label").to_numpy())
        return _decode(encoded, len(encoded), size, folder), np.concatenate(labels)

    train, test = read("train"), read("test")
    return _Parts(train[0], train[1], test[0], test[1], class_names=names)


def _hugging_face_names(metadata: Any) -> tuple[str, ...]:
    """Return the names of the classes where Hugging Face's ``datasets`` has written them into the file."""
    try:
        found = json.loads((metadata or {})[b"huggingface"])["info"]["features"]["label"]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()
    return tuple(found) if isinstance(found, list) and all(isinstance(name, str) for name in found) else ()


def _holds_images(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_struct(kind) and any(kind.field(i).name == "bytes" for i in range(kind.num_fields))


def _folder(folder: Path, size: int | None) -> _Parts:
    """``train/CLASS/*`` and ``test/CLASS/*``, as torchvision's ImageFolder reads them."""
    from torchvision.datasets import ImageFolder

    def read(split: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
        try:
            found = ImageFolder(str(folder / split))
        except (OSError, RuntimeError) as error:
            raise MissingData(str(error).splitlines()[0], str(folder / split), "needed: train/ and test/") from None
        pixels = _decode((Path(path) for path, _ in found.samples), len(found.samples), size, folder)
        return pixels, np.asarray([label for _, label in found.samples]), found.classes

    train, test = read("train"), read("test")
    if train[2] != test[2]:
        odd = sorted(set(train[2]) ^ set(test[2]))
        raise BadInput("data.dataset", f"folder:{folder}", f"train/ and test/ differ in the classes {odd}")
    return _Parts(train[0], train[1], test[0], test[1], len(train[2]), class_names=tuple(train[2]))


def _decode(files: Iterable[bytes | Path | None], count: int, size: int | None, where: Path) -> np.ndarray:
    """Decode images one by one into one array: grey if the first one is grey, else RGB."""
    out: np.ndarray | None = None
    mode = "RGB"
    for i, file in enumerate(files):
        try:
            if file is None:
                raise ValueError("there are no bytes")
            image = decode_image(file)
            if out is None:
                mode = "L" if image.mode in ("1", "L", "I", "I;16") else "RGB"
            pixels = image.convert(mode)
        except (ValueError, OSError) as error:
            named = f"image {i}" if not isinstance(file, Path) else str(file.relative_to(where))
            raise MissingData(f"{named} cannot be decoded ({error})", str(where), "fetch it again") from None
        if size is not None:
            pixels = pixels.resize((size, size))
        array = np.asarray(pixels, np.uint8)
        array = array[None] if mode == "L" else array.transpose(2, 0, 1)
        if out is None:
            out = np.empty((count, *array.shape), np.uint8)
        if array.shape != out.shape[1:]:
            shapes = f"image {i} is {array.shape[1:]} pixels, the first one {out.shape[2:]}"
            raise BadInput("data.size", None, f"{shapes}; set data.size to resize them in {where}")
        out[i] = array
    return out if out is not None else np.empty((0, 1, 1, 1), np.uint8)
