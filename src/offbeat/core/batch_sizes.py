"""Give the workers of a job batches of different sizes: as the command line says, or as the measured speeds say.

`BatchOrder` is what ``--batch`` says, `Auto` what ``batch_size="auto:64"`` says, and `Deal` what a worker tells the job of one sampler.
`AutoSizes` is the coordinator's part: it measures seconds per sample and sets the size of each lease. The global batch is kept, the base
size times the number of living workers: what a slow worker has less, others have more.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from math import ceil
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigurationError
from offbeat.types import Seconds, WorkerId, worker_ids

VARIABLE: Final = "OFFBEAT_BATCH"
"""The variable with which the launcher tells the workers what ``--batch`` says."""
SIZE_MAX: Final = 1 << 31
WINDOW: Final = 8
"""Measured steps of each worker before the first change. The median of eight is not moved by a first step that compiles, or by a pause."""
LONG_WINDOW: Final = 64
"""The most steps between two changes: the window doubles as long as changes are small."""
LARGE: Final = 0.25
"""A change of a size by this fraction is large: the next window is short again."""
DAMPING: Final = 0.75
"""How far, on a scale of logarithms, a size goes towards the one that the measured speeds ask for. With 1 it would be there at once where a
step's time is in proportion to its samples; but sizes would swing for ever where it grows with their square."""
DEAD_BAND: Final = 0.05
"""Keep all sizes if none is further from what the speeds ask for than this fraction: two standard deviations of the ratio of two medians of
64 times that have a standard deviation of ten per cent."""
LEAST_SHARE: Final = 8
"""No worker gets less than the base size divided by this, so that one whose time does not depend on its batch still takes part."""
TINY: Final = 1e-200
"""In place of 0 in a denominator."""

_AUTO: Final = re.compile(r"auto(?::(\d+)(?::(\d+))?)?")
_FORM: Final = "64 for all workers, 0=64,1=32 for some, or auto, auto:64 or auto:64:96 (base size, greatest size)"


class Auto(NamedTuple):
    """Batches whose sizes follow the measured speeds."""

    base: int | None = None
    """The size while all workers are equal; None: the script's."""
    most: int | None = None
    """The greatest size of a worker's batch; None: no limit."""


class BatchOrder(NamedTuple):
    """What ``--batch`` says of the script's first sampler. Other samplers change in the same proportion.

    >>> order = BatchOrder.of("48,0=64", workers=3)
    >>> [order.size(worker, 32) for worker in range(3)], order.auto
    ([64, 48, 48], None)
    >>> BatchOrder.of("auto:64:96").auto
    Auto(base=64, most=96)
    """

    every: int | None = None
    """The size for all workers that are not named; None: the script's."""
    named: tuple[tuple[int, int], ...] = ()
    """Workers and their sizes."""
    auto: Auto | None = None

    @classmethod
    def of(cls, text: str, workers: int | None = None) -> BatchOrder:
        """Parse the value of ``--batch``.

        Raises:
            ConfigurationError: it has another form, names a worker twice or one that the job does not have, or a size below 1.
        """
        if text.startswith("auto"):
            return cls(auto=_auto(text, f"--batch {text}"))
        every, named = None, {}
        for item in text.split(","):
            who, _, size = item.strip().rpartition("=")
            if not size.isascii() or not size.isdigit() or (who and not (who.isascii() and who.isdigit())) or item.strip().startswith("="):
                raise ConfigurationError(f"--batch {text}: '{item}' is no batch size: write {_FORM}")
            _check(f"--batch {text}", int(size))
            if not who:
                if every is not None:
                    raise ConfigurationError(f"--batch {text}: sets the size of all workers twice, to {every} and {size}: leave one out")
                every = int(size)
                continue
            if int(who) in named:
                raise ConfigurationError(f"--batch {text}: sets the size of worker {int(who)} twice: leave one out")
            if workers is not None and int(who) >= workers:
                raise ConfigurationError(
                    f"--batch {text}: there is no worker {int(who)}, {workers} workers are numbered 0 to {workers - 1}"
                )
            named[int(who)] = int(size)
        return cls(every, tuple(named.items()))

    def size(self, worker: WorkerId, asked: int) -> int:
        """Return the size of this worker's batches where the script asks for ``asked``."""
        base = None if self.auto is None else self.auto.base
        return dict(self.named).get(worker, self.every or base or asked)

    def sizes(self, asked: int, first: int, workers: int) -> tuple[int, ...]:
        """Return the sizes of all workers' batches, for a sampler of which the script asks for ``asked``, and of the first for ``first``.

        >>> BatchOrder.of("0=64").sizes(asked=224, first=32, workers=2)
        (448, 224)
        """
        return tuple([max(1, round(self.size(worker, first) * asked / first)) for worker in worker_ids(workers)])


def size_and_auto(owner: str, batch_size: object) -> tuple[int, Auto | None]:
    """Return the size, and whether it follows the speeds, that a script's ``batch_size`` says: a number, ``"auto:64"`` or ``"auto:64:96"``.

    >>> size_and_auto("batch_sampler", "auto:64")
    (64, Auto(base=64, most=None))

    Raises:
        ConfigurationError: it says neither.
    """
    if isinstance(batch_size, str):
        auto = _auto(batch_size, f"{owner}(batch_size={batch_size!r})")
        if auto.base is None:
            raise ConfigurationError(
                f"{owner}(batch_size={batch_size!r}): name the size of a worker's batch while all are equally fast, such as 'auto:64'"
            )
        return auto.base, auto
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigurationError(f"{owner}(batch_size={batch_size!r}): batch_size must be a whole number, at least 1, or 'auto:64'")
    return batch_size, None


def _check(where: str, size: int) -> None:
    if not 1 <= size <= SIZE_MAX:
        bound = f"at least 1 sample, not {size}" if size < 1 else f"at most {SIZE_MAX:,} samples, not {size:,}"
        raise ConfigurationError(f"{where}: a batch has {bound}")


def _auto(text: str, where: str) -> Auto:
    match = _AUTO.fullmatch(text)
    if match is None:
        raise ConfigurationError(f"{where}: write {_FORM}")
    base, most = (None if number is None else int(number) for number in match.groups())
    if base is not None:
        _check(where, base)
    if base is not None and most is not None and most < base:
        raise ConfigurationError(f"{where}: the greatest size, {most}, is less than the base size, {base}; raise it, or leave it out")
    return Auto(base, most)


class Deal(NamedTuple):
    """How the job deals out the samples of one sampler, as each worker says with its requests."""

    unit: int = 0
    """More than 0: each worker has a share of the epoch, in units of so many positions; 0: all are dealt out from one pool."""
    sizes: tuple[int, ...] = ()
    """The batch of each worker, to which shares are in proportion; empty: shares are equal."""
    granularity: int = 0
    """More than 0: the size asked for is the base of sizes that follow the speeds, and that are multiples of this."""
    most: int = 0
    """The greatest of these sizes; 0: no limit."""


class AutoSizes:
    """The sizes that follow the speeds of a job's workers.

    A worker's share is the fraction of the base size that it gets. Shares of the living workers have the mean 1. A worker that comes, for
    the first time or again, begins with 1.

    >>> sizes = AutoSizes()
    >>> deal = Deal(granularity=1)
    >>> [sizes.size(worker, 60, deal, living=[0, 1]) for worker in range(2)]
    [60, 60]
    >>> while not sizes.adjust([0, 1]):  # worker 1 takes three times as long for a sample
    ...     sizes.note(0, samples=60, compute_s=0.1), sizes.note(1, samples=60, compute_s=0.3)
    (None, None)
    ...
    """

    def __init__(self) -> None:
        self.shares: dict[WorkerId, float] = {}
        self.first: tuple[int, Deal] | None = None
        """The base size and the deal of the first sampler whose sizes follow the speeds; None: there is none."""
        self._most: float = 0.0
        self.window = WINDOW
        self._sizes: dict[tuple[int, Deal], dict[WorkerId, int]] = {}
        """By base size and deal: what follows from the present shares."""
        self._seconds: dict[WorkerId, deque[Seconds]] = {}
        """The seconds per sample of each worker's last steps, since the last change."""

    def size(self, worker: WorkerId, base: int, deal: Deal, living: Collection[WorkerId]) -> int:
        """Return the size of a lease for a worker that asks for ``base`` samples; ``living``: the workers among which samples are dealt."""
        if not deal.granularity:
            return base
        if self.first is None:
            self.first, self._most = (base, deal), deal.most / base if deal.most else 0.0
        return self.sizes({*living, worker}, base, deal)[worker]

    def sizes(self, living: Collection[WorkerId], base: int, deal: Deal) -> dict[WorkerId, int]:
        """Return the sizes of the living workers' batches, which add up to the base size times their number."""
        self._settle(living)
        if (base, deal) in self._sizes:
            return self._sizes[base, deal]
        workers = sorted(living)
        shares = [self.shares[worker] for worker in workers]
        most = max(base, deal.most - deal.most % deal.granularity) if deal.most else None
        least = -(-base // LEAST_SHARE)
        found = whole(shares, base * len(workers), rising=True, granularity=deal.granularity, least=least, most=most)
        sizes = self._sizes[base, deal] = dict(zip(workers, found, strict=True))
        return sizes

    def note(self, worker: WorkerId, samples: int, compute_s: Seconds) -> None:
        """Measure a step: its samples, and the seconds that the worker has computed, without waiting."""
        if self.first is not None and samples > 0 and compute_s > 0.0:
            self._seconds.setdefault(worker, deque(maxlen=LONG_WINDOW)).append(compute_s / samples)

    def forget(self, worker: WorkerId) -> None:
        """Forget a worker that is gone: its next process may be on another machine."""
        self._seconds.pop(worker, None)
        self._settle([other for other in self.shares if other != worker])

    def adjust(self, living: Collection[WorkerId]) -> bool:
        """Change the shares if each living worker has been measured since they were changed last. Returns True if they have changed."""
        if self.first is None or len(living) < 2 or any(len(self._seconds.get(worker, ())) < self.window for worker in living):
            return False
        self._settle(living)
        speeds = {worker: 1.0 / median(self._seconds[worker]) for worker in living}
        for seconds in self._seconds.values():
            seconds.clear()
        limits = 1.0 / LEAST_SHARE, self._most
        if _distance(self.shares, adjusted(self.shares, speeds, *limits, damping=1.0)) < DEAD_BAND:
            self.window = min(2 * self.window, LONG_WINDOW)
            return False
        before, self.shares = self.shares, adjusted(self.shares, speeds, *limits)
        self.window = WINDOW if _distance(before, self.shares) > LARGE else min(2 * self.window, LONG_WINDOW)
        self._sizes.clear()
        return True

    def _settle(self, living: Collection[WorkerId]) -> None:
        """Give the living workers shares whose mean is 1."""
        if self.shares.keys() == set(living):
            return
        self._sizes.clear()
        known = {worker: share for worker, share in self.shares.items() if worker in living}
        mean = sum(known.values()) / len(known) if known else 1.0
        self.shares = {worker: known[worker] / mean if worker in known else 1.0 for worker in sorted(living)}


def _distance(before: Mapping[WorkerId, float], after: Mapping[WorkerId, float]) -> float:
    """Return the largest relative difference of a share."""
    return max(abs(after[worker] / share - 1.0) for worker, share in before.items())


def adjusted(
    shares: Mapping[WorkerId, float],
    speeds: Mapping[WorkerId, float],
    least: float = 0.0,
    most: float = 0.0,
    *,
    damping: float = DAMPING,
) -> dict[WorkerId, float]:
    """Return shares that are nearer to the speeds: ``share^(1 - damping) * speed^damping``, scaled to the mean 1.

    Where a step takes ``a + c x`` seconds for x samples, as it does with one worker's a and c whatever those of another, the ratio of two
    shares comes nearer to that of equal times without ever going beyond it. A worker whose time is all ``a`` comes to the least share.

    Args:
        shares: the present shares, each above 0.
        speeds: samples per second, measured with the present shares; each above 0.
        least, most: no share is below or above these; ``most`` 0: no limit. A limit that all would exceed is not kept.
        damping: from 0, no change, to 1, at once what the speeds ask for.

    >>> shares = {0: 1.0, 1: 1.0}
    >>> for _ in range(9):  # worker 0 is three times as fast
    ...     shares = adjusted(shares, {0: 300.0, 1: 100.0})
    >>> [round(share, 2) for share in shares.values()]
    [1.5, 0.5]
    """
    raw = {worker: share ** (1.0 - damping) * speeds[worker] ** damping for worker, share in shares.items()}
    fixed: dict[WorkerId, float] = {}
    free = dict(raw)
    while free:
        factor = (len(raw) - sum(fixed.values())) / sum(free.values())
        over = {w: most for w, x in free.items() if most and x * factor > most}
        under = {w: least for w, x in free.items() if x * factor < least}
        # Whichever moves more decides first: the other limit may hold by itself then.
        excess = sum(free[w] * factor - most for w in over) - sum(least - free[w] * factor for w in under)
        at_limit = over if excess >= 0 and over else under or over
        if not at_limit or len(at_limit) == len(free):
            return {worker: fixed.get(worker, raw[worker] * factor) for worker in raw}
        fixed |= at_limit
        free = {worker: x for worker, x in free.items() if worker not in at_limit}
    return fixed


def whole(
    weights: Sequence[float],
    budget: int,
    *,
    fixed: Sequence[float] | None = None,
    rising: bool = False,
    granularity: int = 1,
    least: int = 1,
    most: int | None = None,
) -> list[int]:
    """Return whole batch sizes x that add up to the budget and of which the longest time is the shortest possible.

    Each unit of the budget goes where it helps most: to the worker with the longest time ``weight / x + fixed``, or, where times are
    ``x / weight`` (``rising``), to the worker with the shortest time with one unit more. No other division has a shorter longest time,
    which rounding ideal sizes by their remainders does not give. On ties the worker with the fewest units gets one, then the first.

    Two cases cannot add up to the budget: if all are at ``most``, the rest of the budget is unused; if there are more workers than the
    budget has units, each worker has one unit.

    Args:
        weights: of each worker, at least 0.
        budget: a multiple of ``granularity``.
        fixed: of each worker, in the unit of ``weight / x``; None: 0.
        rising: times grow with the batch, as that of one step does; else they fall, as that of a share of an epoch does.
        granularity: all sizes are multiples of it.
        least: the least size of each worker.
        most: the greatest size of each worker; None: no limit.

    >>> whole([0.1, 0.1, 0.05], 256, granularity=8)
    [104, 96, 56]
    >>> whole([1.0, 99.0], 60), whole([1.0, 99.0], 60, rising=True)
    ([1, 59], [1, 59])
    >>> whole([250.0, 6.0], 256, least=16, most=200)
    [200, 56]
    """
    n, units = len(weights), budget // granularity
    assert n > 0 and units * granularity == budget, f"{budget} samples in units of {granularity} for {n} workers"
    low = max(1, min(ceil(least / granularity), units // n))
    high = max(low, units if most is None else most // granularity)
    if not low * n < units < high * n:
        return [granularity * (low if units <= low * n else high)] * n
    a, c = np.asarray(weights, dtype=float) / granularity, np.zeros(n) if fixed is None else np.asarray(fixed, dtype=float)
    given = _above(a, c, int(rising), units, low, high)
    # What is left are units that tie for the next place.
    queue = [(-(a[i] / (given[i] + rising) + c[i]), given[i], i) for i in range(n) if given[i] < high]
    heapify(queue)
    for _ in range(units - sum(given)):
        _, held, i = queue[0]
        given[i] = held + 1
        if given[i] < high:
            heapreplace(queue, (-(a[i] / (given[i] + rising) + c[i]), given[i], i))
        else:
            heappop(queue)
    return [granularity * x for x in given]


def _above(a: NDArray[np.float64], c: NDArray[np.float64], more: int, units: int, low: int, high: int) -> list[int]:
    """Return the units of each worker once all that are worth more than t are given; t is the least for which there are enough units.

    The unit after the x-th is worth ``a / (x + more) + c``, so a worker has ``ceil(a / (t - c) - more)`` that are worth more than t.
    """

    def given(t: float) -> NDArray[np.float64]:
        return np.clip(np.ceil(a / np.maximum(t - c, TINY) - more), low, high)

    # Not the greatest worth itself: rounded, the quotient above could be more than ``low`` for all.
    short, enough = 0.0, 2.0 * float((a / (low + more) + c).max())
    while short < (t := (short + enough) / 2) < enough:
        if given(t).sum() > units:
            short = t
        else:
            enough = t
    return [int(x) for x in given(enough)]
