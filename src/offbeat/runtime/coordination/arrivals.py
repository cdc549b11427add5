"""Track pushes that have not arrived at every shard, and the hyperparameters that came with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from offbeat.core.events import Event, Pushed
from offbeat.errors import ProtocolError
from offbeat.types import WorkerId

_FIELDS: Final = frozenset(Pushed._fields) - {"worker", "shard"}
OPEN_MAX: Final = 256
"""Most pushes of one worker that may be under way: a worker waits for a push before it makes the next one."""


def pushed(worker: WorkerId, fields: Mapping[str, Any], shard: int | None = None) -> Pushed:
    """Return the event for a push, from the fields of the worker's message; unknown fields are ignored."""
    known: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items() if name in _FIELDS}
    if shard and not known.get("alone"):  # where a worker's time has gone is told once, not by each shard
        known |= dict.fromkeys(("phases", "processor", "host", "process"))
    return Pushed(worker, **known, shard=shard)


@dataclass(slots=True)
class _Arrival:
    event: Event | None = None
    """None while another shard has the push and server 0 does not."""
    shards: set[int] = field(default_factory=set)


class ShardArrivals:
    """Count a push, or initial parameters, as arrived once every shard has them.

    Args:
        shards: the number of shards.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._open: dict[tuple[WorkerId, int], _Arrival] = {}

    def at(self, shard: int, worker: WorkerId, number: int, event: Event | None = None) -> Event | None:
        """Note that a shard has a push; shard 0 also gives its event. Returns the event once all shards have the push, or of a push that
        one shard gets alone, that shard.

        Processes of one worker use different numbers, so that a push of one never completes that of another.

        Raises:
            ProtocolError: the worker has `OPEN_MAX` pushes under way.
        """
        if self._shards == 1:
            return event
        if len(self._open) >= OPEN_MAX and sum(other == worker for other, _ in self._open) >= OPEN_MAX:
            raise ProtocolError(f"worker {worker} has {OPEN_MAX} pushes under way (expected it to wait until one has arrived)")
        arrival = self._open.setdefault((worker, number), _Arrival())
        arrival.shards.add(shard)
        arrival.event = arrival.event or event
        event = arrival.event
        needed = (event.shard,) if isinstance(event, Pushed) and event.alone else range(self._shards)
        if event is None or not arrival.shards.issuperset(needed):
            return None
        del self._open[worker, number]
        return event

    @property
    def awaited(self) -> set[WorkerId]:
        """The workers of which server 0 has something that a shard lacks. What a shard alone has may be of a process that has died."""
        return {worker for (worker, _), arrival in self._open.items() if arrival.event is not None}

    def forget(self, worker: WorkerId) -> None:
        """Forget the incomplete pushes of a worker whose process is gone."""
        self._open = {key: arrival for key, arrival in self._open.items() if key[0] != worker}


class Schedules:
    """Keep the hyperparameters that each worker's learning-rate schedule has reached."""

    def __init__(self) -> None:
        self._last: dict[WorkerId, tuple[int, Any]] = {}

    def note(self, worker: WorkerId, header: Mapping[str, Any]) -> None:
        """Take note of a push: the steps that the worker's script has made, and its hyperparameters if they have changed."""
        if "hyper" in header:
            self._last[worker] = (header["steps"], header["hyper"])
        elif worker in self._last:
            self._last[worker] = (header["steps"], self._last[worker][1])

    def forget(self, worker: WorkerId) -> None:
        """Forget a dead worker."""
        self._last.pop(worker, None)

    def newest(self, without: Collection[WorkerId]) -> Any:
        """Return the hyperparameters of the worker with the most steps, so that one that has come back does not reset them; None if there
        are none yet."""
        known = [(steps, -worker) for worker, (steps, _) in self._last.items() if worker not in without]
        return self._last[WorkerId(-max(known)[1])][1] if known else None
