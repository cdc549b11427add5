"""Send new parameters to workers that do not share memory bucket by bucket, while the shard still computes the rest.

A release stays one message. Only the bytes of the parameters go before it: what the fold has finished is encoded and sent, and a thread of
the connection hands it to the operating system. A worker that waits for its release receives them in place.

The buckets are those of `bucketed_push.py`. None leaves before the rule has decided that the whole gradient is folded, since a rule decides
about whole gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from offbeat.tensors.layout import Span
from offbeat.transport.base import Connection

Encoder: TypeAlias = Callable[[int], tuple[int, int]]
"""Encodes one bucket of the parameters, by its number. Returns its place in the encoded memory: first byte, and the byte after it."""


class Delivery:
    """The parameters of one version on their way to one worker.

    Args:
        connection: to the worker; its region ``pull`` is bound to what ``prepare`` writes to.
        buckets: of the shard's span, with places counted from the span's first byte.
        prepare: brings a bucket into the region, and returns its place there.
    """

    def __init__(self, connection: Connection, buckets: list[Span], prepare: Encoder) -> None:
        self._connection, self._buckets, self._prepare = connection, buckets, prepare
        self._sent = 0

    def advance(self, nbytes: int) -> None:
        """Send each bucket that is new and has not been sent: those within the first ``nbytes`` bytes of the span."""
        while self._sent < len(self._buckets) and self._buckets[self._sent].stop <= nbytes:
            self._connection.send_ahead("pull", *self._prepare(self._sent))
            self._sent += 1

    def finish(self, header: Mapping[str, Any]) -> None:
        """Send the rest, and then the message that lets the worker go on."""
        self.advance(self._buckets[-1].stop if self._buckets else 0)
        self._connection.send(header)


def in_place(buckets: list[Span], copy: Callable[[Span], None] | None) -> Encoder:
    """Return the encoder of float32: ``copy`` brings a bucket into the region; None: the region is the shard's own memory."""

    def prepare(number: int) -> tuple[int, int]:
        if copy is not None:
            copy(buckets[number])
        return buckets[number]

    return prepare
