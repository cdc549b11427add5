"""Turn what a server keeps, besides tensors and connections, into bytes, and back in the next process.

The bytes are in memory that none but this job's server and its supervisor have ever held, like the objects themselves; so they are read
with `pickle` as it is. (A coordinator that is to go into a file is written and read by ``core/job/state.py``.)
"""

from __future__ import annotations

import io
import pickle  # noqa: TID251 - for memory that only the server and its supervisor hold; never for a file or a message
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from offbeat.runtime.recovery.keeper import Keeper
from offbeat.transport.base import SharedMemory


def dumps(state: Any, keeper: Keeper, parts: Mapping[str, Any]) -> tuple[bytes, set[str]]:
    """Return a state as bytes, and the names of the blocks of memory in it.

    Args:
        state: any objects; links stay connected to nothing.
        keeper: the blocks of memory to which the state refers are written as their names.
        parts: what the next process has anew, by name: the state refers to it.

    Raises:
        TypeError: something in the state cannot be written.
    """
    out = io.BytesIO()
    writer = _Writer(out, keeper, parts)
    try:
        writer.dump(state)
    except (pickle.PicklingError, AttributeError) as error:
        raise TypeError(f"the state of this server cannot be kept: {error}") from error
    return out.getvalue(), writer.blocks


def packed(value: Any) -> bytes:
    """Return plain objects of this package, which refer to nothing else, as bytes for a record."""
    return pickle.dumps(value, protocol=5)


def unpacked(data: bytes) -> Any:
    """Return what `packed` was given, in the next process."""
    return pickle.loads(data)  # noqa: S301 - of the same memory as a snapshot


def loads(data: memoryview, keeper: Keeper, parts: Mapping[str, Any]) -> Any:
    """Return what `dumps` was given, in the next process. ``parts`` are this process's own."""
    return _Reader(io.BytesIO(data), keeper, parts).load()


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, keeper: Keeper, parts: Mapping[str, Any]) -> None:
        super().__init__(file, protocol=5)
        self._keeper = keeper
        self._parts = {id(part): name for name, part in parts.items()}
        self.blocks: set[str] = set()

    def persistent_id(self, value: Any) -> Any:
        if (name := self._parts.get(id(value))) is not None:
            return "part", name
        if isinstance(value, SharedMemory) and (name := self._keeper.name_of(value)) is not None:
            self.blocks.add(name)
            return "block", name
        if isinstance(value, memoryview) and (place := self._keeper.place_of(value)) is not None:
            self.blocks.add(place[0])
            return "view", *place
        return None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, memoryview):
            return memoryview, (bytes(value) if value.readonly else bytearray(value),)
        if isinstance(value, weakref.WeakKeyDictionary):
            return _weak, (list(value.items()),)
        return NotImplemented


def _weak(items: list[tuple[Any, Any]]) -> weakref.WeakKeyDictionary[Any, Any]:
    return weakref.WeakKeyDictionary(items)


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, keeper: Keeper, parts: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._find: dict[str, Callable[..., Any]] = {"part": parts.__getitem__, "block": keeper.__getitem__, "view": keeper.view}

    def persistent_load(self, name: Any) -> Any:
        kind, *which = name
        return self._find[kind](*which)
