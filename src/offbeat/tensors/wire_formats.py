"""Encode gradients and parameters for a connection that does not share memory, in fewer bytes than they have. No network, no rule.

========  =============================================================================================  ===============
format    encoding of a float32 or float64 value                                                         bytes per value
========  =============================================================================================  ===============
``bf16``  bfloat16, rounded to nearest: relative error at most 2**-8                                     2
``int8``  an integer from -127 to 127 and, for each block of 256 values, a float32 scale, the largest    1.016
          magnitude of the block divided by 127: error at most the block's largest magnitude / 254
========  =============================================================================================  ===============

Values of 16 bits travel unchanged in ``bf16``, and in ``int8`` like all others. A block whose largest magnitude is below 1.5e-36 becomes
zeros in ``int8``, since its scale would be a subnormal number.

Infinity and NaN stay infinity and NaN in ``bf16``; a finite magnitude above 3.39e38 rounds to infinity there. In ``int8`` all values of a
block that contains infinity or NaN become NaN. So a gradient that is not finite is not finite after decoding either.

A tensor without a gradient is one after decoding, too: negative zeros (`absent`) stay negative zeros in ``bf16``, and in ``int8`` the code
-128 means one, where all of a tensor are. Its feedback stays as it is.

Parameters in ``int8`` travel as changes to a base: both ends keep the values that the receiver has, and what is sent is the difference to
them. So errors do not add up, and an error is at most 1/254 of the largest change of a block. Fragments of the model travel as changes in
both formats (`Changes`).

Plain rounding of gradients loses what is small beside the largest value of a block, in each push again. `ErrorFeedback` adds the rounding
error of a push to the next push, so that the decoded pushes add up to the gradients, but for the error of the last push.

Sources: Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014 (error feedback); Dettmers et al., 8-bit Optimizers via
Block-wise Quantization, ICLR 2022 (blocks). Departure: rounding is linear here, not by quantiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Literal, NamedTuple

import numpy as np
import torch

from offbeat.tensors.absent import ABSENT, candidates, is_absent, sign_at, words_of
from offbeat.tensors.blocks import owned
from offbeat.tensors.layout import DTYPES, Layout, Memory, Span, aligned, elements
from offbeat.tensors.threads import single_threaded

BLOCK: int = 256
"""Values that share a scale in ``int8``."""
LARGEST_CODE = 127
ABSENT_CODE = -128
CHUNK_NUMEL = 1 << 18
"""Values encoded at a time, a multiple of `BLOCK`: the scratch memory of 2 MiB stays in the cache. 2**16 measured 50 % slower."""

Encoded = Literal["bf16", "int8"]


class _Run(NamedTuple):
    """Neighbouring tensors of one dtype, padding included."""

    dtype: torch.dtype
    start: int
    """First byte in the span."""
    numel: int
    at: int
    """First byte of the codes in the encoded span."""
    scales_at: int
    """First byte of the scales in the encoded span; ``at`` where the format has none."""
    first: int
    """Number of values in the runs before this one."""
    parts: tuple[slice, ...]
    """The values of each tensor, without padding."""
    starts: torch.Tensor
    """Where each begins."""
    signs: np.ndarray
    """Where the sign of its first value is: see `absent.sign_at`."""


class Codec:
    """Encode and decode one span of a layout. The number of bytes depends on the layout alone.

    Args:
        layout: of the model.
        span: the bytes of it that travel over the connection.
        wire: the format.

    >>> from torch import nn
    >>> model = nn.Linear(4, 4, bias=False)
    >>> layout = Layout.of(model, torch.optim.SGD(model.parameters()))
    >>> codec = Codec(layout, Span(0, layout.nbytes), "int8")
    >>> values = torch.arange(16.0).view(torch.uint8)
    >>> encoded, decoded = torch.zeros(codec.nbytes, dtype=torch.uint8), torch.zeros_like(values)
    >>> codec.encode(values, encoded)
    >>> codec.decode(encoded, decoded)
    >>> (values.view(torch.float32) - decoded.view(torch.float32)).abs().max() <= 15 / 254
    tensor(True)
    """

    def __init__(self, layout: Layout, span: Span, wire: Encoded) -> None:
        self._span, self._wire = span, wire
        self._runs: list[_Run] = []
        at = first = 0
        for dtype, group in groupby(owned(layout, span), key=lambda own: DTYPES[own.spec.dtype]):
            parts = list(group)
            numel = (parts[-1].end - parts[0].at) // dtype.itemsize
            scales = -(-numel // BLOCK) * 4 if wire == "int8" else 0
            codes_at = at + aligned(scales)
            starts = [(own.at - parts[0].at) // dtype.itemsize for own in parts]
            tensors = tuple(slice(start, start + own.stop - own.start) for start, own in zip(starts, parts, strict=True))
            signs = np.array([sign_at(start * dtype.itemsize, dtype.itemsize) for start in starts])
            self._runs.append(_Run(dtype, parts[0].at, numel, codes_at, at, first, tensors, torch.tensor(starts, device="cpu"), signs))
            at, first = codes_at + aligned(numel * self._code(dtype).itemsize), first + numel
        self.nbytes = at
        """Size of the encoded span, in bytes."""
        self.numel = first
        """Number of values in the span, padding included."""

    def _code(self, dtype: torch.dtype) -> torch.dtype:
        if self._wire == "int8":
            return torch.int8
        return dtype if dtype.itemsize == 2 else torch.bfloat16

    def encode(
        self,
        values: Memory,
        encoded: Memory,
        *,
        base: torch.Tensor | None = None,
        before: torch.Tensor | None = None,
        after: torch.Tensor | None = None,
    ) -> None:
        """Encode ``values``, or their change from a base, and the feedback before it.

        Args:
            values: all bytes of the span.
            encoded: written; `nbytes` bytes.
            base: `numel` float32 values, in the order of the span: their change to ``values`` is encoded, and what it decodes to is added
                to them. Equal to those with which the peer decodes: the change contains the errors of all changes before it.
            before: as many, added to what is encoded.
            after: as many, written: the error of the encoding, 0 where it is not finite. May be ``before``. Only in ``int8``.
        """
        self._check(values, encoded)
        assert after is None or self._wire == "int8", f"error feedback is for int8, not for {self._wire}"
        with torch.no_grad(), single_threaded():
            if self._wire == "bf16" and base is None:
                for run in self._runs:
                    self._codes(run, encoded).copy_(elements(values, run.start, run.numel, run.dtype))
                return
            scratch = self._scratch()
            for run, start, stop, source in self._chunks(values):
                x, y = scratch[0, : stop - start], scratch[1, : stop - start]
                at = slice(run.first + start, run.first + stop)
                if base is not None:
                    torch.sub(source, base[at], out=x)
                    if before is not None:
                        x.add_(before[at])
                elif before is not None:
                    torch.add(source, before[at], out=x)
                else:
                    x.copy_(source)
                finite = self._quantise(run, start, stop, x, y, encoded, decode=base is not None or after is not None)
                if base is not None:
                    base[at].add_(y)
                if after is not None:
                    torch.sub(x, y, out=after[at])
                    if not finite:
                        after[at].nan_to_num_(0.0, 0.0, 0.0)
            if base is None:
                self._mark(values, encoded, before, after)

    def decode(self, encoded: Memory, values: Memory, base: torch.Tensor | None = None) -> None:
        """Write the values of an encoded span to ``values``. Any bytes of the right size can be decoded.

        Args:
            encoded: `nbytes` bytes.
            values: all bytes of the span, written.
            base: what came is a change: it is added to the base, with the arithmetic of `encode`, and ``values`` become the sum.
        """
        self._check(values, encoded)
        with torch.no_grad(), single_threaded():
            scratch = None if base is None else self._scratch()[0]
            for run, start, stop, out in self._chunks(values):
                came = out if scratch is None else scratch[: stop - start]
                came.copy_(self._codes(run, encoded)[start:stop])
                if self._wire == "int8":
                    for block, scale in _blocks(came, self._scales(run, encoded, start, stop)):
                        block.mul_(scale)
                if base is not None:
                    out.copy_(base[run.first + start : run.first + stop].add_(came))
            for run in self._runs if self._wire == "int8" and base is None else ():
                codes = self._codes(run, encoded)
                for n in (codes[run.starts] == ABSENT_CODE).nonzero().flatten().tolist():
                    elements(values, run.start, run.numel, run.dtype)[run.parts[n]].fill_(ABSENT)

    def _mark(self, values: Memory, encoded: Memory, before: torch.Tensor | None, after: torch.Tensor | None) -> None:
        """Mark, in ``int8``, the tensors without a gradient; the feedback after it is theirs before it."""
        for run in self._runs:
            source = elements(values, run.start, run.numel, run.dtype)
            for n in candidates(words_of(source), run.signs):
                if is_absent(source[part := run.parts[n]]):
                    self._codes(run, encoded)[part].fill_(ABSENT_CODE)
                    if before is not None and after is not None:
                        at = slice(run.first + part.start, run.first + part.stop)
                        after[at].copy_(before[at])

    def read(self, values: Memory, base: torch.Tensor) -> None:
        """Copy the values of a span to ``base``, as float32: the base of the changes after it."""
        with torch.no_grad(), single_threaded():
            for run in self._runs:
                base[run.first : run.first + run.numel].copy_(elements(values, run.start, run.numel, run.dtype))

    def _scratch(self) -> torch.Tensor:
        """Return scratch memory for two chunks."""
        return torch.empty(2, min(CHUNK_NUMEL, max((run.numel for run in self._runs), default=0)), device="cpu")

    def _chunks(self, values: Memory) -> Iterator[tuple[_Run, int, int, torch.Tensor]]:
        """Yield each chunk of each run: its place, and its values."""
        for run in self._runs:
            whole = elements(values, run.start, run.numel, run.dtype)
            for start in range(0, run.numel, CHUNK_NUMEL):
                stop = min(start + CHUNK_NUMEL, run.numel)
                yield run, start, stop, whole[start:stop]

    def _quantise(self, run: _Run, start: int, stop: int, x: torch.Tensor, y: torch.Tensor, encoded: Memory, *, decode: bool) -> bool:
        codes = self._codes(run, encoded)[start:stop]
        if self._wire == "bf16":
            y.copy_(codes.copy_(x))
            return True
        return _quantise(x, y, self._scales(run, encoded, start, stop), codes, decode=decode)

    def _codes(self, run: _Run, encoded: Memory) -> torch.Tensor:
        return elements(encoded, run.at, run.numel, self._code(run.dtype))

    def _scales(self, run: _Run, encoded: Memory, start: int, stop: int) -> torch.Tensor:
        return elements(encoded, run.scales_at, -(-run.numel // BLOCK), torch.float32)[start // BLOCK : -(-stop // BLOCK)]

    def _check(self, values: Memory, encoded: Memory) -> None:
        assert values.nbytes == self._span.nbytes, f"{values.nbytes} bytes for a span of {self._span.nbytes}"
        assert encoded.nbytes == self.nbytes, f"{encoded.nbytes} bytes for an encoded span of {self.nbytes}"


class ErrorFeedback:
    """Encode one worker's gradients for one connection in ``int8``; the rounding error of a push is added to the next.

    After a push the feedback is ``(gradient + feedback) - decoded``. If the push is dropped or rejected, `give_back` sets the feedback to
    what it was before that push: the gradient does not count, and neither does its error. Until `pushed`, a gradient may be encoded again.

    Args:
        codec: of the span, in ``int8``.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.feedback: torch.Tensor = torch.zeros(codec.numel, device="cpu")
        """The error to be added to the next gradient, in float32, in the order of the span."""
        self._before, self._error = torch.zeros(2, codec.numel, device="cpu")
        """The feedback before the last push, and the error of the last `encode`. A push may be given back after the next `encode`."""

    def encode(self, gradient: Memory, encoded: Memory) -> None:
        """Encode the gradient plus the feedback, and keep the error. Where the sum is not finite, the error is 0."""
        self._codec.encode(gradient, encoded, before=self.feedback, after=self._error)

    def pushed(self) -> None:
        """Note that what was encoded last is pushed: its error is the feedback from now on."""
        self.feedback, self._before, self._error = self._error, self.feedback, self._before

    def give_back(self) -> None:
        """Undo the last `pushed`: the push did not become part of a version. Call it at most once for each.

        What was encoded since contains the feedback that is undone: encode it again.
        """
        self.feedback, self._before = self._before, self.feedback


class Changes:
    """Know what both ends of a connection have of a span, in one direction, so that a message carries only the change.

    The ends `begin` with equal values, and encode and decode the same messages in the same order: so what they have stays equal, bit by
    bit. A message that is not used has to be decoded, too.

    Args:
        layout, span, wire: as for `Codec`.
        feedback: True at the sender: the rounding error of a message is added to the next, see `ErrorFeedback`.

    >>> from torch import nn
    >>> model = nn.Linear(4, 4, bias=False)
    >>> layout = Layout.of(model, torch.optim.SGD(model.parameters()))
    >>> sent, received = (Changes(layout, Span(0, layout.nbytes), "int8") for _ in range(2))
    >>> for changes in (sent, received):
    ...     changes.begin(torch.full((16,), 100.0).view(torch.uint8))
    >>> now = received.decode(sent.encode(torch.linspace(100.0, 100.1, 16).view(torch.uint8)))
    >>> (torch.frombuffer(now, dtype=torch.float32) - torch.linspace(100.0, 100.1, 16)).abs().max() < 1e-3
    tensor(True)
    """

    def __init__(self, layout: Layout, span: Span, wire: Encoded, *, feedback: bool = False) -> None:
        self._layout, self._span, self._wire = layout, span, wire
        self._base = torch.zeros(self._codec.numel, device="cpu")
        self.feedback = torch.zeros_like(self._base) if feedback else None
        """What is added to the next change; None: this end receives, or the format needs no feedback."""
        self.nbytes = self._codec.nbytes
        """Size of a message, in bytes."""

    @property
    def _codec(self) -> Codec:
        return Codec(self._layout, self._span, self._wire)  # made anew, since another process may get this object as plain data

    def begin(self, values: Memory) -> None:
        """Note that the other end has, or has sent, these values as they are."""
        self._codec.read(values, self._base)

    def encode(self, values: Memory) -> memoryview:
        """Return the message that brings the other end to ``values``."""
        encoded = memoryview(bytearray(self.nbytes))
        self._codec.encode(values, encoded, base=self._base, before=self.feedback, after=self.feedback)
        return encoded

    def decode(self, encoded: Memory) -> memoryview:
        """Return the values to which a message, of `nbytes` bytes, brings this end."""
        values = memoryview(bytearray(self._span.nbytes))
        self._codec.decode(encoded, values, self._base)
        return values


def _quantise(x: torch.Tensor, y: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, *, decode: bool) -> bool:
    """Write scales and codes of ``x``, and with ``decode`` the decoded values to ``y``, which is scratch memory otherwise.

    Returns:
        True if all values are finite.
    """
    torch.abs(x, out=y)
    for block, scale in _blocks(y, scales):
        torch.amax(block, 1, keepdim=True, out=scale)
    scales.div_(LARGEST_CODE)
    scales.masked_fill_(scales < torch.finfo(torch.float32).tiny, 0.0)
    finite = bool(torch.isfinite(scales.sum(dtype=torch.float64)))
    if not finite:  # a scale of NaN makes each value of the block NaN, whatever its code
        scales.masked_fill_(~torch.isfinite(scales), torch.nan)
    divisors = torch.where(scales > 0.0, scales, torch.inf)  # zero and NaN: the codes become 0
    for (rounded, divisor), (block, _) in zip(_blocks(y, divisors), _blocks(x, scales), strict=True):
        torch.div(block, divisor, out=rounded).round_()
    if not finite:
        y.nan_to_num_(nan=0.0)  # infinity divided by infinity; an undefined conversion to an integer otherwise
    codes.copy_(y)
    if decode:
        for rounded, scale in _blocks(y, scales):
            rounded.mul_(scale)
    return finite


def _blocks(values: torch.Tensor, scales: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the whole blocks of values as one matrix with a column of scales, and then the last, shorter block, where there is one."""
    whole, rest = divmod(values.numel(), BLOCK)
    if whole:
        yield values[: whole * BLOCK].view(whole, BLOCK), scales[:whole].unsqueeze(1)
    if rest:
        yield values[whole * BLOCK :].view(1, rest), scales[whole:].unsqueeze(1)
