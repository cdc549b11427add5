"""Handle what participants send: contributions, reports about earlier contributions, and requests for samples and parameters.

A message counts if its sender is alive, in its newest incarnation, and has been told to go on. For a push that counts, its samples are
claimed, and then the ledger is asked; each other push is rejected with a reason.
"""

from __future__ import annotations

from offbeat.core.allreduce.ledger import RoundLedger
from offbeat.core.effects import Effect, Settle
from offbeat.core.events import Abandoned, BarrierWanted, EpochWanted, Folded, LeaseWanted, PullWanted, Pushed, Skipped, Voided, Withdrawn
from offbeat.core.job.participants import Participants
from offbeat.core.job.progress import Progress
from offbeat.core.job.waiting import Waiting
from offbeat.core.job.work import JobWork
from offbeat.core.server.ledger import Ledger
from offbeat.types import Fate, Seconds, WorkerState


class Contributions:
    """Handle the events of work that is done.

    Args:
        participants: of the job.
        waiting: of the job.
        work: of the job.
        progress: of the job; counts the steps of contributions.
        effects: of the event in hand; this object appends its own.
    """

    def __init__(self, participants: Participants, waiting: Waiting, work: JobWork, progress: Progress, effects: list[Effect]) -> None:
        self._participants, self._waiting, self._work, self._effects = participants, waiting, work, effects
        self._progress = progress
        self._ledger, self._epochs = work.ledger, work.epochs

    def pushed(self, event: Pushed, now: Seconds) -> None:
        """Pass a push to the ledger, with its samples, or reject it."""
        worker = event.worker
        if (fenced := self._fenced(event, now)) is not None:
            version = self._ledger.version
            self._effects.append(Settle(worker, event.incarnation, 0, Fate.REJECTED, fenced, version, event.samples, event.shard))
            return
        refusal = None
        self._waiting.take_back(worker, now)
        if self._ledger.begins(event):
            self._work.resume(worker, now)
            self._progress.count(worker, event.steps, event.place)
            if event.leases:
                refusal = self._epochs.claim(event, self._ledger.clock(worker) + 1)
            if event.nonfinite is not None:
                refusal = f"gradient not finite in {event.nonfinite}"
            self._epochs.measure(event)
        self._epochs.note(self._ledger.push(event, now, refusal))
        self._work.deal(now)

    def _fenced(self, event: Pushed, now: Seconds) -> str | None:
        """Return why a push does not count; None: it does."""
        worker, incarnation = event.worker, event.incarnation
        participants = self._participants
        # What another server reports is no sign of life: the push may be older than the worker's end, which server 0 has seen already.
        if not (participants.present(worker, incarnation) if event.shard else participants.speaks(worker, incarnation, now)):
            membership = participants.membership
            left = worker in membership and membership[worker].state is WorkerState.FINISHED
            return f"sent by incarnation {incarnation}, which {'has left' if left else 'was declared dead'}"
        return None if self._waiting.admitted(worker) else "pushed without having been admitted"

    def abandoned(self, event: Abandoned, now: Seconds) -> None:
        """Give back the samples of work that will not be pushed."""
        worker = event.worker
        if not self._participants.speaks(worker, event.incarnation, now) or not self._waiting.admitted(worker):
            return
        self._waiting.take_back(worker, now)
        self._work.resume(worker, now)
        self._epochs.abandon(event)
        self._epochs.note(self._ledger.abandon(event, now))
        self._work.deal(now)

    def folded(self, event: Folded, now: Seconds) -> None:
        """Pass the measurements of a fold, or a round that ranks have closed, to the ledger."""
        self._epochs.note(self._ledger.folded(event, now))
        # A rule that has waited for measurements folds now, and that may have been all that an epoch's end waited for.
        self._work.deal(now)

    def withdrawn(self, event: Withdrawn, now: Seconds) -> None:
        """Take back a gradient that was lost before it was summed: with its host, or with the leader of a server that had it."""
        assert isinstance(self._ledger, RoundLedger | Ledger), "a gradient is lost where its worker cannot send it again"
        if event.number >= self._ledger.version:
            self._epochs.withdraw(self._ledger.recalled(event.worker))
        self._epochs.note(self._ledger.withdrawn(event, now))
        self._work.deal(now)

    def voided(self, event: Voided, now: Seconds) -> None:
        """Leave out the step of a round whose mean is beyond the range of the numbers."""
        assert isinstance(self._ledger, RoundLedger), "servers weight gradients before they add them"
        self._epochs.note(self._ledger.voided(event, now))

    def skipped(self, event: Skipped, now: Seconds) -> None:
        """Settle samples that the script has left out. They may have been all that an epoch's end waited for."""
        if self._participants.speaks(event.worker, event.incarnation, now):
            self._epochs.leave_out(event)
            self._work.deal(now)

    def pull_wanted(self, event: PullWanted, now: Seconds) -> None:
        """Send the newest parameters to an admitted worker; one that waits to be admitted gets them with that, and not before."""
        if self._participants.speaks(event.worker, event.incarnation, now) and self._waiting.admitted(event.worker):
            self._epochs.note(self._ledger.refresh(event.worker, now, "asked for"))

    def barrier_wanted(self, event: BarrierWanted, now: Seconds) -> None:
        """Have an admitted worker wait at a barrier."""
        if self._participants.speaks(event.worker, event.incarnation, now) and self._waiting.admitted(event.worker):
            self._waiting.take_back(event.worker, now)
            self._work.meet(event, self._progress.steps(event.worker), now)

    def samples_wanted(self, event: LeaseWanted | EpochWanted, now: Seconds) -> None:
        """Answer a participant that asks for samples, or for the end of an epoch."""
        if self._participants.speaks(event.worker, event.incarnation, now) and event.worker not in self._participants.outside:
            self._waiting.take_back(event.worker, now)
            self._work.want(event, now)
