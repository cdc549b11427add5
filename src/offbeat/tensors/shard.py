"""Hold a server's share of the model: the parameters of one span, the optimizer's state for them, and the fold that makes a new version.

A fold is bound by memory bandwidth, so it goes through the span in blocks that stay in the cache: sum a block of every gradient into one
scratch block, and step the optimizer on that block of the parameters. Nothing large is allocated once the optimizer's state exists.
Tensors of which no worker had a gradient are left alone with their state (`absent`): a block that has such tensors and others is stepped in
pieces from then on, each with a state of its own.
Where a death must not leave half of a fold, parameters and state have two halves: a step reads one and writes the other (`Halves`).
`blocks.py` cuts the span into blocks; this file sums, steps, and exports and imports the state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.tensors.absent import Words, candidates, is_absent, words_of
from offbeat.tensors.blocks import Block, OwnState, block_numel, blocks_of, divided, owned, owned_state, runs_of, signs_of, spread
from offbeat.tensors.halves import Halves
from offbeat.tensors.layout import Layout, Memory, Span, elements
from offbeat.tensors.optimizers import Hyperparameters, OptimizerSpec, as_arguments, build, check_changed, checked
from offbeat.tensors.pieces import Headers, pack, piece_of, unpack
from offbeat.tensors.shard_memory import ShardMemory, Sizes, named_halves
from offbeat.tensors.steps import step_across
from offbeat.tensors.threads import single_threaded

BLOCKS_PER_BATCH = 2
"""Blocks for each lane between two reports of how far a fold has come: 4 MiB of float32."""


Measures: TypeAlias = Literal["nothing", "norms", "differences"]


class SquaredNorms(NamedTuple):
    """Squared Euclidean norms over one span; those of a whole model are the sums over its spans."""

    parts: tuple[float, ...]
    """Of each gradient, in the order given."""
    total: float
    """Of their weighted sum g."""
    difference: float | None = None
    """Of g minus the g of the previous fold; None if this was not asked for, or there is no previous fold."""


class Shard:
    """The parameters of one span and their optimizer.

    Args:
        layout: the job's layout.
        span: which bytes of it are here.
        spec: the optimizer; it is built here, from torch's own classes.
        memory: the ``span.nbytes`` bytes of parameters, writable: a memoryview (format ``B``) or a flat uint8 tensor, which is stepped
            in place; or two halves, of which the caller turns the next one before a call that changes them.
        threads: how many blocks are worked on at a time. torch's own threads are not used: on a host full of workers, waiting
            for them at the end of each of many small operations costs more than a hundred times the work.
        kept: makes the memory in which the optimizer's state outlives the process, for a shard with two halves; None: the state dies
            with the process.

    Raises:
        ConfigurationError: the span cuts a tensor although the optimizer needs whole ones, or the memory has another size.

    >>> from torch import nn
    >>> from offbeat.tensors.optimizers import spec_of
    >>> model = nn.Linear(2, 1, bias=False)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> layout = Layout.of(model, sgd)
    >>> parameters, gradient = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    >>> gradient.view(torch.float32)[:2] = torch.tensor([4.0, 8.0])
    >>> shard = Shard(layout, layout.spans(1, True)[0], spec_of(sgd), parameters)
    >>> shard.fold([(gradient, 0.5)])
    >>> parameters.view(torch.float32)[:2]
    tensor([-2., -4.])
    """

    def __init__(
        self,
        layout: Layout,
        span: Span,
        spec: OptimizerSpec,
        memory: Memory | Halves,
        *,
        threads: int = 1,
        kept: Callable[[Sizes], ShardMemory] | None = None,
    ) -> None:
        self._halves = memory if isinstance(memory, Halves) else Halves(memory)
        for view in self._halves.views:
            if view.nbytes != span.nbytes:
                raise ConfigurationError(f"a span of {span.nbytes} bytes was given {view.nbytes} bytes of memory; they must be equal")
        if max(tensor.group for tensor in layout.tensors) >= len(spec.groups):
            raise ConfigurationError(f"the layout has more parameter groups than the optimizer, which has {len(spec.groups)}")
        self.layout, self.span, self.spec = layout, span, spec
        self._own = owned(layout, span)
        if not spec.elementwise and any((own.start, own.stop) != (0, own.spec.numel) for own in self._own):
            raise ConfigurationError(f"{spec.name} needs whole tensors, but a span cuts one: use layout.spans(count, splittable=False)")
        self._groups = [dict(group) for group in spec.groups]
        self._scale = 1.0
        self._state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        self._last: list[torch.Tensor] | None = None
        """The bytes of the last g, in as many halves, if differences are measured."""
        self._units = self._cut(runs_of(self._own, {}))
        self.kept = None if kept is None else kept(Sizes(span.nbytes, len(self._units) + len(self._own)))
        """The memory that outlives the process; None: there is none. Loaded state, and tensors without a gradient, may cut as many more
        pieces as there are tensors."""
        if self.kept is not None:
            if "last" in self.kept.known:
                self._last = self.kept.named("last", span.nbytes)
            if self.kept.runs is not None:
                self._units = self._cut(self.kept.runs)
            for unit in self._units:
                unit.divide(self.kept.cuts)
                for blocks in unit.pieces:
                    for half, block in enumerate(blocks):
                        if values := self.kept.state_of(block.at, half):
                            self._state[block.parameter] = values
        self._lanes = self._make_lanes(max(1, threads))
        self._pool = ThreadPoolExecutor(threads - 1, "offbeat-fold") if threads > 1 else None

    def fold(
        self,
        gradients: Sequence[tuple[Memory, float]],
        hyperparameters: Sequence[Hyperparameters] | None = None,
        *,
        scale: float = 1.0,
        measures: Measures = "nothing",
        ready: Callable[[int], None] | None = None,
        total: Memory | None = None,
    ) -> SquaredNorms | None:
        """Make a new version: ``g = sum(weight * gradient)``, then one step of the optimizer with g.

        Sums of bfloat16 and float16 gradients are accumulated in float32 and rounded once.

        Args:
            gradients: for each contribution the ``span.nbytes`` bytes of its push memory that belong to this span, and its weight.
            hyperparameters: each parameter group's settings from now on (see `optimizers.hyperparameters`); None: as before.
            scale: the factor of every learning rate in this one step.
            measures: also return the squared norms of the gradients and of g, and for ``differences`` that of g minus the g before, for
                which one more copy of g is kept from then on. They are summed in float64 over blocks, each block's in float32 (float64 for
                float64 gradients); relative error about 1e-6.
            ready: called while the fold goes on, each time with the number of bytes from the span's first on that are new by now.
            total: ``span.nbytes`` bytes that g is written to. A fold of ``[(total, 1.0)]`` makes the same step, bit for bit.

        Raises:
            ProtocolError: a gradient of another size, or settings that this optimizer refuses. Nothing has changed then.
        """
        folding = self.begin_fold(gradients, hyperparameters, scale=scale, measures=measures, total=total, at_once=ready is None)
        while folding.next is not None:
            folding.step()
            if ready is not None:
                ready(folding.made)
        return folding.norms()

    def begin_fold(
        self,
        gradients: Sequence[tuple[Memory, float]],
        hyperparameters: Sequence[Hyperparameters] | None = None,
        *,
        scale: float = 1.0,
        measures: Measures = "nothing",
        total: Memory | None = None,
        at_once: bool = False,
    ) -> Folding:
        """Begin a fold whose gradients may still be on their way; ``at_once``: it is made in one step. The rest is as in `fold`."""
        assert gradients, "fold() without contributions"
        for memory, _ in gradients:
            if memory.nbytes != self.span.nbytes:
                raise ProtocolError(f"a gradient of {memory.nbytes} bytes for a span of {self.span.nbytes} bytes")
        before = self._groups, self._scale
        if hyperparameters is not None and hyperparameters != self._groups:
            check_changed(self.spec, hyperparameters)
            self._configure([dict(group) for group in hyperparameters], scale)
        elif scale != self._scale:
            self._configure(self._groups, scale)
        typed = {dtype: [self._typed(m, dtype) for m, _ in gradients] for dtype in self._dtypes()}
        norms, compares = measures != "nothing", self._last is not None
        last = self._lasts() if measures == "differences" else None
        sums_at = None if total is None else {dtype: self._typed(total, dtype) for dtype in self._dtypes()}
        work = _Work(iter(()), typed, [weight for _, weight in gradients], norms, self._halves.half, last, sums_at)
        return Folding(self._run, work, self._batches(at_once), compares, lambda: self._configure(*before))

    def _batches(self, at_once: bool) -> Iterator[list[_Unit]]:
        """Yield the units in order of place: all of them, or as many at a time as keep each lane busy."""
        count = len(self._units) if at_once else BLOCKS_PER_BATCH * len(self._lanes)
        return (self._units[start : start + count] for start in range(0, len(self._units), max(1, count)))

    def _run(self, work: _Work, units: list[_Unit]) -> list[list[float]]:
        """Have the lanes work on these units. Returns what each lane has measured.

        Small blocks take more time in Python, where the lanes wait for each other, than in memory: as many lanes as there are full ones.
        """
        work, count = work._replace(units=iter(units)), len(units)
        if self.spec.elementwise:
            count = min(count, -(-sum(unit.blocks[0].numel for unit in units) // block_numel(self._halves.now)))
        others = [self._pool.submit(_in_thread, lane, work) for lane in self._lanes[1:count]] if self._pool is not None else []
        return [self._lanes[0].run(work), *(other.result() for other in others)]

    def gather(self, into: Memory, gradient: Memory, weight: float, before: Memory | None) -> None:
        """``into = before + weight * gradient``, all of this span, rounded in the gradients' own precision; None: zero before."""
        for unit in self._units:
            block, dtype = unit.blocks[0], unit.blocks[0].parameter.dtype
            to, part = (self._typed(memory, dtype)[block.first : block.first + block.numel] for memory in (into, gradient))
            part = part.to(to.device)
            if before is None:
                torch.mul(part, weight, out=to)
            else:
                torch.add(self._typed(before, dtype)[block.first : block.first + block.numel], part, alpha=weight, out=to)

    def state(self) -> tuple[Headers, list[bytes | memoryview]]:
        """Return the optimizer's state of this span: headers, and their bytes, which the next fold changes.

        See `state.assemble_state_dict`.
        """
        pieces = []
        for block in (blocks[self._halves.half] for unit in self._units for blocks in unit.pieces):
            for part in block.parts:
                for key, value in self._state.get(block.parameter, {}).items():
                    value = torch.as_tensor(value)
                    if block.whole or value.dim() == 0:
                        if part.start == part.own.start:
                            pieces.append(piece_of(part.own.tensor, key, 0, value.reshape(-1), tuple(value.shape)))
                    else:
                        values = value[part.at : part.at + part.stop - part.start]
                        pieces.append(piece_of(part.own.tensor, key, part.start, values, None))
        return pack(pieces)

    def read_state(self, headers: Any, payload: bytes | memoryview) -> OwnState:
        """Return the state of this span that these pieces contain, for `load_state`.

        Args:
            headers: from `state` or `state.split_state_dict`; pieces of other spans are ignored.
            payload: their bytes, joined.

        Raises:
            ProtocolError: the pieces do not fit the layout, or a state tensor is only partly there.
        """
        return owned_state(self._own, unpack(self.layout, headers, payload), elementwise=self.spec.elementwise)

    def load_state(self, state: OwnState) -> None:
        """Replace the optimizer's state by what `read_state` has returned; state that is missing there starts from the beginning."""
        runs = runs_of(self._own, state)
        self._units = self._cut(runs)
        self._state.clear()
        if self.kept is not None:
            self.kept.clear(runs)
        half = self._halves.half
        for unit in self._units:
            block = unit.blocks[half]
            if values := spread(block, state):
                self._state[block.parameter] = values
                if self.kept is not None:
                    self.kept.adopt(block.at, half, values)
        self._lanes = self._make_lanes(len(self._lanes))

    def whole_state(self) -> dict[str, Any]:
        """Return, for `load_whole_state`, all that decides what the next fold makes beside the parameters. That fold changes the bytes."""
        headers, pieces = self.state()
        last = None if self._last is None else self._last[self._halves.half].cpu().numpy().data
        return {"headers": headers, "pieces": pieces, "groups": self._groups, "scale": self._scale, "last": last}

    def load_whole_state(self, whole: Mapping[str, Any]) -> None:
        """Go on where another shard of the same span was. Raises `ProtocolError` if its state does not fit the layout."""
        self.load_state(self.read_state(whole["headers"], b"".join(whole["pieces"])))
        self._configure(checked(self.spec.name, whole["groups"]), float(whole["scale"]))
        if whole["last"] is not None:
            self._lasts()
            assert self._last is not None
            self._last[self._halves.half].copy_(torch.frombuffer(bytearray(whole["last"]), dtype=torch.uint8))

    def _make_lanes(self, count: int) -> list[_Lane]:
        numel = block_numel(self._halves.now)
        return [_Lane(self.spec.name, self._groups, self._units, self._state, self.kept, numel) for _ in range(count)]

    def _cut(self, runs: list[int]) -> list[_Unit]:
        whole = not self.spec.elementwise
        halves = (blocks_of(self._own, half, runs, whole=whole) for half in self._halves.views)
        return [_Unit(blocks) for blocks in zip(*halves, strict=True)]

    def _dtypes(self) -> set[torch.dtype]:
        return {unit.blocks[0].parameter.dtype for unit in self._units}

    def _typed(self, memory: Memory, dtype: torch.dtype) -> torch.Tensor:
        return elements(memory, 0, self.span.nbytes // dtype.itemsize, dtype)

    def _lasts(self) -> list[dict[torch.dtype, torch.Tensor]]:
        """Return the last g in each half, by dtype."""
        if self._last is None:
            device = elements(self._halves.now, 0, 0, torch.uint8).device
            self._last = named_halves(self.kept, "last", self.span.nbytes, len(self._halves.views), device)
        return [{dtype: self._typed(last, dtype) for dtype in self._dtypes()} for last in self._last]

    def _configure(self, groups: list[Hyperparameters], scale: float) -> None:
        if len(groups) != len(self._groups):
            raise ProtocolError(f"settings for {len(groups)} parameter groups; the optimizer has {len(self._groups)}")
        self._groups, self._scale = groups, scale
        for lane in self._lanes:
            lane.configure([{**group, "lr": group["lr"] * scale} for group in groups] if scale != 1.0 else groups)


_Piece: TypeAlias = tuple[Block, ...]
"""One block in all halves, which is stepped as a whole and has a state of its own."""


class _Unit:
    """One block in all halves, summed at once, and stepped in one or more pieces."""

    def __init__(self, blocks: _Piece) -> None:
        self.blocks = blocks
        self.pieces = [blocks]
        """In the order of memory."""
        self.signs = signs_of(blocks[0])
        """Where a look tells whether a tensor may be without a gradient."""

    def divide(self, cuts: Collection[int]) -> list[tuple[_Piece, list[_Piece]]]:
        """Cut pieces at these bytes of the span, where parts of tensors begin. Returns each piece that is cut, and what it is cut into."""
        made = [(piece, list(zip(*(divided(block, cuts) for block in piece), strict=True))) for piece in self.pieces]
        self.pieces = [new for _, pieces in made for new in pieces]
        return [(piece, pieces) for piece, pieces in made if len(pieces) > 1]


class _Work(NamedTuple):
    """One fold. The lanes take units from the same iterator until none is left."""

    units: Iterator[_Unit]
    gradients: dict[torch.dtype, list[torch.Tensor]]
    """By dtype: each contribution's span, read as that dtype."""
    weights: list[float]
    norms: bool
    half: int
    """Which is written."""
    last: list[dict[torch.dtype, torch.Tensor]] | None
    """The sum of the previous fold in each half, to be compared and replaced; None: differences are not measured."""
    total: dict[torch.dtype, torch.Tensor] | None
    """Where the sum is written to; None: nowhere."""


class Folding:
    """A fold in the making: `step` makes the next part of the new version. Nothing else may be done with the shard before the last one.

    Args:
        run: works on units, and returns what each lane has measured.
        work: the fold, without units.
        batches: the units of each step.
        compares: True if there was a g before.
        undo: takes back the settings that this fold has brought.
    """

    def __init__(
        self,
        run: Callable[[_Work, list[_Unit]], list[list[float]]],
        work: _Work,
        batches: Iterator[list[_Unit]],
        compares: bool,
        undo: Callable[[], None],
    ) -> None:
        self._run, self._work, self._batches, self._compares, self.undo = run, work, batches, compares, undo
        self._sums: list[list[float]] = []
        self.made = 0
        """How many bytes are new, from the span's first on."""
        self._units = next(batches, None)

    @property
    def next(self) -> int | None:
        """Return how many bytes of the gradients the next step needs, and how many are new after it; None: there is none."""
        if self._units is None:
            return None
        block = self._units[-1].blocks[0]
        return (block.first + block.numel) * block.parameter.itemsize

    def step(self) -> None:
        """Make the next part."""
        assert self._units is not None and self.next is not None
        with single_threaded():
            self._sums += self._run(self._work, self._units)
        self.made, self._units = self.next, next(self._batches, None)

    def norms(self) -> SquaredNorms | None:
        """Return what was measured, after the last step."""
        if not self._work.norms:
            return None
        totals = [sum(column) for column in zip(*self._sums, strict=True)] or [0.0] * (len(self._work.weights) + 2)
        differs = self._work.last is not None and self._compares
        return SquaredNorms(tuple(totals[:-2]), totals[-2], totals[-1] if differs else None)


class _Lane:
    """Hold what one thread needs: scratch memory, and an optimizer for each parameter group that is given one block after another.

    The lanes share the state, which torch keeps by parameter; a block belongs to one lane at a time.
    """

    def __init__(
        self,
        name: str,
        groups: list[Hyperparameters],
        units: list[_Unit],
        state: defaultdict[torch.Tensor, Any],
        kept: ShardMemory | None,
        step_numel: int,
    ) -> None:
        self._state, self._kept = state, kept
        self._name, self._groups = name, groups
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._early = False
        """True if the optimizer makes its state when it is made. The Adagrad of torch 2.6 does not make it in a step as well."""
        blocks = [unit.blocks[0] for unit in units]
        for block in blocks:
            if block.group not in self._optimizers:
                first = torch.zeros(1, 1, device=block.parameter.device)
                optimizer = self._optimizers[block.group] = build(name, groups[block.group], [first])
                self._early = bool(optimizer.state)
                optimizer.state = state
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._words: dict[torch.dtype, Words] = {}
        """Of the scratch memory."""
        for dtype in {block.parameter.dtype for block in blocks}:
            numel = max(block.numel for block in blocks if block.parameter.dtype == dtype)
            self._scratch[dtype] = torch.empty(numel, dtype=dtype, device=blocks[0].parameter.device)
            self._words[dtype] = words_of(self._scratch[dtype])
        self._step_numel = step_numel
        device = blocks[0].parameter.device if blocks else torch.device("cpu")
        self._wide = torch.empty(2, step_numel if any(dtype.itemsize == 2 for dtype in self._scratch) else 0, device=device)

    def configure(self, groups: list[Hyperparameters]) -> None:
        for group, optimizer in self._optimizers.items():
            optimizer.param_groups[0].update(as_arguments(groups[group]))

    def run(self, work: _Work) -> list[float]:
        """Sum and step units until none is left. Returns the squared norms: one for each gradient, that of g, and that of its change."""
        norms = [0.0] * (len(work.weights) + 2)
        for unit in work.units:
            block = unit.blocks[work.half]
            total = self._scratch[block.parameter.dtype][: block.numel]
            for start in range(0, block.numel, self._step_numel):
                stop = min(start + self._step_numel, block.numel)
                # A gradient may be on the host, or on another GPU, where the worker has no memory on this one.
                parts = [g[block.first + start : block.first + stop].to(total.device) for g in work.gradients[total.dtype]]
                (self._sum if total.itemsize > 2 else self._sum_wide)(parts, work, total[start:stop], norms)
            if work.total is not None:
                work.total[total.dtype][block.first : block.first + block.numel].copy_(total)
            if work.last is not None:
                now, before = (
                    last[total.dtype][block.first : block.first + block.numel] for last in (work.last[work.half], work.last[-1 - work.half])
                )
                change = torch.sub(total, before)
                norms[-1] += float(torch.dot(change, change))
                now.copy_(total)
            absent = self._absent(unit, total)
            for piece in unit.pieces:
                if piece[0].at not in absent:
                    low = piece[0].first - block.first
                    self._step(piece, work.half, total[low : low + piece[0].numel] if len(unit.pieces) > 1 else total)
                elif len(piece) > 1:
                    self._leave(piece, work.half)
                    self._adopt(piece, work.half)
        return norms

    def _absent(self, unit: _Unit, total: torch.Tensor) -> set[int]:
        """Return the places of the pieces in which no tensor has a gradient. Others have a gradient of each of their tensors."""
        block = unit.blocks[0]
        parts = [(n, block.parts[n]) for n in candidates(self._words[total.dtype], unit.signs)]
        absent = {n for n, part in parts if is_absent(total[part.at : part.at + part.stop - part.start])}
        if not absent:
            return absent
        places = [block.at + part.at * total.itemsize for part in block.parts]
        meet = {places[n] for before, n in pairwise(range(len(places))) if (before in absent) != (n in absent)}
        for piece, pieces in unit.divide(meet):
            self._divide(piece, pieces)
        return {places[n] for n in absent}

    def _divide(self, piece: _Piece, pieces: list[_Piece]) -> None:
        """Let each of these pieces have its part of the state that they had as one."""
        parts = [(new[0].at, new[0].first - piece[0].first, new[0].numel) for new in pieces]
        for half, block in enumerate(piece):
            state = self._state.pop(block.parameter, {})
            for new, (_, low, numel) in zip(pieces, parts, strict=True):
                self._state[new[half].parameter] = {key: _part_of(value, low, numel) for key, value in state.items()}
        if self._kept is not None:
            self._kept.divide(parts)

    def _step(self, piece: _Piece, half: int, total: torch.Tensor) -> None:
        """Write one piece of the new version, and its optimizer's state, into a half."""
        block, before = piece[half], piece[-1 - half]
        parameter, optimizer = block.parameter, self._optimizers[block.group]
        grad = torch.as_strided(total, parameter.shape, parameter.stride()) if block.whole else total
        if block is not before:
            states = self._state_of(piece, 1 - half), self._state_of(piece, half)
            if step_across(self._name, optimizer.param_groups[0], (before.parameter, parameter), states, grad):
                return
            self._leave(piece, half)
        parameter.grad = grad
        optimizer.param_groups[0]["params"] = [parameter]
        if self._early and not self._state.get(parameter):
            self._state[parameter] = build(self._name, self._groups[block.group], [parameter]).state[parameter]
        optimizer.step()
        parameter.grad = None
        self._adopt(piece, half)

    def _adopt(self, piece: _Piece, half: int) -> None:
        """Let what a piece's state has got outlive this process, if the shard does."""
        if self._kept is not None:
            self._kept.adopt(piece[half].at, half, self._state.get(piece[half].parameter, {}))

    def _leave(self, piece: _Piece, half: int) -> None:
        """Let a piece, and its state, be in a half what they are in the other one."""
        piece[half].parameter.copy_(piece[1 - half].parameter)
        self._carry_over(piece, half)

    def _carry_over(self, piece: _Piece, half: int) -> None:
        """Let a piece's state in a half be the state in the other one."""
        before, now = self._state_of(piece, 1 - half), self._state_of(piece, half)
        for key in now.keys() - before.keys():
            del now[key]
        for key, value in before.items():
            place = now.get(key)
            if not isinstance(value, torch.Tensor):
                now[key] = value
            elif isinstance(place, torch.Tensor) and (place.shape, place.dtype) == (value.shape, value.dtype):
                place.copy_(value)
            else:
                now[key] = value.clone()

    def _state_of(self, piece: _Piece, half: int) -> dict[str, Any]:
        state: dict[str, Any] = self._state[piece[half].parameter]
        return state

    def _sum(self, parts: list[torch.Tensor], work: _Work, out: torch.Tensor, norms: list[float]) -> None:
        torch.mul(parts[0], work.weights[0], out=out)
        for part, weight in zip(parts[1:], work.weights[1:], strict=True):
            out.add_(part, alpha=weight)
        if work.norms:
            for i, part in enumerate((*parts, out)):
                norms[i] += float(torch.dot(part, part))

    def _sum_wide(self, parts: list[torch.Tensor], work: _Work, out: torch.Tensor, norms: list[float]) -> None:
        total, wide = self._wide[0, : out.numel()], self._wide[1, : out.numel()]
        for i, (part, weight) in enumerate(zip(parts, work.weights, strict=True)):
            wide.copy_(part)
            torch.mul(wide, weight, out=total) if i == 0 else total.add_(wide, alpha=weight)
            if work.norms:
                norms[i] += float(torch.dot(wide, wide))
        if work.norms:
            norms[-2] += float(torch.dot(total, total))
        out.copy_(total)


def _part_of(value: Any, low: int, numel: int) -> Any:
    """Return a part of a piece's state: some elements of a tensor, or a number, which each part has."""
    if not isinstance(value, torch.Tensor):
        return value
    return value[low : low + numel] if value.dim() else value.clone()


def _in_thread(lane: _Lane, work: _Work) -> list[float]:
    torch.set_num_threads(1)
    return lane.run(work)
