"""Check, with the first steps of a job, whether workers compute on the same samples, and whether numbers of samples are known.

A seeded script that draws its own batches draws the same ones on every worker: n workers then compute one worker's gradient n times, and
nothing fails. So each worker sends a checksum of its gradient with its first steps, unless a sampler has dealt its samples, and the
coordinator compares the checksums. Later steps cost nothing. With its first push a worker also sends checksums of what all should have
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from offbeat.types import WorkerId

STEPS = 5
"""How many steps of a worker's process are checked."""

First: TypeAlias = list[tuple[int, int | None, bool]]
"""For each step: its number, the checksum of the gradient (None: not known), and whether its number of samples is known."""


class Warned(NamedTuple):
    """A warning for the user; ``about`` names its kind in the journal."""

    about: str
    workers: tuple[WorkerId, ...]
    step: int
    detail: str


class FirstSteps:
    """Note a worker's first steps until a push carries them to the coordinator."""

    def __init__(self) -> None:
        self._noted: First = []

    def note(self, step: int, digest: Callable[[], int | None], *, known: bool) -> None:
        """Note a step, counted from 1, whose samples no sampler has dealt. ``digest`` is called only for one of the first steps."""
        if step <= STEPS:
            self._noted.append((step, digest(), known))

    def header(self) -> dict[str, Any]:
        """Return the fields that go with a push; {} once the first steps are over."""
        noted, self._noted = self._noted, []
        return {"first": noted} if noted else {}


class FirstStepsWatch:
    """Compare, at the coordinator, what workers send; give each warning once.

    Args:
        workers: the number of workers that the job was started with.

    >>> watch = FirstStepsWatch(2)
    >>> watch.note(0, [(1, 77, True)])
    []
    >>> watch.note(1, [(1, 77, True)])[0].workers
    (0, 1)
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._digests: dict[int, dict[WorkerId, int | None]] = {}
        self._given: set[str] = set()
        self._alike: dict[str, tuple[WorkerId, int]] = {}
        """By what it is of: the first worker that has sent a checksum, and the checksum."""

    def note(self, worker: WorkerId, first: Iterable[Sequence[Any]], alike: Mapping[str, int | None] | None = None) -> list[Warned]:
        """Take what a worker has sent with a push. Returns new warnings.

        Args:
            worker: has sent it.
            first: its first steps.
            alike: checksums of what workers should have alike, see `ALIKE`; None: it has none, or has sent it before.
        """
        found: list[Warned | None] = []
        for what, checksum in (alike or {}).items():
            if checksum is not None:
                other, theirs = self._alike.setdefault(what, (worker, checksum))
                found.append(_unlike(what, other, worker) if checksum != theirs else None)
        for step, digest, known in first:
            self._digests.setdefault(step, {})[worker] = digest
            found.append(self._equal())
            if not known and step >= STEPS and self._workers > 1:
                found.append(_unknown(worker, step))
        return [self._mark(one) for one in found if one is not None and one.about not in self._given]

    def _mark(self, warned: Warned) -> Warned:
        self._given.add(warned.about)
        return warned

    def _equal(self) -> Warned | None:
        """Return a warning for the first step with equal gradients, once all workers have made it or one has made all checked steps."""
        for step, digests in sorted(self._digests.items()):
            if len(digests) < self._workers and STEPS not in self._digests:
                continue
            for digest in digests.values():
                same = tuple(sorted(worker for worker, other in digests.items() if other == digest))
                if digest is not None and len(same) > 1:
                    return _same_gradients(same, step)
        return None


def _same_gradients(workers: tuple[WorkerId, ...], step: int) -> Warned:
    listed = f"{', '.join(map(str, workers[:-1]))} and {workers[-1]}"
    return Warned(
        "equal_gradients",
        workers,
        step,
        f"workers {listed} computed the same gradient at their step {step}, byte for byte: they draw the same samples, so that all but "
        "one compute for nothing. Deal the samples out with optimizer.batch_sampler(dataset) or offbeat.elastic(...), or seed what draws "
        "them differently on each worker: torch.manual_seed(seed + offbeat.rank())",
    )


ALIKE: Final = {
    "frozen": (
        "frozen_differ",
        "parameters that are not trained (requires_grad=False, or in no group of the optimizer) differ between workers {} and {}: the job "
        "shares only what it trains, so that each worker trains with a model of its own. Load them from the same file, or call "
        "torch.manual_seed with the same seed on every worker before the model is made",
    ),
    "chosen": (
        "data_differ",
        "the indices of a data set's part (Subset, SubsetRandomSampler), or the order of a sampler of the script's own, differ between "
        "workers {} and {}: each trains on a part of its own, maybe on samples that another keeps for validation. Split and shuffle with "
        "the same seed on every worker: random_split(data, sizes, generator), KFold(shuffle=True, random_state=...)",
    ),
}
"""By the field of a worker's first push: what a warning is about, and what it says, if the checksums of two workers differ."""


def _unlike(what: str, worker: WorkerId, other: WorkerId) -> Warned:
    about, says = ALIKE[what]
    return Warned(about, (worker, other), 1, says.format(worker, other))


def _unknown(worker: WorkerId, step: int) -> Warned:
    return Warned(
        "samples_unknown",
        (worker,),
        step,
        f"the number of samples of a step is not known (worker {worker}, step {step}): gradients of unequal batches get the same weight, "
        "samples/s cannot be computed, and no epoch ensures that each sample is used once. Take the batches from "
        "optimizer.batch_sampler(dataset) or offbeat.elastic(...), or call optimizer.step(samples=len(batch))",
    )
