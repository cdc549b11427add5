"""Turn a server's objects into plain data and blocks of memory, and back in another process.

There are three kinds of readers: the server's next process on this host (`freeze`, with memory that the supervisor holds too), a standby
that comes to a running server (`dumps`, over a connection), and a job that resumes (`freeze` of a coordinator, in a checkpoint's file).

Objects become a table in msgpack, with one row for each: the name of its class and its attributes. A row refers to other objects by their
row numbers, so that two references to one object stay references to one object. Memory, such as parameters and gradients, is in blocks
beside the table, or the table has the names of blocks that outlive the process.

Reading runs no code that the data names. It makes objects without calling their classes, which must be of the listed packages of offbeat. A
callable in a table must be a method of an object in it, belong to the pure packages, or be in a short list. So the worst that a table can
make is a server with wrong numbers.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copyreg import __newobj__ as _newobj  # type: ignore[attr-defined]
from functools import lru_cache, partial
from pathlib import PurePath
from typing import Any, Final
from weakref import WeakKeyDictionary

import msgpack  # type: ignore[import-untyped]
import numpy as np
import torch

from offbeat.errors import ProtocolError
from offbeat.runtime.recovery.keeper import Keeper
from offbeat.transport.base import SharedMemory
from offbeat.transport.shm import address_of

PURE: Final = frozenset({"core", "policies", "types"})
"""Packages of offbeat whose classes and functions only compute, so that calling them is safe."""
PACKAGES: Final = PURE | {"journal", "runtime", "tensors", "transport"}
"""Packages of offbeat whose classes may have objects in a server's table."""
OTHERS: Final = {
    ("offbeat.journal.arrivals", "Sender"),
    ("offbeat.journal.worker_summary", "WorkerTally"),
    ("offbeat.runtime.parameter_server.shard", "_saves_nothing"),
    ("offbeat.transport.shm", "MemoryBlock"),
}
"""Further classes and functions that may be in a table themselves: to be called, or as owners of a class method."""
REMAKES: Final = {
    ("offbeat.core.allreduce.rounds", "Rounds"),
    ("offbeat.runtime.allreduce.one_host_plane", "OneHostGroup"),
    ("offbeat.runtime.coordination.checkpoint_content", "Resumed"),
    ("offbeat.runtime.gossip.plane", "GossipGroup"),
    ("offbeat.runtime.parameter_server.encoding", "EncodedParameters"),
    ("offbeat.runtime.parameter_server.encoding", "ParameterChanges"),
    ("offbeat.runtime.parameter_server.encoding", "ShardEncoding"),
    ("offbeat.runtime.parameter_server.per_shard", "BlockShard"),
    ("offbeat.runtime.parameter_server.shard", "LiveShard"),
    ("offbeat.transport.link", "Link"),
}
"""Classes whose ``__setstate__`` the reader calls."""
NOTHING: Final[Mapping[str, Any]] = {}
_ATOMS: Final = frozenset({type(None), bool, float, str, bytes})
_WHOLE: Final = range(-(1 << 63), 1 << 64)
"""Integers that msgpack can hold."""
_CONTAINERS: Final[dict[str, type]] = {
    kind.__name__: kind for kind in (list, tuple, dict, set, frozenset, deque, OrderedDict, Counter, defaultdict, WeakKeyDictionary)
}
_FACTORIES: Final = {(kind.__module__, kind.__name__): kind for kind in (int, float, *_CONTAINERS.values())}
_BROKEN: Final = (AttributeError, TypeError, ValueError, LookupError, ImportError, ArithmeticError, RecursionError, AssertionError)


def dumps(state: Any, parts: Mapping[str, Any]) -> tuple[bytes, list[memoryview]]:
    """Return a state as a table, and the blocks of memory that belong to it. The blocks are views of the memory itself.

    Args:
        state: any objects.
        parts: objects that each process makes for itself, by name; the table refers to them by name.

    Raises:
        TypeError: something in the state is not plain data, such as a lambda or an open file.

    >>> one = [1, "two"]
    >>> again, = loads(*dumps([{"one": one, "same": one}], {}), {})
    >>> again, again["one"] is again["same"]
    ({'one': [1, 'two'], 'same': [1, 'two']}, True)
    """
    return _Writer(parts, None).write(state)


def loads(
    data: bytes | memoryview,
    blocks: Sequence[memoryview],
    parts: Mapping[str, Any],
    kept: Keeper | None = None,
    packages: frozenset[str] = PACKAGES,
) -> Any:
    """Return the state that `dumps` was given, with its memory in ``blocks``. ``parts`` are those of this process.

    Args:
        kept: the memory of this process to which the table refers by name; see `freeze`.
        packages: the packages of offbeat whose classes may have objects in the table.

    Raises:
        ProtocolError: the table cannot be read.
    """
    try:
        root, rows, firsts = msgpack.unpackb(data, strict_map_key=False)
        return _Reader(rows, firsts, blocks, parts, kept, packages).load(root)
    except (*_BROKEN, msgpack.UnpackException) as error:
        raise ProtocolError(f"a state that cannot be read: {type(error).__name__}: {error}") from error


def freeze(state: Any, parts: Mapping[str, Any] = NOTHING, kept: Keeper | None = None) -> tuple[bytes, set[str]]:
    """Return a state with its memory as bytes, and the names of the kept blocks in it. Other arguments and errors are those of `dumps`.

    Args:
        kept: memory that the next process gets by name; the table refers to it by name, and does not have its bytes.

    >>> data, _ = freeze({"memory": memoryview(b"12345678")[2:4]})
    >>> bytes(thaw(data)["memory"])
    b'34'
    """
    writer = _Writer(parts, kept)
    table, blocks = writer.write(state)
    return msgpack.packb([table, *blocks]), writer.names


def thaw(
    data: bytes | memoryview, parts: Mapping[str, Any] = NOTHING, kept: Keeper | None = None, packages: frozenset[str] = PACKAGES
) -> Any:
    """Return, in another process, the state that `freeze` was given. Arguments and errors are those of `loads`."""
    try:
        table, *blocks = msgpack.unpackb(data)
        memory = [memoryview(bytearray(block)) for block in blocks]
    except (*_BROKEN, msgpack.UnpackException) as error:
        raise ProtocolError(f"a state that cannot be read: {type(error).__name__}: {error}") from error
    return loads(table, memory, parts, kept, packages)


class _Base:
    """Memory of one owner, and the part of it that the state refers to."""

    def __init__(self, number: int, memory: Any) -> None:
        self.number = number
        self._whole = memoryview(memory).cast("B")
        self._first, self._stop = len(self._whole), 0

    def add(self, view: memoryview) -> int:
        """Add a view of the memory; return its first byte in the memory."""
        start = address_of(view) - address_of(self._whole)
        self._first, self._stop = min(self._first, start), max(self._stop, start + len(view))
        return start

    def part(self) -> tuple[int, memoryview]:
        """Return the first byte of the smallest part that covers all views, and that part."""
        return self._first, self._whole[self._first : self._stop]


class _Writer:
    """Number objects in the order in which they are reached, and write one row for each."""

    def __init__(self, parts: Mapping[str, Any], kept: Keeper | None) -> None:
        self._parts = {id(part): name for name, part in parts.items()}
        self._kept = kept
        self.names: set[str] = set()
        """Names of the kept blocks that the state refers to."""
        self._numbers: dict[int, int] = {}
        self._met: list[Any] = []
        """Objects by number. They are kept alive, so that no other object gets the same ``id`` meanwhile."""
        self._bases: dict[int, _Base] = {}
        """By ``id`` of the owner of the memory."""

    def write(self, state: Any) -> tuple[bytes, list[memoryview]]:
        """Return the table of a state: its root, all rows, and where each block begins in its owner's memory, in bytes; and the blocks."""
        root = self._ref(state)
        rows = list(self._rows())
        parts = [base.part() for base in self._bases.values()]
        return msgpack.packb([root, rows, [first for first, _ in parts]]), [block for _, block in parts]

    def _ref(self, value: Any) -> Any:
        """Return a value's form in a row: the value itself, or a list with the number of an object."""
        kind = type(value)
        if kind in _ATOMS or (kind is int and value in _WHOLE):
            return value
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._met)
            self._met.append(value)
        return [number]

    def _rows(self) -> Iterator[list[Any]]:
        """Yield the row of each object. Writing a row may add further objects."""
        number = 0
        while number < len(self._met):
            yield self._row(self._met[number])
            number += 1

    def _refs(self, values: Iterable[Any]) -> list[Any]:
        return [self._ref(value) for value in values]

    def _row(self, value: Any) -> list[Any]:
        if (name := self._parts.get(id(value))) is not None:
            return ["part", name]
        kind = type(value)
        if _CONTAINERS.get(kind.__name__) is kind:
            return self._container(kind, value)
        if (place := self._place_of(value)) is not None:
            self.names.add(place[0])
            return ["kept", *place]
        match value:
            case memoryview():
                return ["view", *self._view(value)]
            case type() | types.FunctionType():
                return ["named", *_name_of(value, _find)]
            case types.MethodType():
                return ["method", self._ref(value.__self__), value.__name__]
            case partial():
                return ["partial", self._ref(value.func), self._refs(value.args), list(value.keywords), self._refs(value.keywords.values())]
            case enum.Enum():
                return ["enum", *_name_of(kind, _class), self._ref(value.value)]
            case random.Random() if kind is random.Random:
                return ["random", self._ref(value.getstate())]
            case np.ndarray() | np.generic():
                if value.dtype.hasobject or value.dtype.names is not None:
                    raise TypeError(f"an array of {value.dtype}, which is no array of numbers")
                return ["array", isinstance(value, np.generic), value.dtype.str, list(value.shape), value.tobytes()]
            case int() if kind is int:
                return ["int", str(value)]
            case torch.Tensor() if kind is torch.Tensor:
                flat = value.detach().cpu().reshape(-1)
                data = flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
                return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), data]
            case tuple() if kind is not tuple:
                return ["tuple of", *_name_of(kind, _class), self._refs(value)]
        if kind is PurePath or kind.__module__.startswith("pathlib"):
            raise TypeError("a path, which may not be there on another machine")
        return self._object(kind, value)

    def _place_of(self, value: Any) -> Sequence[Any] | None:
        kept = self._kept if isinstance(value, memoryview | SharedMemory) else None
        return None if kept is None else kept.place_of(value)

    def _container(self, kind: type, value: Any) -> list[Any]:
        if isinstance(value, dict | WeakKeyDictionary):
            items = list(value.items())
            factory = value.default_factory if isinstance(value, defaultdict) else None
            return [kind.__name__, self._ref(factory), self._refs(key for key, _ in items), self._refs(one for _, one in items)]
        if kind is frozenset and not _is_whole(value):  # the reader would make it before its members have the values that they compare by
            raise TypeError("a frozenset of more than numbers, texts, tuples of them, and members of enumerations")
        return [kind.__name__, value.maxlen if isinstance(value, deque) else None, self._refs(value)]

    def _object(self, kind: type, value: Any) -> list[Any]:
        reduced = value.__reduce_ex__(2)
        state = reduced[2] if len(reduced) > 2 else None
        if isinstance(state, tuple):  # the class has slots
            state = {**(state[0] or {}), **(state[1] or {})}
        plain = reduced[0] is _newobj and reduced[1] == (kind,) and not any(reduced[3:])
        if not plain or not isinstance(state, dict | None):
            raise TypeError(f"an object of {kind.__module__}.{kind.__qualname__}, which is no plain data")
        _remakes(kind)
        return ["object", *_name_of(kind, _class), list(state or ()), self._refs((state or {}).values())]

    def _view(self, view: memoryview) -> list[Any]:
        if not len(view):
            return [None, 0, 0, view.readonly]
        if view.itemsize != 1 or not view.contiguous:
            raise TypeError("a view of memory that is not one of bytes")
        base = self._bases.get(id(view.obj))
        if base is None:
            base = self._bases[id(view.obj)] = _Base(len(self._bases), view.obj)
        return [base.number, base.add(view), len(view), view.readonly]


class _Reader:
    """Make the objects of all rows, then fill them: references among objects may form cycles."""

    def __init__(
        self,
        rows: list[list[Any]],
        firsts: list[int],
        blocks: Sequence[memoryview],
        parts: Mapping[str, Any],
        kept: Keeper | None,
        packages: frozenset[str],
    ) -> None:
        self._rows, self._firsts, self._blocks, self._parts = rows, firsts, blocks, parts
        self._kept, self._packages = kept, packages
        self._made: dict[int, Any] = {}

    def load(self, root: Any) -> Any:
        for number in range(len(self._rows)):
            self._make(number)
        later = []
        for number, row in enumerate(self._rows):
            if row[0] == "object":
                if _remakes(type(self._made[number])):
                    later.append(number)
                else:
                    _assign(self._made[number], dict(zip(row[3], self._values(row[4]), strict=True)))
        for number, row in enumerate(self._rows):
            if row[0] in _CONTAINERS:
                self._fill(self._made[number], row)
        for number in self._inner_first(later):
            row = self._rows[number]
            self._made[number].__setstate__(dict(zip(row[3], self._values(row[4]), strict=True)))
        return self._value(root)

    def _value(self, ref: Any) -> Any:
        return self._make(*ref) if isinstance(ref, list) else ref

    def _values(self, refs: list[Any]) -> list[Any]:
        return [self._value(ref) for ref in refs]

    def _make(self, number: int) -> Any:
        """Return the object of a row; if it can refer to itself, it may still be empty."""
        if number not in self._made:
            self._made[number] = self._new(self._rows[number])
        return self._made[number]

    def _new(self, row: list[Any]) -> Any:
        match row:
            case ["part", name]:
                return self._parts[name]
            case ["kept", str(), *_] if self._kept is not None:
                return self._kept.at(*row[1:])
            case ["view", block, start, nbytes, readonly]:
                return self._view(block, start, nbytes, readonly)
            case ["named", module, name]:
                return _find(self._packages, module, name)
            case ["method", owner, name]:
                return _method(self._value(owner), name)
            case ["partial", function, arguments, names, values]:
                named = dict(zip(names, self._values(values), strict=True))
                return partial(self._value(function), *self._values(arguments), **named)
            case ["enum", module, name, value]:
                return _class(self._packages, module, name, enum.Enum)(self._value(value))
            case ["random", state]:
                made = random.Random()
                made.setstate(self._value(state))
                return made
            case ["array", scalar, dtype, shape, data]:
                array = np.frombuffer(data, np.dtype(dtype)).reshape(shape)
                return array[()] if scalar else array.copy()
            case ["int", text]:
                return int(text)
            case ["tensor", str(dtype), shape, data]:
                return _tensor(dtype, shape, data)
            case ["tuple of", module, name, values]:
                return tuple.__new__(_class(self._packages, module, name, tuple), self._values(values))
            case ["object", module, name, _, _]:
                return object.__new__(_class(self._packages, module, name))
            case ["tuple" | "frozenset" as kind, _, values]:
                return _CONTAINERS[kind](self._values(values))
            case ["deque", most, _]:
                return deque(maxlen=most)
            case [str(kind), *_]:
                return _CONTAINERS[kind]()
        raise ValueError("a row without a kind")

    def _view(self, block: int | None, start: int, nbytes: int, readonly: bool) -> memoryview:
        if block is None:
            return memoryview(b"" if readonly else bytearray())
        begin, whole = start - self._firsts[block], self._blocks[block]
        if not 0 <= begin <= begin + nbytes <= len(whole):
            raise ValueError(f"bytes {begin} to {begin + nbytes} of a block of {len(whole)}")
        view = whole[begin : begin + nbytes]
        return view.toreadonly() if readonly else view

    def _fill(self, made: Any, row: list[Any]) -> None:
        if isinstance(made, dict | WeakKeyDictionary):
            if isinstance(made, defaultdict):
                made.default_factory = self._value(row[1])
            for key, value in zip(self._values(row[2]), self._values(row[3]), strict=True):
                made[key] = value
        elif isinstance(made, set):
            made.update(self._values(row[2]))
        elif isinstance(made, list | deque):
            made.extend(self._values(row[2]))

    def _inner_first(self, wanted: list[int]) -> Iterator[int]:
        """Yield the numbers of these objects, each after those that it refers to, except within a cycle."""
        left, seen = set(wanted), set()
        for first in wanted:
            way = [(first, iter(_references(self._rows[first])))] if first not in seen else []
            seen.add(first)
            while way:
                number, references = way[-1]
                following = next((one for one in references if one not in seen), None)
                if following is None:
                    way.pop()
                    if number in left:
                        yield number
                else:
                    seen.add(following)
                    way.append((following, iter(_references(self._rows[following]))))


def _references(row: list[Any]) -> Iterator[int]:
    """Yield the numbers of the objects to which a row refers."""
    refs: list[Any] = []
    match row:
        case ["object", _, _, _, values] | ["tuple of", _, _, values]:
            refs = values
        case ["method", owner, _]:
            refs = [owner]
        case ["partial", function, arguments, _, values]:
            refs = [function, *arguments, *values]
        case [str(kind), factory, keys, values] if kind in _CONTAINERS:
            refs = [factory, *keys, *values]
        case [str(kind), _, values] if kind in _CONTAINERS:
            refs = values
    return (ref[0] for ref in refs if isinstance(ref, list))


def _is_whole(value: Any) -> bool:
    """Return True if a value refers to no object that the reader fills after making it."""
    if isinstance(value, tuple | frozenset):
        return all(map(_is_whole, value))
    return type(value) in _ATOMS or isinstance(value, int | enum.Enum)


def _assign(made: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        if isinstance(getattr(type(made), name, None), types.MemberDescriptorType):  # the attribute is a slot
            object.__setattr__(made, name, value)
        else:
            vars(made)[name] = value


def _name_of(value: Any, find: Callable[[frozenset[str], str, str], Any]) -> tuple[str, str]:
    module, name = value.__module__, value.__qualname__
    if find(PACKAGES, module, name) is not value:
        raise TypeError(f"{module}.{name}, which cannot be found by its name")
    return module, name


@lru_cache(1024)
def _find(packages: frozenset[str], module: str, name: str) -> Any:
    """Return a class or function that may be in a table itself, by name. Raises `TypeError` for any other."""
    if (module, name) in _FACTORIES:
        return _FACTORIES[module, name]
    if _is_of(packages, module) and ((module, name) in OTHERS or _is_of(PURE, module)):
        found = vars(importlib.import_module(module)).get(name)
        if isinstance(found, type | types.FunctionType) and found.__module__ == module:
            return found
    raise TypeError(f"{module}.{name}, which is none of the classes and functions that a state may have")


@lru_cache(1024)
def _class(packages: frozenset[str], module: str, name: str, base: type = object) -> Any:
    """Return a class that may have objects in a table, by name. Raises `TypeError` for any other."""
    if _is_of(packages, module):
        found = vars(importlib.import_module(module)).get(name)
        if isinstance(found, type) and found.__module__ == module and issubclass(found, base):
            return found
    raise TypeError(f"an object of {module}.{name}, which is none of the classes that a state may have")


def _is_of(packages: frozenset[str], module: str) -> bool:
    package, _, rest = module.partition(".")
    return package == "offbeat" and rest.partition(".")[0] in packages


def _remakes(kind: type) -> bool:
    """Return True if ``__setstate__`` fills a class's objects. Raises `TypeError` if it must not be called: it may open files."""
    if not hasattr(kind, "__setstate__"):
        return False
    if (kind.__module__, kind.__qualname__) in REMAKES:
        return True
    raise TypeError(f"an object of {kind.__module__}.{kind.__qualname__}, which each process makes for itself")


def _tensor(dtype: str, shape: list[int], data: bytes) -> torch.Tensor:
    kind = vars(torch).get(dtype)
    if not isinstance(kind, torch.dtype):
        raise TypeError(f"a tensor of {dtype}")
    flat = torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)
    return flat.reshape(shape)


def _method(owner: Any, name: str) -> Any:
    """Return an object's method, or a class's class method, if a class of offbeat defines it. Raises `TypeError` if not."""
    kind = owner if isinstance(owner, type) else type(owner)
    function = inspect.getattr_static(kind, name)
    wanted = classmethod if isinstance(owner, type) else types.FunctionType
    inner = function.__func__ if isinstance(function, classmethod) else function
    if not isinstance(function, wanted) or inner.__module__.partition(".")[0] != "offbeat":
        raise TypeError(f"{kind.__name__}.{name}, which is no method")
    return function.__get__(None if isinstance(owner, type) else owner, kind)
