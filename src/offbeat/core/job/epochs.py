"""Deal samples while an epoch runs, and end the epoch.

A worker is paused until the end of an epoch that has no samples left for it, so that it can take the samples of workers that die; the rule
does not wait for paused workers. An epoch ends when every index is settled, or when every living worker waits for its end. It does not end
while a worker holds samples without having pushed their gradients: the coordinator tells such a worker that no samples are left, the worker
pushes its local steps and asks again, since samples of dead workers may come back. A worker that has accumulated a gradient and made no
step with it takes the samples along into the next epoch, and the epoch ends without them.

Where workers have splits of their own (`core.partitions`), the splits of an epoch are decided when the epoch before it ends, for all
workers alive then, joiners included; and once more if the living workers have changed when the first samples are asked for. So are the
shares of an epoch that a script has asked for (``deal="even"``).

A worker that has joined the running job does not begin an epoch, except a sampler's first: it waits until a worker that was there when the
job began, and has used this sampler, takes the first samples. The joiner's script may count epochs from an old checkpoint, and would
otherwise train an epoch alone that no other script asks for. If no such worker is left, the joiner begins the epoch, unless the script of
one of them has come to its end, or has closed the optimizer. Then the joiner gets no more samples, of the epoch under way either: the
scripts left its loop before its end, as those do that count their steps over a sampler without one. Where they go on, to evaluate or to
make another optimizer, the joiner's loops pass, each without a batch, and its script follows them; where they have ended, so does the
joiner's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from offbeat.core.batch_sizes import AutoSizes, Deal
from offbeat.core.effects import Effect, EpochEnded, Grant, NoMore, Paused, Resized
from offbeat.core.events import Abandoned, EpochWanted, LeaseWanted, Pushed, Skipped
from offbeat.core.job.ledgers import AnyLedger
from offbeat.core.job.participants import Participants
from offbeat.core.job.start import JobStart
from offbeat.core.leases import Leases
from offbeat.core.partitions import Splits, shares, size_of
from offbeat.types import Clock, Epoch, Incarnation, LeaseId, Seconds, WorkerId


class Epochs:
    """Deal the sample pools of one job.

    Args:
        ledger: the ledger of the job; workers that pause here are paused there.
        participants: of the job.
        start: of the job; it knows the workers that were there when the job began.
        effects: of the event in hand; this object appends its own, and the ledger's.
        workers: number of workers with which the job was started.
        overlap: fraction of the data in every worker's split, where each worker has a split of its own; None: one pool for all.
    """

    def __init__(
        self,
        ledger: AnyLedger,
        participants: Participants,
        start: JobStart,
        effects: list[Effect],
        *,
        workers: int = 1,
        overlap: float | None = None,
    ) -> None:
        self._ledger, self._participants, self._start, self._effects = ledger, participants, start, effects
        self._shared: dict[int, Deal] = {}
        """Of pools of which each worker has a share: how they are dealt out."""
        self._auto = AutoSizes()
        self._users: dict[int, set[WorkerId]] = {}
        """The workers there when the job began that have taken samples, by pool."""
        self._workers, self._overlap = workers, overlap
        self._leases = Leases()
        self._idle: dict[WorkerId, LeaseWanted | EpochWanted] = {}
        self._riding: dict[tuple[WorkerId, Incarnation, Clock], tuple[LeaseId, ...]] = {}

    @property
    def under_way(self) -> bool:
        """True if samples of an epoch have been dealt and the epoch has not ended."""
        return bool(self._leases.under_way())

    @property
    def used(self) -> bool:
        """True if a worker that was there when the job began has taken samples: then the epochs say when the job is over."""
        return bool(self._users)

    @property
    def idle(self) -> Collection[WorkerId]:
        """Return the workers that wait for an epoch's end, or for samples to come back."""
        return self._idle.keys()

    def want(self, event: LeaseWanted | EpochWanted, now: Seconds) -> bool:
        """Answer a worker that asks for samples, or for the end of an epoch from which it takes no more samples.

        Returns:
            True if an epoch has ended with that.
        """
        worker, incarnation, pool, epoch = event.worker, event.incarnation, event.pool, event.epoch
        begun = self._leases.begun(pool)
        if isinstance(event, LeaseWanted) and event.deal.unit:
            self._shared[pool] = event.deal
        if not begun:
            self._open(pool, epoch, event.size, self._participants.inside(), event.rest if isinstance(event, LeaseWanted) else None)
        current = self._leases.epoch(pool)
        if epoch < current:
            just = epoch == current - 1
            self._effects.append(NoMore(worker, incarnation, pool, epoch, just, f"epoch {epoch} is over, epoch {current} is next"))
            if just:
                self.note(self._ledger.refresh(worker, now, f"epoch {epoch} is over"))
            return False
        if epoch == current:
            self._leases.bound(pool, event.size)
        if isinstance(event, EpochWanted) or epoch > current:
            kept = event.kept if isinstance(event, EpochWanted) else ()
            self._leases.give_back(worker, pool, but=kept)
            self._leases.keep(worker, kept)
        elif self._over_for(worker, pool):
            self._effects.append(self._no_more(event))
            return False
        elif self._may_begin(worker, pool) and self._grant(event):
            return not begun and self.deal(now)  # other workers may have waited for this epoch to begin
        elif self._leases.holds(worker, pool):
            reason = "no more of this epoch can be dealt out, and this worker already holds some of it"
            self._effects.append(NoMore(worker, incarnation, pool, epoch, False, reason))
            return False
        self._idle[worker] = event
        self._effects.append(Paused(worker, incarnation, pool, current, f"waits for the end of epoch {current}"))
        self.note(self._ledger.pause(worker, now))
        return self.deal(now)

    def resume(self, worker: WorkerId, now: Seconds) -> None:
        """Let a worker that was to wait for an epoch's end work again."""
        if self._idle.pop(worker, None) is not None:
            self.note(self._ledger.resume(worker, now))

    def prepare(self) -> None:
        """Decide the splits anew after workers have come or gone, in epochs of which no sample has been dealt yet."""
        for pool in self._leases.between():
            self._open(pool, self._leases.epoch(pool), self._leases.size(pool), self._participants.inside())

    def claim(self, push: Pushed, clock: Clock) -> str | None:
        """Bind leases to the contribution that has arrived: they share its fate. Returns the reason if its worker does not hold them.

        ``clock`` is the worker's after the push: with it the fate of the contribution will be told.
        """
        if not self._leases.valid(push.worker, push.leases):
            return "its samples have gone to another worker"
        self._leases.submit(push.leases)
        self._riding[push.worker, push.incarnation, clock] = push.leases
        return None

    def measure(self, push: Pushed) -> None:
        """Measure the speed of a worker by its push. Batch sizes that follow the speeds may change with that."""
        if self._auto.first is None:
            return
        (base, deal), window = self._auto.first, self._auto.window
        living = self._participants.inside()
        self._auto.note(push.worker, push.samples, push.compute_s)
        if self._auto.adjust(living):
            sizes = self._auto.sizes(living, base, deal)
            reason = f"by the seconds per sample of {window} steps of each worker; {sum(sizes.values())} samples in all"
            self._effects.append(Resized(sizes, reason))

    def abandon(self, event: Abandoned) -> None:
        """Return the leases of work that will not be pushed."""
        if self._leases.valid(event.worker, event.leases):
            self._leases.withdraw(event.leases)

    def leave_out(self, event: Skipped) -> None:
        """Count samples as left out by their worker's script."""
        self._leases.leave_out(event.worker, event.leases)

    def note(self, effects: list[Effect]) -> None:
        """Append the ledger's effects; the samples of a contribution share its fate."""
        self._effects += effects
        fates = self._ledger.fates(effects)
        if self._riding:
            for fate in fates:
                leases = self._riding.pop((fate.worker, fate.incarnation, fate.clock), ())
                self._leases.settle(leases, fate.fate, fate.reason)

    def withdraw(self, leases: tuple[LeaseId, ...]) -> None:
        """Return the leases of a contribution that is not used, so that another worker does the work."""
        self._leases.withdraw(leases)

    def gone(self, worker: WorkerId) -> None:
        """Return the leases of a worker that is dead or has finished."""
        self._idle.pop(worker, None)
        self._leases.close(worker)
        self._auto.forget(worker)

    def deal(self, now: Seconds) -> bool:
        """Deal samples that have come back to workers that wait for some, and end the epochs of which nothing is outstanding.

        Returns:
            True if an epoch has ended.
        """
        if not self._idle:
            return False
        for worker, event in list(self._idle.items()):
            if not isinstance(event, LeaseWanted) or event.epoch != self._leases.epoch(event.pool):
                continue
            if self._over_for(worker, event.pool):
                del self._idle[worker]
                self._effects.append(self._no_more(event))
                self.note(self._ledger.resume(worker, now))
            elif self._may_begin(worker, event.pool) and self._grant(event, True):
                del self._idle[worker]
                self.note(self._ledger.resume(worker, now))
                self.note(self._ledger.refresh(worker, now, "samples have come back"))
        ended = False
        for pool in sorted({event.pool for event in self._idle.values()}):
            if self._leases.accounted(pool) or (self._leases.quiet(pool) and self._all_wait_for(pool)):
                self._end(pool, now)
                ended = True
        return ended

    def close(self, workers: Sequence[WorkerId], now: Seconds) -> None:
        """Report the epochs under way at the end of the job, with their samples so far."""
        for worker in workers:
            self._leases.give_back(worker)
        for pool in [*self._leases.under_way(), *self._leases.owing()]:
            self._end(pool, now)

    def _grant(self, event: LeaseWanted, refreshed: bool = False) -> bool:
        batch = event.batch
        if event.deal.granularity:
            batch = self._auto.size(event.worker, batch, event.deal, self._participants.inside())
        lease = self._leases.take(event.worker, event.pool, batch)
        if lease is None:
            return False
        if self._start.first(event.worker):
            self._users.setdefault(event.pool, set()).add(event.worker)
        parts = self._leases.parts(event.worker, event.pool)
        self._effects.append(
            Grant(event.worker, event.incarnation, event.pool, lease.epoch, lease.id, lease.start, lease.stop, refreshed, parts)
        )
        return True

    def _may_begin(self, worker: WorkerId, pool: int) -> bool:
        """Return True if the worker may take the first samples of this epoch, or another worker has taken them."""
        return self._leases.begun(pool) or not self._follows(worker, pool) or not self._others_begin(pool)

    def _over_for(self, worker: WorkerId, pool: int) -> bool:
        """Return True if the worker has joined the running job, and the scripts that say how long a sampler is used have left it."""
        return self._follows(worker, pool) and self._start.closed() and not self._others_begin(pool)

    def _follows(self, worker: WorkerId, pool: int) -> bool:
        return pool in self._users and not self._start.first(worker)

    def _others_begin(self, pool: int) -> bool:
        """Return True if a worker takes part that has used this sampler since the job began."""
        return any(self._start.first(worker) and worker in self._users.get(pool, ()) for worker in self._participants.inside())

    def _no_more(self, event: LeaseWanted) -> NoMore:
        when = "in" if self._leases.begun(event.pool) else "before"
        over = self._start.completed()
        reason = f"the scripts of the job's first workers have {'ended' if over else 'closed the optimizer'} {when} epoch {event.epoch}"
        return NoMore(event.worker, event.incarnation, event.pool, event.epoch, False, reason, over=over)

    def places(self) -> dict[int, dict[str, Any]]:
        """Return each sampler's position for a checkpoint: see `Leases.place`."""
        return {pool: place for pool in self._leases.pools() if (place := self._leases.place(pool)) is not None}

    def progress(self) -> dict[int, dict[str, Any]]:
        """Return each sampler's position with its counts, for `begin_at`: see `Leases.progress`."""
        return {pool: place for pool in self._leases.pools() if (place := self._leases.progress(pool)) is not None}

    def most_of_a_pool(self, leases: Iterable[LeaseId]) -> int:
        """Return how many of these leases are of one sampler, of that with the most."""
        return self._leases.most_of_a_pool(leases)

    def begin_at(self, places: Mapping[int, Mapping[str, Any]]) -> None:
        """Begin at the positions of a checkpoint. No sample has been dealt yet."""
        for pool, place in places.items():
            self._leases.begin_at(pool, place)

    def _open(
        self, pool: int, epoch: Epoch, size: int | None, workers: list[WorkerId], rest: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Prepare an epoch of which no sample has been dealt yet."""
        splits = None if self._overlap is None or size is None else Splits(size, self._workers, self._overlap).among(workers)
        even = splits is None and size is not None and pool in self._shared and bool(workers)
        parts = shares(size, workers, self._shared[pool].unit, self._shared[pool].sizes) if even and size is not None else splits
        self._leases.open(pool, epoch, size, parts, rest, reopens=even)
        if pool == 0:
            self._ledger.begin_epoch(self._leases.epoch(pool), {worker: size_of(parts) for worker, parts in (splits or {}).items()})

    def _all_wait_for(self, pool: int) -> bool:
        waiting = {worker for worker, event in self._idle.items() if event.pool == pool}
        return waiting.issuperset(self._participants.inside())

    def _end(self, pool: int, now: Seconds) -> None:
        epoch = self._leases.epoch(pool)
        waiting = tuple(sorted(w for w, event in self._idle.items() if event.pool == pool))
        self._effects.append(EpochEnded(pool, epoch, self._leases.end(pool), waiting))
        self._open(pool, epoch + 1, self._leases.size(pool), self._participants.alive())
        for worker in waiting:
            del self._idle[worker]
            self.note(self._ledger.resume(worker, now))
        for worker in waiting:
            self.note(self._ledger.refresh(worker, now, f"epoch {epoch} is over"))
