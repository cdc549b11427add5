"""Keep what a shard has in memory that outlives the server's process, so that each change of it counts once, and whole.

The operations of a shard have numbers: folds, sums, and whatever else changes memory. An operation reads one half of a memory and writes
the other (`Halves`), and one store of eight bytes, the number of the last operation that is done, makes what it has written count. So after
a death at any instant the half that the operation has read is as it was, and the next process makes the operation again, from the same
gradients: these stay with the workers until they are released.

The memory, whose pages are allocated as they are needed:

    words       the number of the last operation that is done, and how much of the rest is used
    directory   which state tensor lies where, as a list that only grows
    heap        the state tensors, each twice

All stores are in the order of the program: the memory of a process that is killed is as its last instruction left it.

Of a shard whose parameters are on a GPU the state tensors are there, too, in chunks of the GPU's memory that outlive the process as well.
Numbers of the optimizer stay on the host. Work that is done with `once` must wait for the GPU.
"""

from __future__ import annotations

import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack  # type: ignore[import-untyped]
import torch

from offbeat.tensors.layout import ALIGNMENT, aligned, elements

PAGE: Final = 1 << 12
DIRECTORY_NBYTES: Final = 64 << 20
STATES_MAX: Final = 12
"""Most bytes of state for each byte of parameters; an optimizer with more cannot be kept."""
CHUNK_NBYTES: Final = 64 << 20
"""Least bytes of a chunk of a GPU's memory."""
_DONE, _DIRECTORY, _HEAP = range(3)
_KINDS: Final = {"f": float, "i": int, "b": bool}
Place: TypeAlias = int | list[int]
"""Where something begins: the byte of the memory, or the number of a chunk and a byte of it."""


class Sizes(NamedTuple):
    """What the memory of one shard must have room for."""

    nbytes: int
    """Of the parameters."""
    units: int
    """Most pieces of blocks that have a state of their own."""
    sums: int = 0
    """How many sums of gradients, each as large as the parameters."""

    @property
    def heap_at(self) -> int:
        """Return where the heap begins."""
        return PAGE + DIRECTORY_NBYTES

    @property
    def total(self) -> int:
        """Return the size of the memory; pages that are not used are not allocated."""
        return self.heap_at + 2 * _pages(self.nbytes * (STATES_MAX + self.sums) + (self.units + 1) * STATES_MAX * ALIGNMENT)


class _Kept(NamedTuple):
    """A state tensor, or a number."""

    kind: str
    halves: list[torch.Tensor]
    at: Place
    apart: int
    """From one half to the other, in bytes."""


class ShardMemory:
    """The memory of one shard.

    Args:
        view: zeros, or what an earlier process has left.
        grow: called with the place and the size of a part of ``view`` before it is used for the first time.
        sizes: of the shard; the same in each process.
        chunk: returns chunks of a GPU's memory, by number and, for a new one, size; None: the shard is on the host.
    """

    def __init__(
        self,
        view: memoryview,
        grow: Callable[[int, int], None],
        sizes: Sizes,
        chunk: Callable[[int, int], memoryview] | None = None,
    ) -> None:
        assert len(view) >= sizes.total, f"{len(view)} bytes of memory for a shard that needs {sizes.total}"
        self._view, self._grow_by, self._sizes = view, grow, sizes
        self._bytes = torch.frombuffer(view, dtype=torch.uint8)
        self._chunk = chunk
        self._chunks: list[memoryview] = []
        self._filled = 0
        """Bytes in use of the last chunk."""
        self._directory_at = PAGE
        self._grown: dict[int, int] = {}
        """By the place of a part that grows: the place up to which its pages are there."""
        self._need(0, 0, PAGE)
        self._words = view[:PAGE].cast("Q")
        self._number = self.done
        """Of the operation in work, or the last one."""
        self._kept: defaultdict[int, dict[str, _Kept]] = defaultdict(dict)
        """By unit and key. The number of a unit is where in the span it begins, in bytes."""
        self._lock = threading.Lock()
        """Held while a thread extends the heap and the directory."""
        self._named: dict[str, list[torch.Tensor]] = {}
        self.known: set[str] = set()
        """Names whose bytes an operation of an earlier process has written, to its end."""
        self.runs: list[int] | None = None
        """Which tensors form one run of blocks (`Shard.load_state`); None: those of a shard without loaded state."""
        self.cuts: set[int] = set()
        """Where blocks are cut into pieces, in bytes of the span."""
        self._read_directory()

    # Operations.

    @property
    def done(self) -> int:
        """Return the number of the last operation that is done."""
        return self._words[_DONE]

    def once(self, number: int, work: Callable[[], Any], note: Callable[[Any], None] = lambda result: None) -> Any:
        """Do an operation, unless it is done already. Returns what it has measured; None: nothing, or an earlier process has done it.

        Args:
            number: of the operation.
            work: does it, and returns what it has measured.
            note: called with the result, unless this is None, before the operation counts as done.
        """
        if number <= self.done:
            return None
        self._number = number
        result = work()
        if result is not None:
            note(result)
        self._words[_DONE] = number
        return result

    # State.

    def named(self, name: str, nbytes: int) -> list[torch.Tensor]:
        """Return the halves of a part of the heap by its name: zeros at first, and later what they were left as."""
        if name not in self._named:
            at = self._allocate(nbytes) if self._chunk is None else self._allocate_in_chunk(nbytes)
            self._note(["named", self._number, name, at, nbytes])
            self._named[name] = self._halves_at(at, nbytes, aligned(nbytes))
        return self._named[name]

    def state_of(self, unit: int, half: int) -> dict[str, Any]:
        """Return the kept state of a unit, for the optimizer that reads this half."""
        return {key: _value(kept.kind, kept.halves[half]) for key, kept in self._kept[unit].items()}

    def adopt(self, unit: int, half: int, state: dict[str, Any]) -> None:
        """Move into one half of the heap what a step has made or replaced of a unit's state."""
        for key, value in state.items():
            entry = self._kept[unit].get(key)
            if isinstance(value, torch.Tensor):
                kept = None if entry is None else entry.halves[half]
                if kept is not None and kept.data_ptr() == value.data_ptr() and kept.shape == value.shape:
                    continue
                if kept is None or entry is None or entry.kind != "t" or kept.shape != value.shape or kept.dtype != value.dtype:
                    kept = self._make(unit, key, value)[half]
                kept.copy_(value)
                state[key] = kept
            elif value is not None:
                if entry is None or entry.kind != _kind(value):
                    self._make(unit, key, value)
                self._kept[unit][key].halves[half].fill_(value)

    def divide(self, parts: Sequence[tuple[int, int, int]]) -> None:
        """Let each part of a unit be a unit, whose state tensors are where the whole unit's are, and which has its numbers.

        Args:
            parts: where each part begins in the span, in bytes; and its first element in the unit, and how many it has.
        """
        with self._lock:
            self._note(["cuts", self._number, [at for at, *_ in parts[1:]]])
            self.cuts.update(at for at, *_ in parts[1:])
            for key, kept in list(self._kept[parts[0][0]].items()):
                for unit, low, numel in parts if kept.halves[0].dim() else parts[1:]:
                    self._add_part(unit, key, kept, low, numel)

    def _add_part(self, unit: int, key: str, kept: _Kept, low: int, numel: int) -> None:
        whole = kept.halves[0]
        dtype, first = str(whole.dtype).removeprefix("torch."), low * whole.itemsize
        if whole.dim():
            at: Place = kept.at + first if isinstance(kept.at, int) else [kept.at[0], kept.at[1] + first]
            self._add(unit, key, kept.kind, dtype, [numel], [1], at, kept.apart)
            return
        at = (self._allocate if isinstance(kept.at, int) else self._allocate_in_chunk)(whole.itemsize)
        for half, value in zip(self._add(unit, key, kept.kind, dtype, [], [], at, aligned(whole.itemsize)), kept.halves, strict=True):
            half.copy_(value)

    def clear(self, runs: list[int]) -> None:
        """Forget the state of all units: another one is loaded, with which the blocks are cut anew."""
        self._note(["runs", self._number, runs])
        self._forget(runs)

    def _forget(self, runs: list[int]) -> None:
        self._kept.clear()
        self.cuts.clear()
        self.runs = runs

    def _make(self, unit: int, key: str, value: Any) -> list[torch.Tensor]:
        kind = _kind(value)
        if isinstance(value, torch.Tensor):
            dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
            dense = torch.ops.aten.is_non_overlapping_and_dense(value)
            stride = list(value.stride()) if dense else list(torch.empty(shape, device="meta").stride())
        else:
            dtype, shape, stride = "float64" if kind == "f" else "int64", [], []
        with self._lock:
            on_host = self._chunk is None or not isinstance(value, torch.Tensor) or (value.dim() == 0 and value.is_cpu)
            nbytes = _nbytes(dtype, shape)
            at = (self._allocate if on_host else self._allocate_in_chunk)(nbytes)
            return self._add(unit, key, kind, dtype, shape, stride, at, aligned(nbytes))

    def _add(
        self, unit: int, key: str, kind: str, dtype: str, shape: list[int], stride: list[int], at: Place, apart: int
    ) -> list[torch.Tensor]:
        """Note what is kept at a place. The caller holds the lock. Returns its halves."""
        self._note(["state", self._number, unit, key, kind, dtype, shape, stride, at, apart])
        self._kept[unit][key] = kept = _Kept(kind, self._tensors(dtype, shape, stride, at, apart), at, apart)
        return kept.halves

    def _tensors(self, dtype: str, shape: list[int], stride: list[int], at: Place, apart: int) -> list[torch.Tensor]:
        flats = [half.view(getattr(torch, dtype)) for half in self._halves_at(at, _nbytes(dtype, shape), apart)]
        return [torch.as_strided(flat, shape, stride, flat.storage_offset()) for flat in flats]

    def _halves_at(self, at: Place, nbytes: int, apart: int) -> list[torch.Tensor]:
        if isinstance(at, int):
            return [self._bytes[start : start + nbytes] for start in (at, at + apart)]
        number, first = at
        return [elements(self._chunks[number], start, nbytes, torch.uint8) for start in (first, first + apart)]

    def _allocate_in_chunk(self, nbytes: int) -> Place:
        """Return the place of two halves of so many bytes, which are zeros."""
        more = 2 * aligned(nbytes)
        if not self._chunks or self._filled + more > self._chunks[-1].nbytes:
            self._add_chunk(max(more, CHUNK_NBYTES))
        at = [len(self._chunks) - 1, self._filled]
        self._filled += more
        for half in self._halves_at(at, nbytes, aligned(nbytes)):
            half.zero_()
        return at

    def _add_chunk(self, nbytes: int) -> None:
        assert self._chunk is not None
        self._chunks.append(self._chunk(len(self._chunks), nbytes))
        self._filled = 0

    def _used(self, at: Place, nbytes: int, apart: int) -> None:
        """Note that an earlier process has used a place, which may be in a chunk that this one does not have yet."""
        if not isinstance(at, int):
            while len(self._chunks) <= at[0]:
                self._add_chunk(max(apart + aligned(nbytes), CHUNK_NBYTES))
            self._filled = max(self._filled, at[1] + apart + aligned(nbytes))

    def _allocate(self, nbytes: int) -> int:
        """Return the place of two halves of so many bytes."""
        used, more = self._words[_HEAP], 2 * aligned(nbytes)
        at = self._sizes.heap_at + used
        if used + more > self._sizes.total - self._sizes.heap_at:
            raise MemoryError(f"the optimizer's state has more than {STATES_MAX} times the bytes of the parameters")
        self._need(self._sizes.heap_at, at, more)
        self._words[_HEAP] = used + more
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
            kind, number, *entry = msgpack.unpackb(self._view[at + 4 : at + 4 + size])
            at += 4 + size
            match kind, entry:
                case "named", [_, place, nbytes]:
                    self._used(place, nbytes, aligned(nbytes))
                case "state", [_, _, _, dtype, shape, _, place, apart]:
                    self._used(place, _nbytes(dtype, shape), apart)
            if number > self.done:
                continue  # an operation has made it that did not come to its end, and is made again
            match kind, entry:
                case "runs", [runs]:
                    self._forget(runs)
                case "cuts", [cuts]:
                    self.cuts.update(cuts)
                case "named", [name, place, nbytes]:
                    self._named[name] = self._halves_at(place, nbytes, aligned(nbytes))
                    self.known.add(name)
                case "state", [unit, key, what, dtype, shape, stride, place, apart]:
                    self._kept[unit][key] = _Kept(what, self._tensors(dtype, shape, stride, place, apart), place, apart)

    def _need(self, part: int, start: int, nbytes: int) -> None:
        """Have the pages of ``start`` to ``start + nbytes`` allocated; a ``part`` grows from its beginning on."""
        stop = start + nbytes
        grown = self._grown.get(part, part)
        if stop > grown:
            low = grown // PAGE * PAGE
            high = min(_pages(stop), len(self._view))
            self._grow_by(low, high - low)
            self._grown[part] = high


def named_halves(kept: ShardMemory | None, name: str, nbytes: int, count: int, device: torch.device) -> list[torch.Tensor]:
    """Return the halves of a part of the kept memory by its name, or as many zeros (``count``), which die with the process.

    ``device``: that of the shard's parameters.
    """
    if kept is not None:
        return kept.named(name, nbytes)
    return [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]


def _kind(value: Any) -> str:
    return "t" if isinstance(value, torch.Tensor) else "b" if isinstance(value, bool) else "i" if isinstance(value, int) else "f"


def _value(kind: str, kept: torch.Tensor) -> Any:
    return kept if kind == "t" else _KINDS[kind](kept.item())


def _nbytes(dtype: str, shape: list[int]) -> int:
    return prod(shape) * getattr(torch, dtype).itemsize  # type: ignore[no-any-return]


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
