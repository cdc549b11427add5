"""Keep a shard's optimizer state in memory that outlives the server's process, and undo what a fold had half done when the process died.

A fold changes one *unit* after another, for instance a block of the parameters with its optimizer state. Before a unit is changed its bytes
are copied to the side, and afterwards it is marked with the number of the operation. So after a death at any instant each unit is either
as it was before the operation, or as it is after it; a unit that was in work is put back. The next process does the operation again and
leaves out the units that bear its mark. The operations of a shard have numbers: folds, sums, and whatever else changes memory.

The memory, whose pages are allocated as they are needed:

    words       the numbers of the last operation that is done and of the one in work, and how much of the rest is used
    marks       for each unit the number of the last operation that has changed it, and a number that this operation has measured
    result      what the last operation has measured
    directory   which state tensor lies where, as a list that only grows
    undo        for each thread the bytes of the unit that it works on
    heap        the state tensors

All stores are in the order of the program: the memory of a process that is killed is as its last instruction left it.
"""

from __future__ import annotations

import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgpack  # type: ignore[import-untyped]
import torch

from offbeat.tensors.layout import Memory

PAGE: Final = 1 << 12
DIRECTORY_NBYTES: Final = 64 << 20
RESULT_NBYTES: Final = 1 << 20
STATES_MAX: Final = 12
"""Most bytes of state for each byte of parameters; an optimizer with more cannot be kept."""
GROWTH_NBYTES: Final = 1 << 20
_ALIGN: Final = 64
_DONE, _WORK, _DIRECTORY, _HEAP, _RESULT = range(5)
_KINDS: Final = {"f": float, "i": int, "b": bool}


class Sizes(NamedTuple):
    """What the memory of one shard must have room for."""

    nbytes: int
    """Of the parameters."""
    units: int
    """Most units of one operation."""
    unit_nbytes: int
    """Parameters of the largest unit."""
    lanes: int
    """How many units are in work at a time."""
    sums: int = 0
    """How many sums of gradients, each as large as the parameters."""

    @property
    def undo_nbytes(self) -> int:
        """Return the room for one unit that is in work."""
        return _pages(PAGE + self.unit_nbytes * (1 + STATES_MAX) + (1 << 16))

    @property
    def heap_at(self) -> int:
        """Return where the heap begins."""
        return PAGE + _pages(16 * self.units) + RESULT_NBYTES + DIRECTORY_NBYTES + self.lanes * self.undo_nbytes

    @property
    def total(self) -> int:
        """Return the size of the memory; pages that are not used are not allocated."""
        return self.heap_at + _pages(self.nbytes * (STATES_MAX + self.sums) + (self.units + 1) * STATES_MAX * _ALIGN)


class ShardMemory:
    """The memory of one shard.

    Args:
        view: zeros, or what an earlier process has left.
        grow: called with the place and the size of a part of ``view`` before it is used for the first time.
        sizes: of the shard; the same in each process.
        parameters: of the shard.
        noted: called with the number and the result of each operation that has measured something.
    """

    def __init__(
        self,
        view: memoryview,
        grow: Callable[[int, int], None],
        sizes: Sizes,
        parameters: Memory,
        noted: Callable[[int, Any], None] = lambda number, result: None,
    ) -> None:
        assert len(view) >= sizes.total, f"{len(view)} bytes of memory for a shard that needs {sizes.total}"
        self._view, self._grow_by, self._noted = view, grow, noted
        self._sizes = sizes
        self._bytes = torch.frombuffer(view, dtype=torch.uint8)
        self._parameters = parameters if isinstance(parameters, torch.Tensor) else _flat(parameters)
        self._regions = (self._parameters, self._bytes)
        marks_at = PAGE
        self._result_at = marks_at + _pages(16 * sizes.units)
        self._directory_at = self._result_at + RESULT_NBYTES
        self._undo_at = self._directory_at + DIRECTORY_NBYTES
        self._grown: dict[int, int] = {}
        """By the place of a part that grows: the place up to which its pages are there."""
        self._need(0, 0, self._result_at)
        self._words = view[:PAGE].cast("Q")
        marks = view[marks_at : marks_at + 16 * sizes.units]
        self._marks, self._numbers = marks[: 8 * sizes.units].cast("Q"), marks[8 * sizes.units :].cast("d")
        self._kept: defaultdict[int, dict[str, tuple[str, torch.Tensor]]] = defaultdict(dict)
        """By unit and key: the kind of a kept state, and where it is kept."""
        self._lock = threading.Lock()
        """Held while a thread extends the heap and the directory."""
        self._named: dict[str, torch.Tensor] = {}
        self.known: set[str] = set()
        """Names whose bytes an operation of an earlier process has written, to its end."""
        self.runs: list[int] | None = None
        """Which tensors form one run of blocks (`Shard.load_state`); None: those of a shard without loaded state."""
        self._results: dict[int, Any] = {}
        for lane in range(sizes.lanes):
            self._put_back(lane)
        self._read_directory()

    # Operations.

    @property
    def done(self) -> int:
        """Return the number of the last operation that is done."""
        return self._words[_DONE]

    def expect(self, results: Mapping[int, Any]) -> None:
        """Take the results of operations before the last one, for `once`."""
        self._results.update(results)

    def once(self, number: int, work: Callable[[], Any]) -> Any:
        """Do an operation, unless it is done already. Returns its result."""
        if number <= self.done:
            if number == self.done and (size := self._words[_RESULT]):
                return msgpack.unpackb(self._view[self._result_at : self._result_at + size])
            return self._results.pop(number, None)
        self._words[_WORK] = number
        result = work()
        packed = msgpack.packb(result) if result is not None else b""
        assert len(packed) <= RESULT_NBYTES, f"a result of {len(packed)} bytes (at most {RESULT_NBYTES})"
        self._words[_RESULT] = 0  # that of the operation before, which is in the log
        self._need(self._result_at, self._result_at, len(packed))
        self._view[self._result_at : self._result_at + len(packed)] = packed
        self._words[_RESULT] = len(packed)
        self._words[_DONE] = number
        if result is not None:
            self._noted(number, result)
        return result

    # Units.

    def is_done(self, unit: int) -> bool:
        """Return True if the operation in work has changed this unit."""
        return self._marks[unit] == self._words[_WORK]

    def save(self, lane: int, unit: int, tensors: Iterable[torch.Tensor]) -> None:
        """Copy what is about to be changed to the side. The tensors are the parameters' or kept ones."""
        at = self._undo_at + lane * self._sizes.undo_nbytes
        places, stop = [], at + PAGE + (1 << 16)
        self._need(at, at, PAGE + (1 << 16))
        for tensor in tensors:
            region, start, nbytes = self._place(tensor)
            self._need(stop, stop, nbytes)
            self._bytes[stop : stop + nbytes].copy_(self._regions[region][start : start + nbytes])
            places.append((region, start, nbytes, stop))
            stop += _aligned(nbytes)
        packed = msgpack.packb([unit, self._words[_WORK], places])
        assert len(packed) <= 1 << 16, f"{len(places)} state tensors of one unit"
        self._view[at + PAGE : at + PAGE + len(packed)] = packed
        self._view[at : at + 8] = struct.pack("=Q", len(packed))

    def commit(self, lane: int, unit: int, number: float = 0.0) -> None:
        """Mark a unit as changed; ``number`` is what was measured of it, for `number_of`."""
        self._numbers[unit] = number
        self._marks[unit] = self._words[_WORK]
        at = self._undo_at + lane * self._sizes.undo_nbytes
        self._view[at : at + 8] = bytes(8)

    def number_of(self, unit: int) -> float:
        """Return what was measured of a unit when it was last changed."""
        return self._numbers[unit]

    def _put_back(self, lane: int) -> None:
        at = self._undo_at + lane * self._sizes.undo_nbytes
        (size,) = struct.unpack("=Q", self._view[at : at + 8])
        if not size:
            return
        unit, number, places = msgpack.unpackb(self._view[at + PAGE : at + PAGE + size])
        if self._marks[unit] != number:
            for region, start, nbytes, saved in places:
                self._regions[region][start : start + nbytes].copy_(self._bytes[saved : saved + nbytes])
        self._view[at : at + 8] = bytes(8)

    # State.

    def named(self, name: str, nbytes: int) -> torch.Tensor:
        """Return bytes of the heap under a name: zeros at first, and later what they were left as."""
        if name not in self._named:
            at = self._allocate(nbytes)
            self._note(["named", name, at, nbytes, self._words[_WORK]])
            self._named[name] = self._bytes[at : at + nbytes]
        return self._named[name]

    def state_of(self, unit: int) -> dict[str, Any]:
        """Return the kept state of a unit, for the optimizer."""
        return {key: _value(kind, kept) for key, (kind, kept) in self._kept[unit].items()}

    def kept(self, unit: int, state: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the kept tensors of a unit's state, to be saved before they are changed."""
        return [entry[1] for key in state if (entry := self._kept[unit].get(key)) is not None]

    def adopt(self, unit: int, state: dict[str, Any]) -> None:
        """Move into the heap what a step has made or replaced of a unit's state."""
        for key, value in state.items():
            entry = self._kept[unit].get(key)
            if isinstance(value, torch.Tensor):
                if entry is not None and entry[1].data_ptr() == value.data_ptr() and entry[1].shape == value.shape:
                    continue
                if entry is None or entry[0] != "t" or entry[1].shape != value.shape or entry[1].dtype != value.dtype:
                    entry = self._make(unit, key, value)
                entry[1].copy_(value)
                state[key] = entry[1]
            elif value is not None:
                kind = "b" if isinstance(value, bool) else "i" if isinstance(value, int) else "f"
                if entry is None or entry[0] != kind:
                    entry = self._make(unit, key, value)
                entry[1].fill_(value)

    def clear(self, runs: list[int]) -> None:
        """Forget the state of all units: another one is loaded, with which the blocks are cut anew."""
        self._note(["runs", runs])
        self._kept.clear()
        self.runs = runs

    def _make(self, unit: int, key: str, value: Any) -> tuple[str, torch.Tensor]:
        if isinstance(value, torch.Tensor):
            kind, dtype, shape = "t", str(value.dtype).removeprefix("torch."), list(value.shape)
            stride = list(value.stride()) if _dense(value) else list(torch.empty(shape, device="meta").stride())
        else:
            kind = "b" if isinstance(value, bool) else "i" if isinstance(value, int) else "f"
            dtype, shape, stride = "float64" if kind == "f" else "int64", [], []
        entry = [unit, key, self._words[_WORK], kind, dtype, shape, stride]
        with self._lock:
            at = self._allocate(_nbytes(dtype, shape))
            self._note(["state", *entry, at])
        made = self._kept[unit][key] = kind, self._tensor(dtype, shape, stride, at)
        return made

    def _tensor(self, dtype: str, shape: list[int], stride: list[int], at: int) -> torch.Tensor:
        flat = self._bytes[at : at + _nbytes(dtype, shape)].view(getattr(torch, dtype))
        return torch.as_strided(flat, shape, stride, flat.storage_offset())

    def _allocate(self, nbytes: int) -> int:
        used = self._words[_HEAP]
        at = self._sizes.heap_at + used
        if used + _aligned(nbytes) > self._sizes.total - self._sizes.heap_at:
            raise MemoryError(f"the optimizer's state has more than {STATES_MAX} times the bytes of the parameters")
        self._need(self._sizes.heap_at, at, nbytes)
        self._words[_HEAP] = used + _aligned(nbytes)
        return at

    def _note(self, entry: list[Any]) -> None:
        packed = msgpack.packb(entry)
        used = self._words[_DIRECTORY]
        if used + 4 + len(packed) > DIRECTORY_NBYTES:
            raise MemoryError(f"the directory of the optimizer's state has more than {DIRECTORY_NBYTES} bytes")
        at = self._directory_at + used
        self._need(self._directory_at, at, 4 + len(packed))
        self._view[at : at + 4 + len(packed)] = struct.pack("=I", len(packed)) + packed
        self._words[_DIRECTORY] = used + 4 + len(packed)

    def _read_directory(self) -> None:
        at, stop = self._directory_at, self._directory_at + self._words[_DIRECTORY]
        while at < stop:
            (size,) = struct.unpack("=I", self._view[at : at + 4])
            entry = msgpack.unpackb(self._view[at + 4 : at + 4 + size])
            at += 4 + size
            match entry:
                case ["runs", runs]:
                    self._kept.clear()
                    self.runs = runs
                case ["named", name, place, nbytes, number]:
                    self._named[name] = self._bytes[place : place + nbytes]
                    if number <= self._words[_DONE]:
                        self.known.add(name)
                case ["state", unit, key, number, kind, dtype, shape, stride, place]:
                    # A step that was undone has made it: the next one makes it anew.
                    if number <= self._words[_DONE] or self._marks[unit] == number:
                        self._kept[unit][key] = kind, self._tensor(dtype, shape, stride, place)

    def _place(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        nbytes = tensor.numel() * tensor.element_size()
        for number, region in enumerate(self._regions):
            start = tensor.data_ptr() - region.data_ptr()
            if start >= 0 and start + nbytes <= region.numel():
                return number, start, nbytes
        raise AssertionError("what is saved is neither of the parameters nor kept")

    def _need(self, part: int, start: int, nbytes: int) -> None:
        """Have the pages of ``start`` to ``start + nbytes`` allocated; a ``part`` grows from its beginning on."""
        stop = start + nbytes
        grown = self._grown.get(part, part)
        if stop > grown:
            low = grown // PAGE * PAGE
            high = min(_pages(stop), len(self._view))
            self._grow_by(low, high - low)
            self._grown[part] = high


def _value(kind: str, kept: torch.Tensor) -> Any:
    return kept if kind == "t" else _KINDS[kind](kept.item())


def _nbytes(dtype: str, shape: list[int]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel * getattr(torch, dtype).itemsize  # type: ignore[no-any-return]


def _dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _flat(memory: Any) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
