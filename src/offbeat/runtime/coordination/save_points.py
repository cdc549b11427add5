"""Collect the parts of a checkpoint that another worker writes: each worker's random generators and BatchNorm statistics.

The coordinator keeps each worker's newest part, without reading it, until the worker that writes the checkpoint asks for it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from offbeat.transport.base import Buffer, Message
from offbeat.types import WorkerId


class Checkpoints:
    """Keep the parts that workers have handed in."""

    def __init__(self) -> None:
        self._parts: dict[WorkerId, Message] = {}
        self._steps: dict[WorkerId, int] = {}
        """Steps that each worker's script has made."""

    def stepped(self, worker: WorkerId, steps: int) -> None:
        """Set how many steps a worker's script has made."""
        self._steps[worker] = steps

    def hand_in(self, worker: WorkerId, message: Message) -> None:
        """Keep a worker's part in place of its previous one."""
        self._parts[worker] = message

    def awaited(self, workers: Collection[WorkerId], steps: int) -> list[WorkerId]:
        """Return which of these workers may still hand in a part of this step: those that have neither handed it in nor gone further."""
        return [worker for worker in workers if self._steps.get(worker, 0) <= steps and not self._has(worker, steps)]

    def parts(self, writer: WorkerId, steps: int) -> tuple[list[Any], list[Buffer]]:
        """Return the other workers' parts of this step, as triples of worker, plain data and number of bytes; and the bytes."""
        found = [(worker, self._parts[worker]) for worker in sorted(self._parts) if worker != writer and self._has(worker, steps)]
        return [[w, m.header["part"], len(m.payload)] for w, m in found], [m.payload for _, m in found]

    def _has(self, worker: WorkerId, steps: int) -> bool:
        return worker in self._parts and self._parts[worker].header["steps"] == steps
