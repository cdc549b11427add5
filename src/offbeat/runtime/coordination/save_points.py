"""Collect the parts of a checkpoint that another worker writes: each worker's random generators and BatchNorm statistics.

The coordinator keeps each worker's newest part, without reading it, until the worker that writes the checkpoint asks for it. Which parts
belong to this checkpoint does not follow from counts of steps: at an epoch's end one worker may have made a step more than another, and a
restarted worker begins to count anew. A part belongs to it if it has come since the checkpoint before; of several, the one that was
handed in at the same version, for the same one of the files of this version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from offbeat.transport.base import Buffer, Message
from offbeat.types import Incarnation, Version, WorkerId

Place: TypeAlias = tuple[Version, int]
"""A version, and the number of a file among those that the script saves of this version."""
PARTS_KEPT: Final = 8
"""Newest parts that are kept of a worker: it may save several files of one version before the writer saves the first."""


class Checkpoints:
    """Keep the parts that workers have handed in."""

    def __init__(self) -> None:
        self._parts: dict[WorkerId, dict[Place, Message]] = {}
        """Those that no checkpoint has yet, in the order in which they came."""
        self._pushed: dict[WorkerId, tuple[Incarnation, Version]] = {}
        """The process of each worker that has pushed last, and from which version."""
        self._saved: Place = (-1, 0)
        """The version of the last checkpoint, and its number among those of this version: a part of it that comes late belongs to no
        other."""

    def pushed(self, worker: WorkerId, incarnation: Incarnation, version: Version) -> None:
        """Note that a worker's script goes on, from the parameters of this version."""
        self._pushed[worker] = incarnation, version

    def hand_in(self, worker: WorkerId, message: Message) -> None:
        """Keep a worker's part."""
        place = message.header["version"], message.header["nth"]
        if place > self._saved:
            parts = self._parts.setdefault(worker, {})
            parts[place] = message
            if len(parts) > PARTS_KEPT:
                del parts[next(iter(parts))]

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
            if not self._parts.get(worker) and last < version and not made_none:
                awaited.append(worker)
        return awaited

    def parts(self, writer: WorkerId, version: Version, nth: int) -> tuple[list[Any], list[Buffer]]:
        """Return the other workers' parts, as triples of worker, plain data and number of bytes; and the bytes. No other checkpoint gets
        them."""
        found, here = [], (version, nth)
        for worker, parts in sorted(self._parts.items()):
            taken = here if here in parts else next(reversed(parts), None)
            if taken is not None and worker != writer:
                found.append((worker, parts[taken]))
                self._parts[worker] = {place: part for place, part in parts.items() if place > taken}
        self._saved = max(self._saved, here)
        return [[w, m.header["part"], len(m.payload)] for w, m in found], [m.payload for _, m in found]
