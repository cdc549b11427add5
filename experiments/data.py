"""Where the real data sets and traces are, and how to read them: the folder that ``OFFBEAT_DATA`` names, else ``../shared/data``.

The project ships none of them. What is not there raises `MissingDataError`, which the runner turns into a sentence and a status of
its own, so that tests skip instead of failing. Images come as tensors, normalised, and are read once per process.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import pickle  # noqa: TID251  CIFAR-10 is published as pickles and as nothing else; _Arrays below builds arrays from them, and cannot run code
import tarfile
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

CHECKOUT: Final = Path(__file__).parents[1]
VARIABLE: Final = "OFFBEAT_DATA"

MNIST_FILES: Final = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
MNIST_SCALE: Final = ((0.1307,), (0.3081,))
"""Mean and standard deviation of the training images' pixels, per channel, scaled to 0..1."""
CIFAR_SCALE: Final = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR_FILE: Final = "cifar10/cifar-10-python.tar.xz"


class MissingDataError(ConfigurationError):
    """A data set is not on this machine."""


class Images(NamedTuple):
    """Images and what they show, for learning and for testing."""

    train_x: Tensor
    """(images, channels, height, width) float32, normalised per channel with the training set's mean and standard deviation."""
    train_y: Tensor
    """(images,) int64: classes from 0."""
    test_x: Tensor
    test_y: Tensor


def root() -> Path:
    """The folder with a subfolder per data set; it need not exist."""
    return Path(os.environ.get(VARIABLE) or CHECKOUT.parent / "shared" / "data")


def locate(name: str) -> Path:
    """The path of a file or folder of the data, for instance ``traces/alibaba-pai-minibatch/job_1_norm.csv.gz``.

    Raises:
        MissingDataError: it is not there.
    """
    path = root() / name
    if not path.exists():
        raise MissingDataError(f"there is no {path}: set {VARIABLE} to the folder that holds {name}")
    return path


def mnist(train: int | None = None, test: int | None = None) -> Images:
    """MNIST, 28x28 pixels, 10 classes: the first ``train`` of 60,000 and the first ``test`` of 10,000 images, or all.

    Raises:
        MissingDataError: the four files ``mnist/*-ubyte.gz`` are not there.
        ConfigurationError: one of them is cut short or something else.
    """
    return _images(_mnist(), MNIST_SCALE, train, test)


def cifar10(train: int | None = None, test: int | None = None) -> Images:
    """CIFAR-10, 3x32x32 pixels, 10 classes: the first ``train`` of 50,000 and the first ``test`` of 10,000 images, or all.

    The published archive takes half a minute to unpack; a copy under ``out/data`` serves the next time.

    Raises:
        MissingDataError: ``cifar10/cifar-10-python.tar.xz`` is not there.
        ConfigurationError: it holds something else than arrays, lists and text.
    """
    return _images(_cifar10(), CIFAR_SCALE, train, test)


Raw = tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]


def _images(raw: Raw, scale: tuple[tuple[float, ...], tuple[float, ...]], train: int | None, test: int | None) -> Images:
    """The first ``train`` and ``test`` of the images (images, channels, height, width) as floats, with their labels."""
    import torch

    mean, deviation = (torch.tensor(values).reshape(-1, 1, 1) for values in scale)

    def prepare(x: NDArray[np.uint8], y: NDArray[np.uint8], count: int | None) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(x[:count].astype(np.float32))
        return pixels.div_(255).sub_(mean).div_(deviation), torch.from_numpy(y[:count].astype(np.int64))

    return Images(*prepare(raw[0], raw[1], train), *prepare(raw[2], raw[3], test))


@cache
def _mnist() -> Raw:
    train_x, train_y, test_x, test_y = (read_idx(locate(f"mnist/{name}.gz")) for name in MNIST_FILES)
    return train_x[:, None], train_y, test_x[:, None], test_y


def read_idx(path: Path) -> NDArray[np.uint8]:
    """One file of the idx format, gzipped: two zero bytes, the type (8: bytes), the number of dimensions, their sizes, the bytes.

    Raises:
        ConfigurationError: it is none, or cut short.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise ConfigurationError(f"{path} is not gzipped, or cut short: {error}") from None
    sizes = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(content[3] if len(content) > 3 else 0)]
    if content[:3] != b"\0\0\x08" or len(content) != 4 + 4 * len(sizes) + math.prod(sizes):
        raise ConfigurationError(f"{path} is no idx file of bytes, or it is cut short: {len(content)} bytes for the sizes {sizes}")
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(sizes)).reshape(sizes)


@cache
def _cifar10() -> Raw:
    copy = CHECKOUT / "out" / "data" / "cifar10.npz"
    if not copy.exists():
        train_x, train_y, test_x, test_y = _unpack(locate(CIFAR_FILE))
        copy.parent.mkdir(parents=True, exist_ok=True)
        half = copy.with_name(f"cifar10-{os.getpid()}.tmp")
        with half.open("wb") as sink:
            np.savez(sink, train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)
        half.replace(copy)  # in one step: other experiments may be reading, or unpacking too
    with np.load(copy, allow_pickle=False) as stored:
        return stored["train_x"], stored["train_y"], stored["test_x"], stored["test_y"]


def _unpack(path: Path) -> Raw:
    batches: dict[str, dict[str, Any]] = {}
    with tarfile.open(path, "r|xz") as archive:
        for member in archive:
            name = Path(member.name).name
            source = archive.extractfile(member) if "_batch" in name else None
            if source is not None:
                batches[name] = load_arrays(io.BytesIO(source.read()))
    wanted = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    if set(batches) != set(wanted):
        raise ConfigurationError(f"{path} holds {sorted(batches)} where CIFAR-10 has {wanted}")
    pixels = [np.asarray(batches[name]["data"], np.uint8).reshape(-1, 3, 32, 32) for name in wanted]
    labels = [np.asarray(batches[name]["labels"], np.uint8) for name in wanted]
    return np.concatenate(pixels[:5]), np.concatenate(labels[:5]), pixels[5], labels[5]


def load_arrays(source: IO[bytes]) -> Any:
    """Read a pickle that holds nothing but arrays of numbers, lists, dictionaries and text.

    Raises:
        ConfigurationError: it asks for anything else; none of that is imported or called.
    """
    return _Arrays(source, encoding="latin1").load()


class _Arrays(pickle.Unpickler):
    """Knows three names, and every one of them makes an array."""

    def find_class(self, module: str, name: str) -> Any:
        if module in {"numpy.core.multiarray", "numpy._core.multiarray"} and name == "_reconstruct":
            return _array
        if module == "numpy" and name in {"ndarray", "dtype"}:
            return {"ndarray": np.ndarray, "dtype": np.dtype}[name]
        raise ConfigurationError(f"a data file asks for {module}.{name}; arrays, lists, dictionaries and text are all it may hold")


def _array(_kind: Any, shape: tuple[int, ...], _code: Any) -> NDArray[Any]:
    """The empty array that a pickle fills in its next step; NumPy's own function makes any class that it is told."""
    return np.ndarray(shape, np.uint8)
