"""Pushes on their way, and the hyperparameters that come with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from offbeat.core.events import Event, Pushed
from offbeat.errors import ProtocolError
from offbeat.types import WorkerId

_SAID: Final = tuple(name for name in Pushed._fields if name not in ("worker", "shard"))
OPEN_MAX: Final = 256
"""Pushes of one worker that have not arrived at every shard: a worker waits for its push before it makes another."""


def pushed(worker: WorkerId, fields: Mapping[str, Any], shard: int | None = None) -> Pushed:
    """The event, from what the worker says of it; fields that are not known here are left out."""
    known = {name: fields[name] for name in _SAID if name in fields}
    lists = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
    return Pushed(worker, **{**known, **lists}, shard=shard)


@dataclass(slots=True)
class _Arrival:
    event: Event | None = None
    """None: another shard has it already, server 0 does not."""
    shards: set[int] = field(default_factory=set)


class ShardArrivals:
    """A push, or initial parameters, count as arrived when every shard has them.

    Args:
        shards: how many there are.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._open: dict[tuple[WorkerId, int], _Arrival] = {}

    def at(self, shard: int, worker: WorkerId, number: int, event: Event | None = None) -> Event | None:
        """One shard has it; shard 0 also knows what it is. Returns the event once all have it.

        Numbers of different processes of one worker differ, so that none completes another's.

        Raises:
            ProtocolError: the worker sends one push after the other without waiting for any.
        """
        if len(self._open) >= OPEN_MAX and sum(other == worker for other, _ in self._open) >= OPEN_MAX:
            raise ProtocolError(f"worker {worker} has {OPEN_MAX} pushes under way (expected it to wait until one has arrived)")
        arrival = self._open.setdefault((worker, number), _Arrival())
        arrival.shards.add(shard)
        arrival.event = arrival.event or event
        if len(arrival.shards) < self._shards or arrival.event is None:
            return None
        del self._open[worker, number]
        return arrival.event

    def open(self, worker: WorkerId) -> bool:
        """Whether a shard still lacks something that this worker has sent to all."""
        return any(other == worker for other, _ in self._open)

    def forget(self, worker: WorkerId) -> None:
        """What this worker has not completed will not come."""
        self._open = {key: arrival for key, arrival in self._open.items() if key[0] != worker}


class Schedules:
    """The hyperparameters that each worker's learning-rate schedule has come to."""

    def __init__(self) -> None:
        self._last: dict[WorkerId, tuple[int, Any]] = {}

    def note(self, worker: WorkerId, header: Mapping[str, Any]) -> None:
        """A push: the number of steps that the worker's script has made, and its hyperparameters where they have changed."""
        if "hyper" in header:
            self._last[worker] = (header["steps"], header["hyper"])
        elif worker in self._last:
            self._last[worker] = (header["steps"], self._last[worker][1])

    def forget(self, worker: WorkerId) -> None:
        """A worker is dead."""
        self._last.pop(worker, None)

    def newest(self, without: Collection[WorkerId]) -> Any:
        """Those of the worker that has made the most steps: schedules follow the furthest, not one that has come back. None: none yet."""
        known = [(steps, -worker, hyper) for worker, (steps, hyper) in self._last.items() if worker not in without]
        return max(known, key=lambda item: item[:2])[2] if known else None
