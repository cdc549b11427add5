"""Turn a `Coordinator` into bytes and back, so that it outlives its process: in memory that another process holds, or in a file.

The bytes are a pickle. It is read by an unpickler that knows the classes of ``offbeat.core``, ``offbeat.policies`` and ``offbeat.types``,
those of the modules that the caller names, and three harmless ones; it calls no function but the two of this file that make arrays. So
bytes from a file cannot run code of their own: at worst they make a coordinator with wrong numbers.

A pickle, since the state is a graph: parts of a coordinator share objects, and the ledgers compare contributions by identity.
"""

from __future__ import annotations

import enum
import importlib
import io
import pickle  # noqa: TID251 - read by `_Reader` alone, which finds no class or function but those listed here
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Final

import numpy as np

from offbeat.core.job.coordinator import Coordinator

FORMAT: Final = b"offbeat coordinator 2\n"
"""What the bytes begin with; the number changes with the classes of ``offbeat.core`` in a way that makes older bytes wrong."""

_BROKEN: Final = (AttributeError, TypeError, ValueError, pickle.UnpicklingError)
_PACKAGES: Final = ("offbeat.core", "offbeat.policies", "offbeat.types")


def dumps(coordinator: Coordinator) -> bytes:
    """Return the whole state of a coordinator, between two events.

    Raises:
        TypeError: the rule keeps something that cannot be kept as data, such as a function or an open file.

    >>> from offbeat.core.events import Initialised, Joined, Lost, Pushed
    >>> from offbeat.policies import rule
    >>> job = Coordinator(rule("bsp"), workers=2)
    >>> for event in (Joined(0), Joined(1), Initialised(0), Pushed(0, 1, version=0, samples=8, compute_s=0.5)):
    ...     _ = job.on(event, now=0.0)
    >>> again = loads(dumps(job))
    >>> again.on(Lost(1, "connection closed"), now=2.0) == job.on(Lost(1, "connection closed"), now=2.0)
    True
    """
    out = io.BytesIO()
    out.write(FORMAT)
    try:
        _Writer(out, protocol=5).dump(coordinator)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        rule = coordinator.rule.spelling
        raise TypeError(
            f"the state of a job under {rule} cannot be kept: {error}; keep numbers, containers and objects of classes"
        ) from error
    return out.getvalue()


def loads(data: bytes, modules: Collection[str] = ()) -> Coordinator:
    """Return the coordinator whose state `dumps` has returned; it answers each later event as the other one would have.

    Args:
        data: what `dumps` has returned, perhaps in another process.
        modules: names of further modules whose classes the state may have: those of a rule that is not one of ``offbeat.policies``.

    Raises:
        ValueError: these are not the bytes of a coordinator, or of another release's, or they name something that is not allowed.
    """
    if not data.startswith(FORMAT):
        raise ValueError(f"expected the state of a coordinator, which begins with {FORMAT!r}; it begins with {data[: len(FORMAT)]!r}")
    try:
        found = _Reader(io.BytesIO(data[len(FORMAT) :]), modules).load()
    except (ArithmeticError, AssertionError, EOFError, ImportError, LookupError, MemoryError, *_BROKEN) as error:
        raise ValueError(f"the state of a coordinator cannot be read: {error}") from error
    if not isinstance(found, Coordinator):
        raise ValueError(f"expected the state of a coordinator, found a {type(found).__name__}")
    return found


def _array(dtype: str, order: str, shape: tuple[int, ...], data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape, order="F" if order == "F" else "C").copy(order="K")


def _scalar(dtype: str, data: bytes) -> Any:
    return np.frombuffer(data, np.dtype(dtype))[0]


_OTHERS: Final[dict[tuple[str, str], Any]] = {
    ("collections", "deque"): deque,
    (__name__, "_array"): _array,
    (__name__, "_scalar"): _scalar,
}


class _Writer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Write arrays and members of enumerations without NumPy's own functions and ``getattr``, which `_Reader` must not call."""
        if isinstance(value, enum.Enum):
            return type(value), (value.value,)
        if isinstance(value, np.ndarray):
            order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
            return _array, (_plain(value.dtype), order, value.shape, value.tobytes(order))  # type: ignore[arg-type]
        if isinstance(value, np.generic):
            return _scalar, (_plain(value.dtype), value.tobytes())
        return NotImplemented


def _plain(dtype: np.dtype[Any]) -> str:
    if dtype.hasobject or dtype.names is not None:
        raise TypeError(f"an array of {dtype}, which is no array of numbers")
    return dtype.str


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, modules: Collection[str]) -> None:
        super().__init__(file)
        self._modules = modules

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """Return a class of the listed modules, defined there and not merely imported."""
        if (module, name) in _OTHERS:
            return _OTHERS[module, name]  # type: ignore[no-any-return]
        if module in self._modules or any(module == package or module.startswith(f"{package}.") for package in _PACKAGES):
            found = vars(importlib.import_module(module)).get(name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not a class of the rules, nor of what serves them")
