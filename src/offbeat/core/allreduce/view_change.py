"""Collect the ranks' reports for a new view, and work out which results to copy and which gradients are lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from offbeat.core.allreduce.commands import Transfer
from offbeat.core.allreduce.rounds import BUFFERS
from offbeat.types import Version, WorkerId


class ViewChange:
    """The reports that the sequencer has received for a view that is not under way yet.

    Args:
        view: the number of the new view.
        present: the ranks of the view, each of which has to report.
        floor: results of rounds before this one are not needed any more.

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
        """By host: how often each buffer has been written."""

    def report(self, rank: WorkerId, host: str, upto: Version, held: Iterable[Version], writes: Sequence[int] | None) -> None:
        """Take note of a rank's report; see `Sequencer.report`."""
        self.missing.discard(rank)
        self._upto[rank], self._held[rank] = upto, set(held)
        if writes is None:
            self._bare.add(rank)
        elif writes:
            self._writes[host] = writes

    def without_memory(self, host_of: Mapping[WorkerId, str]) -> set[str]:
        """Return the hosts none of whose ranks has the memory that they are to share: the process that was to hand it over is gone."""
        return set(host_of.values()) - {host for rank, host in host_of.items() if rank not in self._bare}

    def is_held(self, number: Version) -> bool:
        """Return whether any rank holds the result of this round."""
        return any(number in held for held in self._held.values())

    def lacking(self, number: Version) -> list[WorkerId]:
        """Return the ranks that have never had the result of this round."""
        return [rank for rank, upto in self._upto.items() if upto <= number and number not in self._held[rank]]

    def handed(self, number: Version, host_of: Mapping[WorkerId, str]) -> list[Transfer]:
        """Return the transfers that give every rank the result of a held round.

        A rank gets it from a holder on its own host. A host without a holder gets it once, from any holder, and passes it on.
        """
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
        """Return whether the buffer was written more than ``writes`` times when its host reported, so that the gradient is lost."""
        now = self._writes.get(host)
        return now is not None and now[rank * BUFFERS + buffer] > writes
