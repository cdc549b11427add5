"""Hold a server's share of the model in rules that exchange parameters: workers step by themselves, and the shard combines the results.

It takes the place of `shard.Shard`, and is folded in the same way: contributions of one span and their weights become a new version in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from offbeat.core.policy import Averaging
from offbeat.errors import ProtocolError
from offbeat.tensors.blocks import GPU_BLOCK_NUMEL, OwnState, owned, owned_state
from offbeat.tensors.halves import Halves
from offbeat.tensors.layout import DTYPES, Layout, Memory, Span, elements
from offbeat.tensors.pieces import Headers, pack, piece_of, unpack
from offbeat.tensors.shard_memory import ShardMemory, Sizes, named_halves

CHUNK_NUMEL = 1 << 18
"""Elements combined at a time, so that the stacked copy for a median stays small."""

OUTER = "outer_momentum"
"""The name of the outer optimizer's momentum among pieces of state."""


def combine(parts: Sequence[torch.Tensor], weights: Sequence[float], averaging: Averaging, out: torch.Tensor) -> None:
    """Write the combination of these parameters, coordinate by coordinate, into ``out``, computed in float32 at least.

    ``mean``: ``sum(weight * part)``, weights adding up to 1. ``median``: of an even number the mean of the middle two. ``trimmed_mean``:
    the mean without the ``floor(trim * n)`` greatest and as many least.

    >>> out = torch.zeros(1)
    >>> combine([torch.tensor([float(x)]) for x in (1, 2, 30)], [1 / 3] * 3, Averaging(combine="median"), out)
    >>> out
    tensor([2.])
    """
    wide = _wide(out.dtype)
    if averaging.combine == "mean":
        total = torch.zeros(out.shape, dtype=wide, device=out.device)
        for part, weight in zip(parts, weights, strict=True):
            total.add_(part.to(out.device, wide), alpha=weight)
        out.copy_(total)
        return
    ranked = torch.stack([part.to(out.device, wide) for part in parts]).sort(dim=0).values
    n = len(parts)
    cut = (n - 1) // 2 if averaging.combine == "median" else int(averaging.trim * n + 1e-9)
    out.copy_(ranked[cut : n - cut].mean(dim=0))


def mix(layout: Layout, span: Span, own: Memory, new: Memory, alpha: float) -> None:
    """Replace the parameters of one span, in place, by ``alpha * own + (1 - alpha) * new``, computed in float32 at least."""
    with torch.no_grad():
        for part in owned(layout, span):
            numel, dtype = part.stop - part.start, DTYPES[part.spec.dtype]
            mine = elements(own, part.at, numel, dtype)
            theirs = elements(new, part.at, numel, dtype).to(mine.device)
            if alpha:
                theirs = torch.lerp(theirs.to(_wide(dtype)), mine.to(_wide(dtype)), alpha)
            mine.copy_(theirs)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which parameters of this one are combined."""
    return torch.promote_types(dtype, torch.float32)


class AveragingShard:
    """Hold the parameters of one span, and the outer optimizer's momentum.

    Update rule: see `Averaging`. With an outer learning rate of 1 and no momentum, the combined parameters are the new version.

    Args:
        layout: the job's layout.
        span: which bytes of it are here.
        memory: the ``span.nbytes`` bytes of parameters, writable, or two halves: see `shard.Shard`.
        averaging: how the rule combines.
        kept: as in `shard.Shard`.

    Source: EnsembleSync, section 3.1 (the mean); DiLoCo for the outer step.
    """

    def __init__(
        self,
        layout: Layout,
        span: Span,
        memory: Memory | Halves,
        averaging: Averaging,
        kept: Callable[[Sizes], ShardMemory] | None = None,
    ) -> None:
        self.span, self.averaging = span, averaging
        self._layout, self._own = layout, owned(layout, span)
        self._places = [(own.at, own.stop - own.start, DTYPES[own.spec.dtype]) for own in self._own]
        self._halves = memory if isinstance(memory, Halves) else Halves(memory)
        self._velocities: dict[int, list[torch.Tensor]] = {}
        """By place: the momentum, in as many halves."""
        self.kept = None if kept is None else kept(Sizes(span.nbytes, len(self._places)))
        """The memory that outlives the process; None: there is none."""
        for at, numel, dtype in self._places if self.kept is not None else ():
            if self.kept is not None and f"velocity {at}" in self.kept.known:
                self._velocity(at, numel, _wide(dtype))

    def fold(self, parameters: Sequence[tuple[Memory, float]], *_: Any, **__: Any) -> None:
        """Combine the workers' parameters, each with its weight, into a new version. Learning rates are used in the workers only.

        Raises:
            ProtocolError: parameters of another size. Nothing has changed then.
        """
        assert parameters, "fold() without contributions"
        for memory, _weight in parameters:
            if memory.nbytes != self.span.nbytes:
                raise ProtocolError(f"parameters of {memory.nbytes} bytes for a span of {self.span.nbytes} bytes")
        weights = [weight for _, weight in parameters]
        with torch.no_grad():
            for at, numel, dtype in self._places:
                now, before = (elements(memory, at, numel, dtype) for memory in (self._halves.now, self._halves.before))
                theirs = [elements(memory, at, numel, dtype) for memory, _ in parameters]
                most = CHUNK_NUMEL if now.is_cpu else GPU_BLOCK_NUMEL
                for start in range(0, numel, most):
                    chunk = slice(start, min(start + most, numel))
                    self._step(at, now, before, chunk, [part[chunk] for part in theirs], weights)

    def whole(self) -> list[memoryview]:
        """Return the memory of all that a fold changes: the parameters, and the outer optimizer's momentum."""
        now = self._halves.now
        memories = [now if isinstance(now, memoryview) else now.numpy().data]
        if self.averaging.outer_momentum:
            for at, numel, dtype in self._places:
                memories.append(self._velocity(at, numel, _wide(dtype))[self._halves.half].view(torch.uint8).numpy().data)
        return memories

    def state(self) -> tuple[Headers, list[bytes | memoryview]]:
        """Return the outer optimizer's momentum, in the form of `Shard.state`."""
        kept = [(own, self._velocities[own.at][self._halves.half]) for own in self._own if own.at in self._velocities]
        return pack([piece_of(own.tensor, OUTER, own.start, velocity, None) for own, velocity in kept])

    def read_state(self, headers: Any, payload: bytes | memoryview) -> OwnState:
        """Return the momentum that these pieces contain, for `load_state`. Raises `ProtocolError` if they do not fit the layout."""
        return owned_state(self._own, unpack(self._layout, headers, payload), elementwise=True)

    def load_state(self, state: OwnState) -> None:
        """Replace the momentum by what `read_state` has returned."""
        self._velocities = {}
        for own in self._own:
            if (velocity := state.get(own.tensor, {}).get(OUTER)) is not None:
                self._velocity(own.at, velocity.numel(), velocity.dtype)[self._halves.half].copy_(velocity)

    def whole_state(self) -> dict[str, Any]:
        """Return the momentum for `load_whole_state`; the next fold changes the bytes."""
        headers, pieces = self.state()
        return {"headers": headers, "pieces": pieces}

    def load_whole_state(self, whole: Mapping[str, Any]) -> None:
        """Go on where another shard of the same span was. Raises `ProtocolError` if its momentum does not fit the layout."""
        self.load_state(self.read_state(whole["headers"], b"".join(whole["pieces"])))

    def _step(
        self, at: int, now: torch.Tensor, before: torch.Tensor, chunk: slice, parts: list[torch.Tensor], weights: list[float]
    ) -> None:
        lr, mu = self.averaging.outer_lr, self.averaging.outer_momentum
        if lr == 1.0 and mu == 0.0:
            combine(parts, weights, self.averaging, now[chunk])
            return
        combined = torch.empty_like(now[chunk], dtype=_wide(now.dtype))
        combine(parts, weights, self.averaging, combined)
        old = before[chunk].to(combined.dtype)
        step = old - combined
        if mu:
            velocity = self._velocity(at, now.numel(), combined.dtype)
            to = velocity[self._halves.half][chunk]
            torch.mul(velocity[-1 - self._halves.half][chunk], mu, out=to).add_(step)
            step.add_(to, alpha=mu)
        now[chunk].copy_(old.sub(step, alpha=lr))

    def _velocity(self, at: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        if at not in self._velocities:
            device = elements(self._halves.now, 0, 0, torch.uint8).device
            bare = named_halves(self.kept, f"velocity {at}", numel * dtype.itemsize, len(self._halves.views), device)
            self._velocities[at] = [half.view(dtype) for half in bare]
        return self._velocities[at]
