"""Across hosts: a view that is not under way yet. What ranks say when they have halted for it, and what follows from that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from offbeat.core.allreduce.commands import Transfer
from offbeat.core.allreduce.rounds import BUFFERS
from offbeat.types import Version, WorkerId


class ViewChange:
    """The reports that the seat has for a new view.

    Args:
        view: the new one.
        present: the ranks in it, which are to report.
        floor: results of rounds before this one are of no more use.

    >>> change = ViewChange(1, [0, 1, 2], floor=5)
    >>> for rank, upto, held in ((0, 7, [5, 6]), (1, 6, [5]), (2, 6, [5])):
    ...     change.report(rank, "ab"[rank > 0], upto, held, [1] * 6)
    >>> change.missing, change.lacking(6)
    (set(), [1, 2])
    >>> change.handed(6, {0: "a", 1: "b", 2: "b"})  # rank 1 passes it on to rank 2, which shares its memory
    [Transfer(holder=0, view=1, number=6, to=(1,))]
    """

    def __init__(self, view: int, present: Iterable[WorkerId], floor: Version) -> None:
        self.view, self.floor = view, floor
        self.missing = set(present)
        """Ranks that have not reported."""
        self._upto: dict[WorkerId, Version] = {}
        self._held: dict[WorkerId, set[Version]] = {}
        self._bare: set[WorkerId] = set()
        self._writes: dict[str, Sequence[int]] = {}
        """Of each host how often each buffer has been written there."""

    def report(self, rank: WorkerId, host: str, upto: Version, held: Iterable[Version], writes: Sequence[int] | None) -> None:
        """A rank of this host has had the results of all rounds before ``upto``, and holds those of ``held``.

        Args:
            writes: how often each buffer of its host has been written, `BUFFERS` numbers for each rank; None: it is without that memory.
        """
        self.missing.discard(rank)
        self._upto[rank], self._held[rank] = upto, set(held)
        if writes is None:
            self._bare.add(rank)
        elif writes:
            self._writes[host] = writes

    def without_memory(self, host_of: Mapping[WorkerId, str]) -> set[str]:
        """Hosts whose ranks all are without the memory that they are to share: who was to hand it over is gone."""
        return set(host_of.values()) - {host for rank, host in host_of.items() if rank not in self._bare}

    def is_held(self, number: Version) -> bool:
        """Whether anybody has the result of this round."""
        return any(number in held for held in self._held.values())

    def lacking(self, number: Version) -> list[WorkerId]:
        """Who does not have the result of this round, and has not had it."""
        return [rank for rank, upto in self._upto.items() if upto <= number and number not in self._held[rank]]

    def handed(self, number: Version, host_of: Mapping[WorkerId, str]) -> list[Transfer]:
        """One of the same host who has it tells who has not; a host where nobody has it gets it from another, and passes it on there."""
        holders = {host_of[rank]: rank for rank, held in self._held.items() if number in held}
        to: dict[WorkerId, list[WorkerId]] = {}
        anybody, given = next(iter(holders.values())), set[str]()
        for rank in self.lacking(number):
            host = host_of[rank]
            if host not in given:
                to.setdefault(holders.get(host, anybody), []).append(rank)
            if host not in holders:
                given.add(host)
        return [Transfer(holder, self.view, number, tuple(ranks)) for holder, ranks in to.items()]

    def written_over(self, host: str, rank: WorkerId, buffer: int, writes: int) -> bool:
        """Whether a gradient that was there with so many writes is no more. What has come after the report was not there to be counted."""
        now = self._writes.get(host)
        return now is not None and now[rank * BUFFERS + buffer] > writes
