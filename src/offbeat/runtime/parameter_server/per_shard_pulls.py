"""The values of a worker's blocks in rules of shard scope: those it computes from, and those that have come for it meanwhile.

`core.worker.Worker` decides when the worker may go on; this file keeps the values, and moves them into the model's memory at that moment
only: between two iterations, when nobody computes from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from offbeat.core.block_cache import Blocks
from offbeat.core.worker import Worker
from offbeat.core.worker_messages import BlockArrived
from offbeat.errors import ProtocolError
from offbeat.runtime.parameter_server.encoding import FragmentEncoding
from offbeat.tensors.averaging import mix
from offbeat.tensors.layout import Layout, Span, copy, on_host
from offbeat.transport.base import Connection, Message
from offbeat.types import Seconds, Version


class BlockPulls:
    """The blocks of one worker.

    Args:
        machine: of a worker of a rule of shard scope. It is told of each block that arrives.
        layout: of the model.
        spans: where each shard's block lies, in bytes.
        memory: of the parameters that the model computes with.
        encodings: by shard, those over whose connection fragments are encoded.
    """

    def __init__(
        self,
        machine: Worker,
        layout: Layout,
        spans: Sequence[Span],
        memory: memoryview,
        encodings: Mapping[int, FragmentEncoding] = MappingProxyType({}),
    ) -> None:
        self._encodings = encodings
        self._machine, self._layout, self._spans, self._memory = machine, layout, spans, memory
        self._values: list[dict[Version, memoryview]] = [{} for _ in spans]
        """Those that may still be used, by shard and version."""
        self._whole: set[int] = set()
        """The shards whose newest value belongs to a release, and replaces what the worker has."""

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
        self._whole.clear()

    def received(self, message: Message, now: Seconds, *, whole: bool = False) -> None:
        """Store an arrived block. ``whole``: it is part of a release, and is stored even if it is no newer than the held one.

        Raises:
            ProtocolError: its size is not that of its shard.
        """
        shard, version, block = message.header["shard"], message.header["block"], message.payload
        start, stop = self._spans[shard]
        encoding = self._encodings.get(shard)
        if encoding is not None and not whole:
            block = encoding.decode_version(shard, block)
        if len(block) != stop - start:
            raise ProtocolError(f"shard {shard} sent a block of {len(block)} bytes, and its part of the model has {stop - start}")
        if encoding is not None and whole:
            encoding.released(block)
        newest = self._blocks.held[shard]
        self._machine.on(BlockArrived(shard, version), now)
        if whole or version > newest:
            if self._blocks.held[shard] == version:
                self._values[shard].clear()  # else the rule takes what has come one after another
            self._values[shard][version] = block
            self._whole |= {shard} if whole else set()

    @property
    def news(self) -> list[int]:
        """The shards whose part of the memory `load` will change."""
        return [shard for shard, version in enumerate(self.used) if version in self._values[shard]]

    def kept(self, shard: int) -> float:
        """Return what remains of the worker's own parameters if its part of the memory changes."""
        return 0.0 if shard in self._whole else self._blocks.alpha

    def load(self) -> None:
        """Move the blocks of the iteration that begins into the memory that the model computes with, or mix fragments with what it has."""
        for shard, (span, version, values) in enumerate(zip(self._spans, self.used, self._values, strict=True)):
            start, stop = span
            block = values.get(version)
            if block is not None and (alpha := self.kept(shard)):
                mix(self._layout, span, self._memory[start:stop], block, alpha)
            elif block is not None:
                copy(self._memory[start:stop], block)
                self._whole.discard(shard)
            for old in [other for other in values if other <= version]:
                del values[old]

    def push(self, servers: Sequence[Connection], header: Mapping[str, Any], gradient: memoryview) -> None:
        """Send each shard its part, as payload: this worker may overwrite its gradient as soon as this returns.

        A fragment goes to its shard alone, and its description to server 0.
        """
        shard = header["push"].get("shard")
        if shard is not None:
            start, stop = self._spans[shard]
            encoding, fragment = self._encodings.get(shard), on_host(gradient[start:stop])
            if encoding is not None:
                fragment = encoding.encode_push(header["number"], fragment)
            if shard:
                about = {name: header[name] for name in ("kind", "worker", "number")}
                servers[shard].send(about, payload=(fragment,))
            servers[0].send(header, payload=() if shard else (fragment,))
            return
        for server, (start, stop) in zip(servers, self._spans, strict=True):
            server.send(header, payload=(on_host(gradient[start:stop]),))

    def unused(self, number: int) -> None:
        """Note that a push was dropped or rejected."""
        for encoding in self._encodings.values():
            encoding.give_back(number)
