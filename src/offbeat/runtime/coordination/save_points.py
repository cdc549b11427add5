"""Collect the parts of a checkpoint that another worker writes: each worker's random generators and BatchNorm statistics.

The coordinator keeps each worker's newest part, without reading it, until the worker that writes the checkpoint asks for it. Which parts
belong to this checkpoint does not follow from counts of steps: at an epoch's end one worker may have made a step more than another, and a
restarted worker begins to count anew. A part belongs to it if it has come since the checkpoint before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbeat.transport.base import Buffer, Message
from offbeat.types import Incarnation, Version, WorkerId


class Checkpoints:
    """Keep the parts that workers have handed in."""

    def __init__(self) -> None:
        self._parts: dict[WorkerId, Message] = {}
        """Of those that no checkpoint has yet."""
        self._pushed: dict[WorkerId, tuple[Incarnation, Version]] = {}
        """The process of each worker that has pushed last, and from which version."""
        self._saved: tuple[Version, int] = (-1, 0)
        """The version of the last checkpoint, and its number among those of this version: a part of it that comes late belongs to no
        other."""

    def pushed(self, worker: WorkerId, incarnation: Incarnation, version: Version) -> None:
        """Note that a worker's script goes on, from the parameters of this version."""
        self._pushed[worker] = incarnation, version

    def hand_in(self, worker: WorkerId, message: Message) -> None:
        """Keep a worker's part in place of its previous one."""
        if (message.header["version"], message.header["nth"]) > self._saved:
            self._parts[worker] = message

    def awaited(self, workers: Mapping[WorkerId, tuple[Incarnation, bool]], version: Version) -> list[WorkerId]:
        """Return which of these workers may still hand in a part of the checkpoint of this version.

        Those may not that have done so or have pushed from this version, nor a process that has come to the running job and has not made
        a step: its script is elsewhere.

        Args:
            workers: their incarnations, and whether each was there when the job began.
            version: of the worker that writes the checkpoint.
        """
        awaited = []
        for worker, (incarnation, first) in workers.items():
            of, last = self._pushed.get(worker, (incarnation, -1))
            made_none = not first and (of != incarnation or last < 0)
            if worker not in self._parts and last < version and not made_none:
                awaited.append(worker)
        return awaited

    def parts(self, writer: WorkerId, version: Version, nth: int) -> tuple[list[Any], list[Buffer]]:
        """Return the other workers' parts, as triples of worker, plain data and number of bytes; and the bytes. No other checkpoint gets
        them."""
        found = [(worker, part) for worker, part in sorted(self._parts.items()) if worker != writer]
        self._parts.clear()
        self._saved = max(self._saved, (version, nth))
        return [[w, m.header["part"], len(m.payload)] for w, m in found], [m.payload for _, m in found]
