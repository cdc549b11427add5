"""Send a worker's gradient bucket by bucket to servers that do not share memory, each bucket as soon as the backward pass has computed it.

A push stays one message. Only the bytes of the gradient go before it, while the backward pass computes the rest: the worker was released,
so no server reads its memory of the last gradient any more. `BucketedPush.complete` sends what has not been sent, and sends again what the
script has changed since, by clipping for example. So the servers get the same bytes, whatever was sent early.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020, section 3.2.3 (buckets that overlap
with the backward pass). Departure: a bucket is a range of the layout, and may be sent twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from offbeat.runtime.parameter_server.encoding import WorkerEncoding
from offbeat.tensors.buckets import Bucket, Fingerprint, buckets_of
from offbeat.tensors.layout import Layout, Span
from offbeat.transport.base import Connection

LONGEST_PAUSE = 64
"""Steps for which nothing is sent early, at most."""


class _Part:
    """One bucket on its way to one server."""

    def __init__(self, number: int, bucket: Bucket, memory: memoryview) -> None:
        self.number, self.bucket, self.memory = number, bucket, memory
        self.missing = set(bucket.tensors)
        """Tensors of which this iteration has no gradient yet."""
        self.sent: Fingerprint | None = None
        """Of the bytes that were sent in this iteration; None: none were."""

    def begin(self) -> None:
        self.missing, self.sent = set(self.bucket.tensors), None


class BucketedPush:
    """Send one worker's gradients to one server.

    Args:
        connection: to the server.
        layout, span: of the model, and the server's part of it.
        push: the worker's memory for gradients, of this span.
        encoding: how the connection encodes; None: it does not.
    """

    def __init__(self, connection: Connection, layout: Layout, span: Span, push: memoryview, encoding: WorkerEncoding | None) -> None:
        self._connection, self._span, self._encoding = connection, span, encoding
        self._parts: list[_Part] = []
        self._of_tensor: defaultdict[int, list[_Part]] = defaultdict(list)
        for number, bucket in enumerate(buckets_of(layout, span)):
            part = _Part(number, bucket, push[bucket.span.start - span.start : bucket.span.stop - span.start])
            self._parts.append(part)
            for tensor in bucket.tensors:
                self._of_tensor[tensor].append(part)

    def begin(self) -> None:
        """Note that the next iteration begins: whatever was sent belongs to the last one."""
        for part in self._parts:
            part.begin()

    def computed(self, tensor: int) -> None:
        """Note that this tensor's gradient is in memory, and send each bucket that is now complete, once."""
        for part in self._of_tensor.get(tensor, ()):
            part.missing.discard(tensor)
            if not part.missing and part.sent is None:
                part.sent = Fingerprint(part.memory)
                self._send(part)

    def complete(self) -> tuple[int, int]:
        """Send each bucket that was not sent in this iteration, or has changed since.

        Returns:
            How many buckets were sent early, and how many of them had changed.
        """
        early = [part for part in self._parts if part.sent is not None]
        changed = [part for part in early if part.sent != Fingerprint(part.memory)]
        for part in self._parts:
            if part.sent is None or part in changed:
                self._send(part)
        return len(early), len(changed)

    def _send(self, part: _Part) -> None:
        start, stop = part.bucket.span
        if self._encoding is not None:
            self._connection.send_ahead("push", *self._encoding.encode(part.number))
        else:
            self._connection.send_ahead("push", start - self._span.start, stop - self._span.start)


class EarlyPushes:
    """Decide when buckets are sent early. After a step that has changed them, some steps send nothing early: one, two, four and so on.

    A script that clips its gradients, or adds up several backward passes, changes them at each step, and would send each twice.

    Args:
        pushes: one for each server that does not share memory.
    """

    def __init__(self, pushes: Iterable[BucketedPush]) -> None:
        self._pushes = tuple(pushes)
        self.allowed = False
        """Whether the rule permits it."""
        self._pause, self._next_pause = 0, 1

    def begin(self) -> None:
        """Note that the next iteration begins."""
        for push in self._pushes:
            push.begin()

    def computed(self, tensor: int) -> None:
        """Note that this tensor's gradient is in memory."""
        if self.allowed and not self._pause:
            for push in self._pushes:
                push.computed(tensor)

    def complete(self) -> None:
        """Send all that is not at the servers yet."""
        counts = [push.complete() for push in self._pushes]
        early, changed = (sum(count) for count in zip(*counts, strict=True)) if counts else (0, 0)
        if self._pause:
            self._pause -= 1
        elif changed:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
        elif early:
            self._next_pause = 1
