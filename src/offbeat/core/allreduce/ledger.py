"""The ledger of the allreduce family: who contributed what to which round. It has the interface of `core.server.ledger.Ledger`.

The decisions are those of `core.allreduce.rounds.Rounds`; this file knows which contribution is in which of a rank's buffers, and says in
effects what has been decided: the fold of a round, the one fate of each contribution, and who goes on with which version. A gradient that
comes late has no fate until the round in which it is carried is folded.

In the simulator it decides. Live, where the ranks decide in memory that they share, the coordinator's ledger ``follows``: it is told the
same events in the same order, and after each that has closed a round, that it has: `events.Folded` with the version that comes of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import numpy as np

from offbeat.core.allreduce.policy import WIDTH, RoundRule
from offbeat.core.allreduce.rounds import Rounds
from offbeat.core.base_ledger import BaseLedger, Standing
from offbeat.core.effects import Effect, Fold, Part, Settle, Undone
from offbeat.core.events import Abandoned, Folded, Pushed, Voided, Withdrawn
from offbeat.core.policy import Contribution
from offbeat.types import Clock, Fate, Incarnation, LeaseId, Seconds, Version, WorkerId

ROOM = 16
"""Ranks, at the start; the table grows when others come."""
REMEMBERED = 512
"""Folds of which a ledger that follows still knows the parts: more than ranks may be behind."""


class RoundLedger(BaseLedger):
    """The books of one job of the allreduce family.

    Each method that changes something returns the effects, in the order in which they are to be carried out.

    Args:
        rule: when a round closes.
        seed: of what the rule draws.
        follows: rounds are closed elsewhere; see `folded`.

    >>> from offbeat.policies import rule
    >>> ledger = RoundLedger(rule("majority"), seed=4)
    >>> for rank in range(3):
    ...     _ = ledger.enter(rank, 1, now=0.0)
    >>> for rank in range(3):
    ...     for effect in ledger.push(Pushed(rank, 1, version=0, samples=8, compute_s=0.5), now=1.0 + rank):
    ...         print(type(effect).__name__, effect.reason)
    Fold round 0, closed by rank 1: 2 gradients of 3 ranks
    Settle round 0, closed by rank 1: 2 gradients of 3 ranks
    Settle round 0, closed by rank 1: 2 gradients of 3 ranks
    Release round 0, closed by rank 1: 2 gradients of 3 ranks
    Release round 0, closed by rank 1: 2 gradients of 3 ranks
    Release late: its gradient is carried into round 1
    """

    def __init__(self, rule: RoundRule, seed: int = 0, *, follows: bool = False) -> None:
        self.rounds = Rounds(rule, ROOM, seed, follows=follows)
        self._follows = follows
        self._standings: dict[WorkerId, Standing] = {}
        self._active: dict[WorkerId, None] = {}
        self._waiting: dict[WorkerId, None] = {}
        """Ranks that have arrived on time in the open round."""
        self._pending: dict[tuple[WorkerId, int], Contribution] = {}
        """By rank and buffer."""
        self._folds: deque[tuple[Version, list[Contribution]]] = deque(maxlen=REMEMBERED if follows else 0)
        self._slowest: Clock = 0
        self._last: WorkerId | None = None
        """The rank that arrived with the last event; None if that event was no arrival."""
        self._effects: list[Effect] = []
        self.version: Version = 0
        """Number of folded rounds."""

    @property
    def unsettled(self) -> Collection[WorkerId]:
        """Ranks, dead ones too, with contributions that have no fate yet."""
        return {worker for worker, _ in self._pending}

    def recalled(self, worker: WorkerId) -> tuple[LeaseId, ...]:
        """The samples of what this rank has pending: if it enters anew, that is dropped."""
        return tuple(lease for (rank, _), c in self._pending.items() if rank == worker for lease in c.leases)

    # What happens.

    def enter(self, worker: WorkerId, incarnation: Incarnation, now: Seconds, *, more: bool = False) -> list[Effect]:
        """Add a rank to the active ones, with the slowest clock. It continues with the newest version, which a living rank gives it.

        What its previous incarnation has pending is dropped: its buffers are the newcomer's now.
        """
        self._last = None
        self._make_room(worker)
        standing = self._standings.setdefault(worker, Standing())
        others = [self._standings[other].clock for other in self._active if other != worker]
        standing.incarnation, standing.clock = incarnation, min(others, default=self._slowest)
        for part in self.rounds.enter(worker, self.version):
            if (c := self._pending.pop(part, None)) is not None:  # None: it went with its host, and was dropped then
                self._fate(c, Fate.DROPPED, "its rank has come back before the round closed and contributes anew")
        self._active[worker] = None
        self._waiting.pop(worker, None)
        self._release(worker, f"takes part from version {self.version} on")
        return self._flush()

    def push(self, event: Pushed, now: Seconds, refusal: str | None = None) -> list[Effect]:
        """An active rank has arrived; ``refusal`` says why its contribution must not be used, if so."""
        worker, standing, rounds = event.worker, self._standings[event.worker], self.rounds
        assert worker in self._active and worker not in self._waiting, f"rank {worker} arrived without having been released"
        standing.clock += 1
        c = self._contribution(event, standing.clock, now)
        buffer = None
        if refusal is None:
            buffer = rounds.free_buffer(worker)
            assert buffer is not None, f"rank {worker} arrived with a third gradient for round {rounds.number}"
            self._pending[worker, buffer] = c
        else:
            self._fate(c, Fate.REJECTED, refusal)
        arrival = rounds.arrive(worker, buffer, event.version, 0 if event.sums else event.samples)
        self._last = worker
        waits = rounds.waits(worker) or not arrival.late  # or did until just now
        if waits:
            self._waiting[worker] = None
        if arrival.closed:
            self._fold(f"by rank {worker}")
        if not waits:
            number = arrival.number
            went = f"is in round {number}, which closed with it" if arrival.closed else f"is carried into round {number}"
            self._go_on(worker, f"late: its gradient {went}" if refusal is None else f"late for round {number - 1}, and without a gradient")
        return self._flush()

    def abandon(self, event: Abandoned, now: Seconds) -> list[Effect]:
        """An active rank has given up what it was computing. It goes on with the newest version."""
        return self.refresh(event.worker, now, "has given up what it computed")

    def folded(self, event: Folded, now: Seconds) -> list[Effect]:
        """For a ledger that follows: the event before this one has closed the round that makes this version.

        With the ranks that were there and the gradients that were pending: what arrives while a round is being folded is for the next.
        """
        if self._follows:
            assert event.version == self.version + 1, f"round {event.version - 1} was closed after round {self.version - 1}"
            last, self._last = self._last, None
            late = last is not None and last not in self._waiting
            self.rounds.close(last)
            self._fold("by the ranks that are left" if last is None else f"by rank {last}")
            if last is not None and late:  # it has gone on already, for all that was known
                self._go_on(last, f"late: its gradient is in round {self.version - 1}, which closed with it")
        return self._flush()

    def withdrawn(self, event: Withdrawn, now: Seconds) -> list[Effect]:
        """For a ledger that follows: gradients of a rank went with its host before they were in the result of this round."""
        reason = f"it went with its host before round {event.number} was summed"
        if event.number < self.version:
            parts = next((parts for version, parts in self._folds if version == event.number + 1), [])
            for c in [c for c in parts if c.worker == event.worker]:
                self._effects.append(Undone(c.worker, c.incarnation, c.clock, event.number + 1, c.samples, reason))
                parts.remove(c)
        else:
            for part in [part for part in self._pending if part[0] == event.worker]:
                self._fate(self._pending.pop(part), Fate.DROPPED, reason)
        return self._flush()

    def voided(self, event: Voided, now: Seconds) -> list[Effect]:
        """For a ledger that follows: the mean of a folded round is not finite, and no rank has made a step with it."""
        assert event.number < self.version, f"round {event.number} is void before it was closed"
        parts = next((parts for version, parts in self._folds if version == event.number + 1), [])
        reason = f"the mean of round {event.number} is not finite: its step is left out"
        for c in parts:
            self._effects.append(Undone(c.worker, c.incarnation, c.clock, event.number + 1, c.samples, reason, Fate.REJECTED))
        parts.clear()
        return self._flush()

    def leave(self, worker: WorkerId, now: Seconds) -> list[Effect]:
        """Remove a rank that is dead or has finished from the active ones. Its pending gradients still count."""
        if worker not in self._standings:
            return []
        self._deactivate(worker)
        if self.rounds.leave(worker):
            self._fold(f"without rank {worker}, which has left")
        return self._flush()

    def pause(self, worker: WorkerId, now: Seconds) -> list[Effect]:
        """Remove a rank without samples from the active ones until `resume`. If all have paused, the pending gradients are folded."""
        self._deactivate(worker)
        if self.rounds.pause(worker):
            self._fold(f"as rank {worker} has paused")
        return self._flush()

    def resume(self, worker: WorkerId, now: Seconds) -> list[Effect]:
        """A paused rank works again."""
        self._last = None
        self.rounds.resume(worker)
        self._active[worker] = None
        return []

    def refresh(self, worker: WorkerId, now: Seconds, reason: str) -> list[Effect]:
        """Give a rank that does not wait for a round the results that it has missed."""
        self._last = None
        self.rounds.catch_up(worker)
        self._go_on(worker, reason)
        return self._flush()

    def close(self, now: Seconds, reason: str) -> list[Effect]:
        """The job is over: whatever has no fate yet is dropped."""
        for contribution in self._pending.values():
            self._fate(contribution, Fate.DROPPED, reason)
        self._pending.clear()
        return self._flush()

    # What that comes to.

    def _deactivate(self, worker: WorkerId) -> None:
        self._last = None
        self._waiting.pop(worker, None)
        if worker in self._active:
            del self._active[worker]
            if not self._active:
                self._slowest = self._standings[worker].clock

    def _fold(self, why: str) -> None:
        """A round is closed: it is folded at once, and who waited for it goes on."""
        rounds = self.rounds
        closed = rounds.closed()
        assert closed is not None, "no round is closed"
        before, self.version = self.version, self.version + 1
        found = [(part, self._pending.pop(part)) for part in closed.parts if part in self._pending]
        gone = [c for _, c in found]
        self._folds.append((self.version, gone))
        sums = any(c.sums for c in gone)
        equal = 1.0 if sums else 1.0 / closed.divisor
        weights = dict(zip(closed.parts, closed.weights, strict=True)) if closed.weights else {}
        parts = tuple([Part(c.worker, c.incarnation, c.clock, weights.get(at, equal), before - c.version) for at, c in found])
        count = f"{len(parts)} gradient{'s' * (len(parts) != 1)} of {closed.divisor} rank{'s' * (closed.divisor != 1)}"
        reason = f"round {closed.number}, closed {why}: {count}"
        effects = self._effects
        effects.append(Fold(self.version, parts, reason, divisor=closed.divisor, sums=sums))
        version, folded = self.version, Fate.FOLDED
        effects += [Settle(c.worker, c.incarnation, c.clock, folded, reason, version, c.samples) for c in gone]
        waited, self._waiting = self._waiting, {}
        again = rounds.fold_done()
        assert not again, "who waits arrived on time, and nobody did while the round was folded"
        for worker in waited:
            self._go_on(worker, reason)

    def _go_on(self, worker: WorkerId, reason: str) -> None:
        """Note that a rank has read its results. A round that was held up until then closes."""
        self._release(worker, reason)
        if self.rounds.read(worker):
            self._fold(f"as rank {worker} has caught up")

    def _make_room(self, worker: WorkerId) -> None:
        if worker >= self.rounds.ranks:
            before = self.rounds.table
            table = np.zeros((1 + max(worker + 1, 2 * self.rounds.ranks), WIDTH), dtype=np.int64)
            table[: len(before)] = before
            self.rounds.use(table)
