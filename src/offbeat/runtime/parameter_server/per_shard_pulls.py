"""The values of a worker's blocks in rules of shard scope: those it computes from, and those that have come for it meanwhile.

`core.worker.Worker` decides when the worker may go on; this file keeps the values, and moves them into the model's memory at that moment
only: between two iterations, when nobody computes from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.core.block_cache import Blocks
from offbeat.core.worker import Worker
from offbeat.core.worker_messages import BlockArrived
from offbeat.errors import ProtocolError
from offbeat.tensors.layout import Span
from offbeat.transport.base import Connection, Message
from offbeat.types import Seconds, Version


class BlockPulls:
    """The blocks of one worker.

    Args:
        machine: of a worker of a rule of shard scope. It is told of each block that arrives.
        spans: where each shard's block lies, in bytes.
        memory: of the parameters that the model computes with.
    """

    def __init__(self, machine: Worker, spans: Sequence[Span], memory: memoryview) -> None:
        self._machine, self._spans, self._memory = machine, spans, memory
        self._values: list[dict[Version, memoryview]] = [{} for _ in spans]
        """Those that may still be used, by shard and version."""

    @property
    def _blocks(self) -> Blocks:
        assert self._machine.blocks is not None
        return self._machine.blocks

    @property
    def used(self) -> tuple[Version, ...]:
        """The version of each block that the worker computes from."""
        return self._blocks.used

    def forget(self) -> None:
        """Forget all values: the worker joins again."""
        for values in self._values:
            values.clear()

    def received(self, message: Message, now: Seconds, *, whole: bool = False) -> None:
        """Store an arrived block. ``whole``: it is part of a release, and is stored even if it is no newer than the held one.

        Raises:
            ProtocolError: its size is not that of its shard.
        """
        shard, version, block = message.header["shard"], message.header["block"], message.payload
        start, stop = self._spans[shard]
        if len(block) != stop - start:
            raise ProtocolError(f"shard {shard} sent a block of {len(block)} bytes, and its part of the model has {stop - start}")
        newest = self._blocks.held[shard]
        self._machine.on(BlockArrived(shard, version), now)
        if whole or version > newest:
            if self._blocks.held[shard] == version:
                self._values[shard].clear()  # else the rule takes what has come one after another
            self._values[shard][version] = block

    def load(self) -> None:
        """Move the blocks of the iteration that begins into the memory that the model computes with."""
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
