"""Encode what a worker and a shard exchange over a connection that does not share memory, in the worker's wire format.

Both ends bind encoded memory under the names ``push`` and ``pull``, and the memory of float32 values under `INITIAL` and `EXACT`: initial
parameters, and pulls for which the script has asked, travel unchanged. Gradients and parameters are encoded, sent, and decoded bucket by
bucket, so that one bucket travels while another is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from offbeat.errors import ProtocolError
from offbeat.tensors.buckets import buckets_of
from offbeat.tensors.halves import Halves
from offbeat.tensors.layout import Layout, Span, on_host
from offbeat.tensors.wire_formats import Changes, Codec, Encoded, ErrorFeedback
from offbeat.transport.base import Buffer, Connection
from offbeat.transport.shm import PrivateBlock
from offbeat.types import NOT_JOINED, Incarnation, WorkerId

INITIAL: Final = "initial"
"""The region in which a worker's parameters travel to a shard, as the job's initial ones."""
EXACT: Final = "exact"
"""The region in which a shard's parameters travel to a worker, not encoded."""
REMEMBERED: Final = 2
"""Pushes of a fragment whose feedback may still be given back: under ``decoupled`` a push is dropped when the next one has come."""


class _EncodedBucket(NamedTuple):
    """A bucket of gradients or parameters in encoded memory."""

    codec: Codec
    values: slice
    """Its bytes in the span."""
    encoded: slice
    """Its bytes in the encoded span."""


def _encoded_buckets(layout: Layout, span: Span, wire: Encoded) -> list[_EncodedBucket]:
    found, at = [], 0
    for (start, stop), _ in buckets_of(layout, span):
        codec = Codec(layout, Span(start, stop), wire)
        found.append(_EncodedBucket(codec, slice(start - span.start, stop - span.start), slice(at, at + codec.nbytes)))
        at += codec.nbytes
    return found


def _allocate(buckets: list[_EncodedBucket], what: str) -> memoryview:
    return PrivateBlock.allocate(sum(bucket.codec.nbytes for bucket in buckets), what).view


class _Receiver:
    """Decode buckets that a peer sends ahead as they arrive, and the others when the message has come.

    Args:
        buckets: of the region.
        decode: decodes one bucket, by number.
    """

    def __init__(self, buckets: list[_EncodedBucket], decode: Callable[[int], None]) -> None:
        self._numbers = {(bucket.encoded.start, bucket.encoded.stop): number for number, bucket in enumerate(buckets)}
        self._decode = decode
        self._missing = set(self._numbers.values())

    def arrived(self, start: int, stop: int) -> None:
        """Decode the bucket whose bytes have arrived, the first time or again. Other parts than buckets wait for the message."""
        number = self._numbers.get((start, stop))
        if number is not None:
            self._missing.discard(number)
            self._decode(number)

    def complete(self) -> None:
        """Note that the message has come, and decode what has not arrived by itself."""
        for number in sorted(self._missing):
            self._decode(number)
        self._missing = set(self._numbers.values())


class WorkerEncoding:
    """A worker's end of one connection.

    Args:
        connection: to the server.
        layout, span: of the model, and the server's part of it.
        wire: the format.
        push, pull: the worker's memory for gradients and parameters, of this span.
    """

    def __init__(self, connection: Connection, layout: Layout, span: Span, wire: Encoded, push: memoryview, pull: memoryview) -> None:
        self._push, self._pull = push, pull
        self._buckets = _encoded_buckets(layout, span, wire)
        self._encoded_push = _allocate(self._buckets, "encoded gradients")
        self._encoded_pull = _allocate(self._buckets, "encoded parameters")
        self.feedback = [ErrorFeedback(bucket.codec) for bucket in self._buckets] if wire == "int8" else []
        """By bucket: what is added to the next gradient. Empty: the format needs none."""
        self._bases = [torch.zeros(bucket.codec.numel, device="cpu") for bucket in self._buckets] if wire == "int8" else []
        """By bucket: the parameters that have come last, to which the next are a change. The script may have written to its model's. Empty:
        the format sends parameters, not changes."""
        self._pushed_by = NOT_JOINED
        """The incarnation that has made the last push, as long as the push may be given back."""
        self._parameters = _Receiver(self._buckets, self._decode)
        connection.bind("push", self._encoded_push)
        connection.bind("pull", self._encoded_pull, self._parameters.arrived)
        connection.bind(INITIAL, push)
        connection.bind(EXACT, pull)

    def encode(self, number: int) -> tuple[int, int]:
        """Encode one bucket of the gradient for the next push, the first time or again. Returns its first byte and the byte after it."""
        codec, values, encoded = self._buckets[number]
        if self.feedback:
            self.feedback[number].encode(self._push[values], self._encoded_push[encoded])
        else:
            codec.encode(self._push[values], self._encoded_push[encoded])
        return encoded.start, encoded.stop

    def encode_all(self) -> None:
        """Encode the gradient for a push that carries it as a whole."""
        for number in range(len(self._buckets)):
            self.encode(number)

    def pushed(self, incarnation: Incarnation) -> None:
        """Note that this incarnation pushes what was encoded."""
        for feedback in self.feedback:
            feedback.pushed()
        self._pushed_by = incarnation

    def give_back(self, incarnation: Incarnation) -> None:
        """Undo the feedback of the last push, which was dropped or rejected, if this incarnation has made it. Buckets that were encoded
        since must be encoded again.

        An earlier incarnation's push may have been that of another process. A push whose fate comes after the next push, because it was
        gathered, is folded, unless the job ends.
        """
        if self._pushed_by == incarnation:
            for feedback in self.feedback:
                feedback.give_back()
            self._pushed_by = NOT_JOINED

    def decode(self, *, exact: bool) -> None:
        """Take the parameters that have just come; ``exact``: as float32, into the worker's memory. No message may be left out."""
        if not exact:
            self._parameters.complete()
            return
        for (codec, values, _), base in zip(self._buckets, self._bases, strict=False):
            codec.read(self._pull[values], base)

    def _decode(self, number: int) -> None:
        codec, values, encoded = self._buckets[number]
        codec.decode(self._encoded_pull[encoded], self._pull[values], self._bases[number] if self._bases else None)


class _Bucketed:
    """Makes its buckets anew from the layout in another process.

    Args:
        layout, span: of the model, and the part of it.
        wire: the format.
    """

    def __init__(self, layout: Layout, span: Span, wire: Encoded) -> None:
        self._layout, self._span, self._wire = layout, span, wire
        self._buckets = _encoded_buckets(layout, span, wire)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_buckets"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._buckets = _encoded_buckets(self._layout, self._span, self._wire)

    @property
    def numbers(self) -> range:
        """The numbers of the buckets."""
        return range(len(self._buckets))


class EncodedParameters(_Bucketed):
    """A shard's parameters in ``bf16``, for one worker, or for all where nothing is folded while a worker computes.

    Args:
        layout, span: of the model, and the shard's part of it.
        parameters: the shard's.
    """

    def __init__(self, layout: Layout, span: Span, parameters: Halves) -> None:
        super().__init__(layout, span, "bf16")
        self._parameters = parameters
        self.encoded = _allocate(self._buckets, "encoded parameters")
        self._changes = [-1] * len(self._buckets)

    def encode(self, number: int, changes: int) -> tuple[int, int]:
        """Encode one bucket unless it is that of the last call, at which there had been as many ``changes``.

        Returns:
            Its first byte in the encoded memory, and the byte after it.
        """
        codec, values, encoded = self._buckets[number]
        if changes != self._changes[number]:
            codec.encode(on_host(self._parameters.now[values]), self.encoded[encoded])
            self._changes[number] = changes
        return encoded.start, encoded.stop

    def sent_exact(self) -> None:
        """Do nothing: what is sent does not depend on what was sent before."""


class ParameterChanges(_Bucketed):
    """What is sent of a shard's parameters to one worker in ``int8``: the difference to what the worker has. The arguments are as above."""

    def __init__(self, layout: Layout, span: Span, parameters: Halves) -> None:
        super().__init__(layout, span, "int8")
        self._parameters = parameters
        self.encoded = _allocate(self._buckets, "encoded parameters")
        self._bases = [torch.zeros(bucket.codec.numel, device="cpu") for bucket in self._buckets]

    def encode(self, number: int, changes: int) -> tuple[int, int]:
        """Encode the change of one bucket since the last call, or since the last exact parameters. Returns its place, as above."""
        codec, values, encoded = self._buckets[number]
        codec.encode(on_host(self._parameters.now[values]), self.encoded[encoded], base=self._bases[number])
        return encoded.start, encoded.stop

    def sent_exact(self) -> None:
        """Note that the worker gets the parameters as they are now."""
        for (codec, values, _), base in zip(self._buckets, self._bases, strict=True):
            codec.read(on_host(self._parameters.now[values]), base)


class ShardEncoding(_Bucketed):
    """A shard's end of one worker's connection.

    Args:
        connection: to the worker.
        layout, span: of the model, and the shard's part of it.
        wire: the format that the worker has chosen.
        push: the memory for the worker's gradient.
        parameters: what the worker is sent; its memory must not change while it travels.
    """

    def __init__(
        self,
        connection: Connection,
        layout: Layout,
        span: Span,
        wire: Encoded,
        push: memoryview,
        parameters: EncodedParameters | ParameterChanges,
    ) -> None:
        super().__init__(layout, span, wire)
        self.parameters, self._push = parameters, push
        self._undecoded = False
        """True if a gradient has come, and the push memory does not have it."""
        self._encoded_push = _allocate(self._buckets, "encoded gradients")
        self._gradient = _Receiver(self._buckets, self._decode)
        connection.bind("push", self._encoded_push, self._gradient.arrived)
        connection.bind("pull", parameters.encoded.toreadonly())
        connection.bind(INITIAL, push)

    def came(self) -> None:
        """Note that a gradient has come. Where it may have to be sent again, its bytes may still be replaced before `decode`."""
        self._undecoded = True

    def decode(self) -> None:
        """Decode the rest of the gradient that has come, unless that was done, into the worker's float32 memory at this shard."""
        if self._undecoded:
            self._undecoded = False
            self._gradient.complete()

    def skip(self) -> None:
        """Note that nobody needs the gradient that has come: the shard gets from elsewhere what came of it."""
        self._undecoded = False

    def _decode(self, number: int) -> None:
        codec, values, encoded = self._buckets[number]
        codec.decode(self._encoded_push[encoded], self._push[values])


class FragmentEncoding:
    """One end of a connection over which workers push a shard's fragment of their parameters, and get its new versions.

    Both travel as changes: a push as the change since the worker's last push, in its wire format, in ``int8`` with error feedback; a
    version as the change since the version that the worker was sent last, in ``bf16`` always. Both begin with the first release, which is
    exact, as all releases are. With changes to the version that the worker has taken the shard would have to keep older versions.

    Versions are not sent in ``int8``, where a parameter whose change is below 1/254 of its block's largest stays as it was: the worker
    would push the old value, and the mean would undo what the parameter has moved. An error of ``bf16`` is at most 1/256 of each
    parameter's own change.

    Args:
        layout, span: of the model, and the shard's part of it.
        wire: the format that the worker has chosen.
        pushes: True at the worker.
    """

    def __init__(self, layout: Layout, span: Span, wire: Encoded, *, pushes: bool = False) -> None:
        self._pushes = Changes(layout, span, wire, feedback=pushes and wire == "int8")
        self._versions = Changes(layout, span, "bf16")
        self._begun = False
        self._owed: dict[int, torch.Tensor] = {}
        """Of the last `REMEMBERED` pushes, by number: the feedback before it less the feedback after it."""

    def released(self, values: memoryview) -> None:
        """Note that the worker gets, or has got, this version as it is."""
        self._versions.begin(values)
        if not self._begun:
            self._pushes.begin(values)
        self._begun = True

    def encode_push(self, number: int, fragment: memoryview) -> memoryview:
        """Return the message for a push."""
        feedback = self._pushes.feedback
        before = None if feedback is None else feedback.clone()
        encoded = self._pushes.encode(fragment)
        if before is not None and feedback is not None:
            self._owed[number] = before.sub_(feedback)
            for old in list(self._owed)[:-REMEMBERED]:
                del self._owed[old]
        return encoded

    def give_back(self, number: int) -> None:
        """Undo the feedback of a push that was dropped or rejected. If another was encoded since, its own feedback still counts.

        A push whose fate comes after two later pushes of the fragment keeps its feedback, which is one rounding error.
        """
        owed = self._owed.pop(number, None)
        if owed is not None and self._pushes.feedback is not None:
            self._pushes.feedback.add_(owed)

    def decode_push(self, worker: WorkerId, message: memoryview) -> memoryview:
        """Return the fragment that this worker has pushed. Raises `ProtocolError` if the message has another size, or comes too early."""
        if not self._begun or len(message) != self._pushes.nbytes:
            awaited = f"{self._pushes.nbytes}" if self._begun else "none before its first parameters"
            raise ProtocolError(f"worker {worker} sent a change of {len(message)} bytes (expected {awaited})")
        return self._pushes.decode(message)

    def encode_version(self, block: Buffer) -> memoryview:
        """Return the message for a new version."""
        return self._versions.encode(memoryview(bytearray(block)))

    def decode_version(self, shard: int, message: memoryview) -> memoryview:
        """Return the version that has come from this shard. Raises `ProtocolError` if the message has another size."""
        if len(message) != self._versions.nbytes:
            raise ProtocolError(f"shard {shard} sent a change of {len(message)} bytes (expected {self._versions.nbytes})")
        return self._versions.decode(message)
