"""A worker's blocks in rules of shard scope: those it computes from, and those that have come for it meanwhile.

`core.block_cache` decides when the worker may go on; this file keeps the values, and moves them into the model's memory at that moment
only: between two iterations, when nobody computes from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offbeat.core.policy import ServerRule
from offbeat.errors import ProtocolError
from offbeat.tensors.layout import Span
from offbeat.transport.base import Connection, Message
from offbeat.types import Seconds, Version


class BlockPulls:
    """The blocks of one worker.

    Args:
        policy: a rule of shard scope.
        spans: where each shard's block lies, in bytes.
        memory: of the parameters that the model computes with.
        clock: seconds, monotonic.
    """

    def __init__(
        self, policy: ServerRule, spans: Sequence[Span], memory: memoryview, clock: Callable[[], Seconds] = time.monotonic
    ) -> None:
        self._policy, self._spans, self._memory, self._clock = policy, spans, memory, clock
        self.reset()

    def reset(self) -> None:
        """The worker joins, for the first time or again."""
        self._blocks = self._policy.blocks(len(self._spans))
        self._values: list[dict[Version, memoryview]] = [{} for _ in self._spans]
        """Those that may still be used, by shard and version."""

    @property
    def t(self) -> Version:
        """The iteration that the worker computes."""
        return self._blocks.t

    @property
    def used(self) -> tuple[Version, ...]:
        """The version of each block that it computes from."""
        return self._blocks.used

    @property
    def overtaken(self) -> bool:
        """Whether the iteration under way is to be broken off."""
        return self._blocks.overtaken

    def received(self, message: Message, *, whole: bool = False) -> None:
        """A block has come; ``whole``: as part of a release, which counts even where it is no newer.

        Raises:
            ProtocolError: its size is not that of its shard.
        """
        shard, version, block = message.header["shard"], message.header["block"], message.payload
        start, stop = self._spans[shard]
        if len(block) != stop - start:
            raise ProtocolError(f"shard {shard} sent a block of {len(block)} bytes, and its part of the model has {stop - start}")
        newest = self._blocks.held[shard]
        self._blocks.received(shard, version, self._clock())
        if whole or version > newest:
            if self._blocks.held[shard] == version:
                self._values[shard].clear()  # else the rule takes what has come one after another
            self._values[shard][version] = block

    def released(self) -> None:
        """Every block of a release is in."""
        self._blocks.released()

    def ready(self) -> bool:
        """Whether the next iteration may begin."""
        return self._blocks.ready(self._clock())

    def wake_at(self) -> Seconds | None:
        """When `ready` may change even if nothing comes."""
        return self._blocks.wake_at()

    def load(self) -> None:
        """Begin the next iteration, which must be `ready`: its blocks go into the memory that the model computes with."""
        self._blocks.advance()
        for (start, stop), version, values in zip(self._spans, self.used, self._values, strict=True):
            block = values.get(version)
            if block is not None:
                self._memory[start:stop] = block
            for old in [other for other in values if other <= version]:
                del values[old]

    def push(self, servers: Sequence[Connection], header: Mapping[str, Any], gradient: memoryview) -> None:
        """Send each shard its part, as payload: this worker may overwrite its gradient as soon as this returns."""
        for server, (start, stop) in zip(servers, self._spans, strict=True):
            server.send(header, payload=(gradient[start:stop],))
