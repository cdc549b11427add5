"""Keep the contributions in the ledger and the samples in the epochs consistent.

Fates that the ledger tells settle the samples of those contributions. After each change free samples are dealt to workers that wait for
some, and where an epoch has ended by that, the workers outside are let in.
"""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.core.effects import BARRIER, BarrierPassed, Effect, Paused
from offbeat.core.events import BarrierWanted, EpochWanted, LeaseWanted
from offbeat.core.job.barriers import Barriers
from offbeat.core.job.epochs import Epochs
from offbeat.core.job.ledgers import AnyLedger
from offbeat.core.job.participants import Participants
from offbeat.types import Seconds, WorkerId


class JobWork:
    """Call the ledger and the epochs of a job together.

    Args:
        ledger: of the job's family.
        epochs: of the job.
        participants: of the job.
        effects: of the event in hand; this object appends its own.
    """

    def __init__(self, ledger: AnyLedger, epochs: Epochs, participants: Participants, effects: list[Effect]) -> None:
        self.ledger, self.epochs, self.barriers = ledger, epochs, Barriers()
        self._participants, self._effects = participants, effects

    def deal(self, now: Seconds) -> None:
        """Deal free samples to workers that wait for some, and end the epochs that have nothing more to wait for."""
        if self.epochs.idle or self.barriers.waiting:
            self._dealt(self.epochs.deal(now), now)

    def want(self, event: LeaseWanted | EpochWanted, now: Seconds) -> None:
        """Answer a participant that asks for samples, or for the end of an epoch."""
        self._dealt(self.epochs.want(event, now), now)

    def meet(self, event: BarrierWanted, steps: int, now: Seconds) -> None:
        """Have a participant, which has made ``steps``, wait at a barrier; one that the others have passed goes on at once."""
        worker, number = event.worker, self.barriers.come(event, steps)
        if number is None:
            assert event.number is not None
            self._effects.append(BarrierPassed(event.number, self.ledger.version, (worker,), past=True))
            self.epochs.note(self.ledger.refresh(worker, now, f"barrier {event.number} has been passed"))
            return
        self._effects.append(Paused(worker, event.incarnation, BARRIER, number, f"waits at barrier {number}"))
        self.epochs.note(self.ledger.pause(worker, now))
        self.deal(now)

    def resume(self, worker: WorkerId, now: Seconds) -> None:
        """Let a worker that was to wait for an epoch's end, or at a barrier, work again: it has sent a contribution."""
        self.epochs.resume(worker, now)
        if self.barriers.leave(worker):
            self.epochs.note(self.ledger.resume(worker, now))

    def _dealt(self, epoch_ended: bool, now: Seconds) -> None:
        if epoch_ended and self._participants.outside:
            self._let_in(now)
        at_barrier = self.barriers.waiting and not self.ledger.unsettled
        if at_barrier and self.barriers.complete(self._participants.inside(), self.epochs.idle):
            self._open_barrier(now)

    def _open_barrier(self, now: Seconds) -> None:
        number, workers = self.barriers.number, self.barriers.end()
        self._effects.append(BarrierPassed(number, self.ledger.version, workers))
        for worker in workers:
            self.epochs.note(self.ledger.resume(worker, now))
        for worker in workers:
            self.epochs.note(self.ledger.refresh(worker, now, f"all living workers have come to barrier {number}"))

    def enter(self, workers: Sequence[WorkerId], now: Seconds) -> None:
        """Let these workers take part from now on."""
        self.epochs.prepare()
        for worker in workers:
            self.epochs.withdraw(self.ledger.recalled(worker))
            incarnation = self._participants.membership[worker].incarnation
            self.epochs.note(self.ledger.enter(worker, incarnation, now, more=worker != workers[-1]))
        self.deal(now)

    def leave(self, worker: WorkerId, now: Seconds) -> None:
        """Go on without this worker; if it was the last inside, the workers outside need not wait for the end of its epoch."""
        self.barriers.leave(worker)
        self.epochs.note(self.ledger.leave(worker, now))
        self.deal(now)
        if self._participants.outside and not self._participants.inside():
            self._let_in(now)

    def _let_in(self, now: Seconds) -> None:
        outside = list(self._participants.outside)
        self._participants.outside.clear()
        self.enter(outside, now)
