"""The elastic batch sampler: chooses this worker's next samples, batch by batch while the epoch runs.

A standard ``DataLoader`` takes it as ``batch_sampler``. Workers lease positions of the epoch's order from the coordinator. Fast workers
therefore take more than slow ones, and the positions of a dead worker are dealt out again: each index of an epoch is used once, and the
epoch's report lists exceptions. If the rule gives each worker a split, the worker leases positions of its split, in an order of its own.

`Passes` is the base of all elastic sources of batches, also of streams (``loaders.py``): epochs, grants, and passes without a step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sized
from functools import partial, reduce
from itertools import chain, repeat, takewhile
from typing import Any, NamedTuple

import torch
from torch.utils.data import Sampler

from offbeat import session as sessions
from offbeat.core.batch_sizes import VARIABLE, Auto, BatchOrder, Deal, size_and_auto
from offbeat.core.partitions import Parts, Splits, shares, size_of
from offbeat.deliveries import asked_by_next, asked_to_show, fetch_when_asked, follow_loader, raised_later
from offbeat.errors import ConfigurationError, JobEnded, warn
from offbeat.gradient_watch import life_of
from offbeat.orders import Drawn, DrawnOrder, Order, checksum_of, checksum_of_part
from offbeat.session import LeasedRange, Place, Session, SplitProgress, rank, world_size
from offbeat.types import Epoch, worker_ids

_asked: list[int] = []
"""The batch size that the script asks for in its first sampler: the command line's size is in place of this one."""


def ordered_sizes(asked: int, auto: Auto | None) -> tuple[tuple[int, ...], Auto | None]:
    """Return the batch sizes of all workers where the script asks for ``asked``, for each process, and whether they follow the speeds.

    The command line (``--batch``) overrides the script.
    """
    workers = max(1, world_size())
    text = os.environ.get(VARIABLE)
    if not text:
        return (asked,) * workers, auto
    if not _asked:
        _asked.append(asked)
    order = BatchOrder.of(text)
    return order.sizes(asked, _asked[0], workers), order.auto


class _Ahead(NamedTuple):
    """Of an epoch after that of the pass: see `Passes._after`."""

    epoch: Epoch
    dealt: list[LeasedRange]
    progress: SplitProgress


class Passes:
    """Passes over the data, one per epoch, in which the job grants positions to this worker.

    Args:
        session: this worker's part in the job; None: that of the `DistributedOptimizer` made last, or of the first that will be made.
        batch_size: positions in a grant, for each process of a worker, unless the command line says another size (``--batch``).
        auto: the script has sizes follow the measured speeds, and ``batch_size`` is their base; None: it does not.
        unit: see `core.batch_sizes.Deal`.
        sized: whether positions are samples; else they are ready batches, which keep their size.
    """

    _size: int | None
    """The number of positions in an epoch; None for a stream, whose length is known only at its end."""
    _seed: int | None = None
    """The seed of the orders; None: the job's, another one for each sampler."""

    def __init__(self, session: Session | None, batch_size: int, *, auto: Auto | None = None, unit: int = 0, sized: bool = True) -> None:
        self._place = Place.of_process()
        sizes, self._auto = ordered_sizes(batch_size, auto) if sized else ((batch_size,) * max(1, world_size()), None)
        self._batch_size = sizes[rank()] * self._place.size
        """Of the worker, which may consist of several processes."""
        self._mean_batch = sum(sizes) * self._place.size / len(sizes)
        """Of the workers with which the job was started."""
        unequal = tuple([size * self._place.size for size in sizes]) if len(set(sizes)) > 1 else ()
        most = 0 if self._auto is None else (self._auto.most or 0) * self._place.size
        self._deal = Deal(unit, unequal if unit else (), 0 if self._auto is None else self._place.size, most)
        self._differ = len(sizes) > 1 and (bool(unequal) or self._auto is not None)
        """Whether the batches of workers have different sizes, or may come to."""
        self._joined: tuple[Session, int] | None = None
        """The session, and the number of this source's pool in it."""
        self._epoch = 0
        self._chosen = False
        """Whether `set_epoch` has set the epoch of the next pass."""
        self._begun: Epoch | None = None
        """The epoch of the last pass."""
        self._again = False
        """Whether `set_epoch` has named the epoch of the pass before, which had batches, or an earlier one."""
        self._dealt: list[LeasedRange] = []
        """The grants of the last pass, in their order."""
        self._ahead = _Ahead(-1, [], SplitProgress())
        """What has been taken of a later epoch in a pass over one that had nothing left, the last time."""
        self._moved = False
        """Whether that was in the last pass."""
        self._promised = 0
        """The number of batches that `len` has told the script last."""
        self._progress = SplitProgress()
        self.reports_deliveries = False
        """Whether the user of this source calls `Session.deliver`, and not this source itself, when the script gets a batch."""
        self._warned = False
        self._told_of_passes = False
        """Whether the script knows that a pass ends where it begins another one."""
        if session is not None:
            self._join(session)
        else:
            sessions.when_made(self._join)

    def _join(self, session: Session) -> None:
        if self._differ and session.plans_batches is not None:
            raise ConfigurationError(
                f"{session.plans_batches} sets the batch sizes by itself, from its budget: leave --batch or batch_size='auto' out, or the "
                "rule's budget="
            )
        if self._auto is not None and self._deal.unit:
            raise ConfigurationError(
                "deal='even' promises the number of batches of an epoch, and batches whose sizes follow the speeds (auto) change while the "
                "epoch runs: give the workers fixed sizes (--batch 0=64,1=32), or leave deal='even' out"
            )
        self._joined = session, session.new_pool()
        if self._deal != Deal():
            session.deals[self.pool] = self._deal

    @property
    def _membership(self) -> tuple[Session, int]:
        if self._joined is None:
            raise ConfigurationError(
                "the job deals out elastic data, and this process is not in a job yet: make the offbeat.DistributedOptimizer first; "
                "if the model's size depends on the data, look at the data set itself (dataset[0])"
            )
        return self._joined

    @property
    def session(self) -> Session:
        """This worker's part in the job that deals out the samples."""
        return self._membership[0]

    @property
    def pool(self) -> int:
        """This sampler's number: scripts make their samplers in the same order on every worker."""
        return self._membership[1]

    @property
    def _seed_of_orders(self) -> int:
        # A script that makes its loader anew in each epoch, or for each fold, wants another order each time.
        return self.session.seed + self.pool * 104_729 if self._seed is None else self._seed

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, for resuming. Without this call each pass is the next epoch."""
        self._epoch, self._chosen = epoch, True

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and, if it has begun and not ended, the positions left of it.

        Positions that a worker was dealt but has not used in a step are left; in a job, also those whose step has no fate yet.
        """
        return self.state_at(self.session.place(self.pool))

    def state_at(self, place: dict[str, Any] | None) -> dict[str, Any]:
        """Return the `state_dict` for this place of the job's data; see `core.leases.Leases.place`."""
        epoch = place["epoch"] if place is not None and place["epoch"] == self._last[0] and not self._chosen else self.next_epoch
        state = {"epoch": epoch, "size": self._size, "seed": self._seed_of_orders, "rest": None}
        if place is not None and place["epoch"] == epoch and place["rest"] != [[0, self._size]]:
            state["rest"] = place["rest"]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`: the next pass is over the positions left of its epoch.

        On a worker that joins a running job, the job decides which positions are left.

        Raises:
            ConfigurationError: the state belongs to a data set of another size.
        """
        if None not in (self._size, state.get("size")) and state["size"] != self._size:
            raise ConfigurationError(
                f"the sampler's saved state is of a data set of {state['size']} samples, this one has {self._size}: use the same data"
            )
        self.set_epoch(state["epoch"])
        self._seed = state.get("seed", self._seed)
        if state.get("rest") is not None:
            self.session.go_on_from(self.pool, state["epoch"], state["rest"])

    def _pass(self) -> tuple[Epoch, Iterator[LeasedRange]]:
        """Begin the next pass; return its epoch, and an iterator over its grants."""
        session, epoch = self.session, self.next_epoch
        session.check_end()
        kept = list(self._dealt) if self._peeked and epoch == self._begun else []
        if epoch == self._ahead.epoch and not kept:
            kept, self._progress = self._still_held(self._ahead.dealt), self._ahead.progress
        if kept:
            session.take_back(self.pool)
        else:
            self._progress = SplitProgress()
        self._again = self._chosen and bool(self._dealt) and self._begun is not None and epoch <= self._begun
        self._begun, self._dealt, self._moved = epoch, kept, False
        self._epoch, self._chosen = epoch + 1, False
        return epoch, chain(takewhile(lambda _: epoch == self._begun, list(kept)), self._grants(session, epoch))

    def is_over(self) -> bool:
        """Return True if the next pass would find no samples for this worker: it is passed over then.

        The samples that are taken to know this are the first ones of the next pass, as after any look at the data.
        """
        _, grants = self._pass()
        return next(grants, None) is None

    @property
    def dealt(self) -> list[LeasedRange]:
        """The grants of the last pass, in their order; the list grows while the pass goes on."""
        return self._last[1]

    @property
    def _last(self) -> tuple[Epoch | None, list[LeasedRange]]:
        """The epoch of the last pass's grants, and these."""
        return (self._ahead.epoch, self._ahead.dealt) if self._moved else (self._begun, self._dealt)

    def _grants(self, session: Session, epoch: Epoch) -> Iterator[LeasedRange]:
        """Take new grants of an epoch until it has no more for this worker."""
        dealt, progress = self._dealt, self._progress  # of this pass, whatever the next one has
        if epoch < self._ahead.epoch:  # it is over, and to ask for it would give up what this worker has of the later one
            return
        while epoch == self._begun:
            grant = self._take(session, epoch, dealt, progress)
            if grant is None:
                if not dealt and session.over is not None:
                    session.ended = True
                elif not dealt and self._again:
                    warn(
                        f"set_epoch({epoch}) names an epoch that is over: an epoch is dealt out once, and this pass has no batches. Give "
                        "later epochs later numbers, or make a loader for each training"
                    )
                self._look_for_evaluation(dealt)
                return
            yield grant
        if not self._told_of_passes:
            self._told_of_passes = True
            warn(
                "a pass over an elastic loader ends here, since the script has begun another one over the same loader before its end (to "
                "evaluate, or to look at a batch): the rest of its epoch is left to other workers, or unused. Evaluate over a plain "
                "DataLoader, and give each loop a loader of its own"
            )

    def _take(self, session: Session, epoch: Epoch, dealt: list[LeasedRange], progress: SplitProgress) -> LeasedRange | None:
        grant = session.take(self.pool, epoch, self._size, self._batch_size)
        if grant is not None:
            self._check(grant)
            dealt.append(grant)
            if self.pool == 0:
                session.progress = progress
                progress.deal(grant.parts, grant.stop - grant.start, session.batch or self._batch_size)
        return grant

    def _after(self, epoch: Epoch, given: int = 0) -> Iterator[tuple[Epoch, LeasedRange]]:
        """Take grants of the job's present epoch in a pass over one that had none for this worker, until the script makes a step.

        A script that calls ``next`` on a new pass counts on a batch. It looks at the data before it trains, in a worker that has been
        restarted, or it begins a pass whenever the one before has ended. The pass keeps the number of its own epoch: loops over epochs
        come to the present one as they would without the look, and begin there with these batches.

        A script that calls ``next`` as often as `len` says counts on so many batches, also where its worker has been restarted in the
        middle of an epoch. It gets them, from as many of the job's epochs as it takes.

        Args:
            epoch: the epoch of the pass.
            given: the number of batches that the pass has given from it.

        Raises:
            JobEnded: the job has ended, so that no epoch comes any more.
        """
        if given >= max(1, self._promised):
            return
        session, steps = self.session, None if given else self.session.steps
        dealt = self._still_held(self._ahead.dealt)
        at, progress = max(epoch + 1, self._ahead.epoch), self._ahead.progress if dealt else SplitProgress()
        self._ahead, self._dealt, self._moved = _Ahead(at, dealt, progress), [], True
        if dealt:
            session.take_back(self.pool)
        again = list(dealt)
        while session.steps == steps or given < self._promised:
            grant = again.pop(0) if again else self._take(session, at, dealt, progress)
            if grant is not None:
                given += 1
                yield at, grant
            elif given >= max(1, self._promised):
                return
            else:
                session.ended = session.over is not None
                session.check_end()
                at, dealt, progress = at + 1, [], SplitProgress()
                self._ahead = _Ahead(at, dealt, progress)

    def _still_held(self, grants: list[LeasedRange]) -> list[LeasedRange]:
        held = self.session.held(self.pool)
        return [grant for grant in grants if grant in held]

    def _delivered(self, dealt: list[LeasedRange], number: int, batch: Any = None) -> None:
        """Note that the script has received a batch of a pass; ``dealt`` are the pass's grants."""
        self.session.deliver(dealt[number], life_of(batch))
        if number:  # one batch may be a look at the data
            self._look_for_evaluation(dealt[: number + 1])

    def _look_for_evaluation(self, received: list[LeasedRange]) -> None:
        """Warn once if the script has received these batches without gradients, and so may take a share of the data for all of it."""
        if self._warned or not received or torch.is_grad_enabled() or self.session.held(self.pool)[: len(received)] != received:
            return
        self._warned = True
        warn(
            "an elastic loader is iterated without gradients: its batches are this worker's share of the data, so that an accuracy over "
            "them is not that of the data set, and they belong to this worker's next steps and count as their samples. To evaluate, use a "
            "plain DataLoader, on the main process or over a slice by offbeat.rank()"
        )

    def _check(self, grant: LeasedRange) -> None:
        """Raise `ConfigurationError` if a grant cannot be of this worker's data."""

    @property
    def _peeked(self) -> bool:
        """Whether the last pass took batches and no step has used any of them."""
        taken = self._last[1]
        return bool(taken) and self.session.held(self.pool) == taken

    @property
    def next_epoch(self) -> Epoch:
        """The epoch of the next pass."""
        return self._begun if self._begun is not None and not self._chosen and self._peeked else self._epoch


class ElasticBatchSampler(Passes, Sampler[list[int]]):
    """Batches of indices for a ``DataLoader``; made by `DistributedOptimizer.batch_sampler` and `offbeat.elastic`.

    The epoch ends for all workers together: a worker without samples waits until every index is settled (taking over the samples of
    workers that die meanwhile), and then has the newest parameters. With ``num_workers > 0`` a loader fetches batches before their use;
    the wait is then at the start of the next epoch.

    A look at the data does not use it up: after a pass without a step, such as ``next(iter(loader))``, the next pass is of the same epoch
    and begins with the batches that this worker has already been dealt.

    If the rule sets another batch size (``Plan.batch``), batches have that size from the next one on. So they do where sizes follow the
    measured speeds: then the job decides about each batch.

    Args:
        session: this worker's part in the job; None: see `Passes`.
        order: the order of the indices in an epoch. Workers' splits are cut from one order for all epochs, drawn from the seed.
        batch_size, auto: see `Passes`; the last batch of an epoch may be smaller.
        seed: the seed of the orders; None: the job's, another one for each sampler.
        unit: more than 0: each worker has a share of the epoch, in units of so many samples, and `len` holds; 0: workers take as many
            batches as they can.
        part: see `orders.checksum_of_part`.
        sized: see `Passes`.
    """

    _size: int

    def __init__(
        self,
        session: Session | None,
        order: Order,
        batch_size: int,
        *,
        seed: int | None,
        unit: int = 0,
        auto: Auto | None = None,
        part: int | None = None,
        sized: bool = True,
    ) -> None:
        self._part = part
        self._order, self._size, self._seed, self._unit = order, order.size, seed, unit
        self._told: int | None = None
        """The number of batches that `len` has told the script for the present pass."""
        self._warned_of_count = False
        self._parts: Parts | None = None
        """This worker's split in its last epoch; empty: the rule gives no splits. None before the first batch."""
        super().__init__(session, batch_size, auto=auto, unit=unit, sized=sized)

    def _join(self, session: Session) -> None:
        if self._size < session.workers:
            raise ConfigurationError(
                f"the data set has {self._size} samples for {session.workers} workers: each needs at least one; use fewer workers"
            )
        super()._join(session)
        if self._order.own:
            self._part = checksum_of(self._order.draw(self._generator(0), 0))
        if self._part is not None:
            session.chosen.append(self._part)

    @property
    def _batch(self) -> int:
        return self.session.batch or self._batch_size

    def __iter__(self) -> Iterator[list[int]]:
        self._order.check_length()
        try:
            epoch, grants = self._pass()
        except JobEnded as end:
            if raised_later(end):
                return
            raise
        deliver = None
        given: list[LeasedRange] = []
        for number, indices in enumerate(self._batches(epoch, grants, given)):
            if not number and not self.reports_deliveries:
                deliver = follow_loader(partial(self._delivered, given))
            if deliver is not None:
                deliver(number)
            if number == self._told:  # what the script does with one more may fail, so it hears of that before
                self._say_count("is dealt more")
            yield indices
        if self._dealt and self._told not in (None, len(self._dealt)):  # none: the epoch was over
            self._say_count(f"was dealt {len(self._dealt)}")
        self._told = None

    def _batches(self, epoch: Epoch, grants: Iterator[LeasedRange], given: list[LeasedRange]) -> Iterator[list[int]]:
        """Give each batch of a pass; ``given`` gets their grants."""
        yield from self._indices_of(zip(repeat(epoch), grants), given)
        if not given or self.session.restarted:
            later = self._indices_of(self._after(epoch, len(given)), given)
            if not fetch_when_asked(later, lambda batch: self._delivered(given, len(given) - 1, batch)) and asked_by_next():
                yield from later

    def _indices_of(self, grants: Iterator[tuple[Epoch, LeasedRange]], given: list[LeasedRange]) -> Iterator[list[int]]:
        indices, first = None, 0
        for epoch, grant in grants:
            if indices is None or grant.parts != self._parts:
                even = bool(self._unit and grant.parts and self.session.overlap is None)
                first = grant.parts[0][0] if even else 0  # a share is a range of the epoch's order
                indices = self._indices(epoch, () if even else grant.parts)
                self._parts = grant.parts
            given.append(grant)
            yield self._place.part(indices[first + grant.start : first + grant.stop].tolist())

    def _say_count(self, dealt: str) -> None:
        """Warn once that a script that counts on `len` counts on another number of batches than this worker was dealt."""
        if not self._warned_of_count:
            self._warned_of_count = True
            warn(
                f"len() of this loader was {self._told}, and this worker {dealt} batches: workers take as many batches of "
                "an epoch as they can. A script that counts on len (to step with a last group of batches, to set a schedule) needs "
                "deal='even', which gives each worker an equal share, or a step after the loop"
            )

    def __len__(self) -> int:
        """Return the number of batches in this worker's split, or in an equal share of the data, of which slow workers take less."""
        parts, session = self._parts, self.session
        if parts is None and session.overlap is not None:
            parts = Splits(self._size, session.workers, session.overlap).among(worker_ids(session.workers))[session.worker]
        elif parts is None and self._unit:
            parts = shares(self._size, worker_ids(session.workers), self._unit, self._deal.sizes)[session.worker]
        if parts:
            self._promised = _ceil(size_of(parts), self._batch)
            return self._promised
        self._promised = _ceil(self._size, self._batch * session.workers if session.batch else self._all_batches)
        if not asked_to_show():
            self._told = self._promised
        return self._promised

    @property
    def _all_batches(self) -> int:
        """One batch of each worker with which the job was started."""
        return round(self._mean_batch * self.session.workers)

    @property
    def batches_max(self) -> int:
        """The number of batches of an epoch, all workers' together; where their sizes differ, of batches of the mean size."""
        return self._batches_in(self._size)

    def _batches_in(self, samples: int) -> int:
        return _ceil(samples * self.session.workers, self._all_batches)

    def position_of(self, number: int) -> int:
        """Return how many batches of all epochs the job had dealt out with batch ``number`` of the last pass, from 0.

        Where workers have splits of their own, a fraction of the split counts as that fraction of the epoch.

        >>> from offbeat.session import LocalSession
        >>> model = torch.nn.Linear(1, 1)
        >>> session = LocalSession(torch.optim.SGD(model.parameters()))
        >>> sampler = elastic_batch_sampler(session, range(5), 2, shuffle=False, seed=None)
        >>> [sampler.position_of(number) for number, _ in enumerate(sampler)]
        [1, 2, 3]
        """
        epoch, dealt = self._last
        assert epoch is not None
        grant = dealt[number]
        size = size_of(grant.parts) if grant.parts else self._size
        used, split = self._batches_in(grant.stop), self._batches_in(size)
        return epoch * self.batches_max + _ceil(used * self.batches_max, split)

    def _check(self, grant: LeasedRange) -> None:
        reach = max((stop for _, stop in grant.parts), default=grant.stop)
        if reach > self._size:
            raise ConfigurationError(
                f"this worker's data set has {self._size} samples, but that of the other workers at least {reach}: "
                "every worker needs the same data set"
            )

    def _indices(self, epoch: Epoch, parts: Parts) -> torch.Tensor | DrawnOrder:
        """Return the indices at all positions of an epoch: of the whole data set, or of a split."""
        if not parts and self._order.block:
            return DrawnOrder(self._order, self._generator, epoch)
        if not parts:
            return self._order.indices(self._generator(epoch), epoch)
        if not self._order.splits:
            raise ConfigurationError(
                "this rule gives each worker a split of the data set, which needs every index once in the order: remove order=, drop_last= "
                "or the sampler, or use a rule without splits"
            )
        fixed = self._order.indices(self._generator(-1), -1)  # -1 is no epoch's number: the order is the same in all epochs
        split = torch.cat([fixed[start:stop] for start, stop in parts])
        if not self._order.shuffles:
            return split
        return split[torch.randperm(len(split), generator=self._generator(epoch, 1 + self.session.worker), device="cpu")]

    def _generator(self, *numbers: int) -> torch.Generator:
        mixed = reduce(lambda value, number: value * 1_000_003 + number, (self._seed_of_orders, *numbers))
        return torch.Generator().manual_seed(mixed % 2**63)


class WholeBatches(ElasticBatchSampler):
    """Deal out the batches of a batch sampler of any class as they are: of sequences of about one length, for example.

    A position is a batch, so that reports count batches; their samples are counted for the weights. Epochs may differ in their number.

    Args:
        session, seed, unit: see `ElasticBatchSampler`.
        batch_sampler: makes the batches, see `orders.Drawn`.

    >>> from offbeat.session import LocalSession
    >>> session = LocalSession(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()))
    >>> list(WholeBatches(session, [[0, 1, 2], [3]], seed=None))
    [[0, 1, 2], [3]]
    """

    def __init__(self, session: Session | None, batch_sampler: Any, *, seed: int | None, unit: int = 0) -> None:
        self._drawn = Drawn(batch_sampler)
        order = Order(len(self._drawn), self._drawn.of, shuffles=True, own=True)
        super().__init__(session, order, 1, seed=seed, unit=unit, sized=False)

    def _join(self, session: Session) -> None:
        if self._place.size > 1 or session.overlap is not None:
            raise ConfigurationError(
                "the batches of a batch sampler of another class than PyTorch's are dealt out whole: neither do the processes of a worker "
                "share them, nor does a rule divide them into splits; use a loader with batch_size=, another rule, or one process a worker"
            )
        super()._join(session)

    def _take(self, session: Session, epoch: Epoch, dealt: list[LeasedRange], progress: SplitProgress) -> LeasedRange | None:
        if session.batch:
            raise ConfigurationError("this rule sets the batch size, and these batches are dealt out whole: use a loader with batch_size=")
        self._size = len(self._all_of(epoch))
        grant = super()._take(session, epoch, dealt, progress)
        if grant is not None:
            counted = grant._replace(rows=len(self._batch_at(epoch, grant)))
            session.amend(grant, counted)
            dealt[-1] = grant = counted
        return grant

    def _indices_of(self, grants: Iterator[tuple[Epoch, LeasedRange]], given: list[LeasedRange]) -> Iterator[list[int]]:
        for epoch, grant in grants:
            given.append(grant)
            yield self._batch_at(epoch, grant)

    def _batch_at(self, epoch: Epoch, grant: LeasedRange) -> list[int]:
        first = grant.parts[0][0] if grant.parts else 0
        return list(chain.from_iterable(self._all_of(epoch)[first + grant.start : first + grant.stop]))

    def _all_of(self, epoch: Epoch) -> list[list[int]]:
        return self._drawn.of(self._generator(epoch), epoch)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def unit_of(deal: str, batch: int, *, whole: bool) -> int:
    """Return the unit of the shares of this way to deal samples out; 0: there are no shares.

    Raises:
        ConfigurationError: there is no such way.
    """
    if deal not in ("pool", "even"):
        raise ConfigurationError(f"deal={deal!r}: must be 'pool' (workers take as many batches as they can) or 'even' (equal shares)")
    return 0 if deal == "pool" else batch if whole else 1


def sampler_of(
    order: Order,
    batch_size: int,
    drop_last: bool,
    seed: int | None,
    session: Session | None,
    deal: str,
    auto: Auto | None,
    part: int | None,
) -> ElasticBatchSampler:
    """Make the sampler of an order; with ``drop_last`` without the positions at its end that do not fill a batch."""
    batch = batch_size * Place.of_process().size
    unit = unit_of(deal, batch, whole=drop_last)
    if drop_last:  # of each worker's share, where there are shares
        sizes, follows = ordered_sizes(batch_size, auto)
        together = unit or follows is not None or len(set(sizes)) > 1
        order = order.whole_batches(sum(sizes) * Place.of_process().size if together else sizes[0] * Place.of_process().size)
    return ElasticBatchSampler(session, order, batch_size, seed=seed, unit=unit, auto=auto, part=part)


def elastic_batch_sampler(
    session: Session,
    dataset: Sized,
    batch_size: int | str,
    *,
    shuffle: bool,
    seed: int | None,
    deal: str = "pool",
    drop_last: bool = False,
) -> ElasticBatchSampler:
    """Check the user's arguments and make the sampler.

    Raises:
        ConfigurationError: the batch size is below 1, or the data set has no length or fewer samples than the job has workers.
    """
    batch_size, auto = size_and_auto("batch_sampler", batch_size)
    try:
        size = len(dataset)
    except TypeError:
        raise ConfigurationError(
            f"batch_sampler needs a data set with a length, not a {type(dataset).__name__}: "
            "use offbeat.elastic(dataset, batch_size=...) for an iterable data set"
        ) from None
    order, part = Order.plain(size, shuffle=shuffle).of(dataset), checksum_of_part(dataset)
    return sampler_of(order, batch_size, drop_last, seed, session, deal, auto, part)
