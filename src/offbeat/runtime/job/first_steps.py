"""What the first steps of a job tell about its data: whether workers compute on the same samples, and whether anybody knows how many.

A seeded script that draws its batches by itself draws the same ones on every worker: n workers then compute one worker's gradient n
times, and nothing fails. So each worker sends a checksum of its gradient with its first steps, unless a sampler has dealt the samples to
it, and the coordinator compares them. Later steps cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from offbeat.types import WorkerId

STEPS = 5
"""How many steps of a worker's process are looked at."""

First: TypeAlias = list[tuple[int, int | None, bool]]
"""Of steps: the number, the checksum of the gradient (None: it says nothing), and whether the number of its samples is known."""


class Warned(NamedTuple):
    """A sentence for the user; ``about`` names its kind in the journal."""

    about: str
    workers: tuple[WorkerId, ...]
    step: int
    detail: str


class FirstSteps:
    """One worker's side: notes its first steps until a push takes them along."""

    def __init__(self) -> None:
        self._noted: First = []

    def note(self, step: int, digest: Callable[[], int | None], *, known: bool) -> None:
        """A step, counted from 1, whose samples no sampler has dealt. ``digest`` is only called if the step is one of the first."""
        if step <= STEPS:
            self._noted.append((step, digest(), known))

    def header(self) -> dict[str, Any]:
        """What goes with a push: nothing, once the first steps are over."""
        noted, self._noted = self._noted, []
        return {"first": noted} if noted else {}


class FirstStepsWatch:
    """The coordinator's side: compares what the workers send, and says each thing once.

    Args:
        workers: how many the job was started with.

    >>> watch = FirstStepsWatch(2)
    >>> watch.note(0, [(1, 77, True)])
    []
    >>> watch.note(1, [(1, 77, True)])[0].workers
    (0, 1)
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._digests: dict[int, dict[WorkerId, int | None]] = {}
        self._said: set[str] = set()

    def note(self, worker: WorkerId, first: Iterable[Sequence[Any]]) -> list[Warned]:
        """Take what a worker has sent with a push; the answer is what is to be said, if anything."""
        found: list[Warned | None] = []
        for step, digest, known in first:
            self._digests.setdefault(step, {})[worker] = digest
            found.append(self._equal())
            if not known and step >= STEPS and self._workers > 1:
                found.append(_unknown(worker, step))
        return [self._mark(one) for one in found if one is not None and one.about not in self._said]

    def _mark(self, warned: Warned) -> Warned:
        self._said.add(warned.about)
        return warned

    def _equal(self) -> Warned | None:
        """The first step at which gradients are equal, once all workers have made it, or one of them has made all that are looked at."""
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
        f"workers {listed} computed the same gradient at their step {step}, byte for byte: they draw the same samples, and all but one of "
        "them compute in vain. Deal the samples out with optimizer.batch_sampler(dataset) or offbeat.elastic(...), or seed what draws "
        "them differently on each worker: torch.manual_seed(seed + offbeat.rank())",
    )


def _unknown(worker: WorkerId, step: int) -> Warned:
    return Warned(
        "samples_unknown",
        (worker,),
        step,
        f"nobody knows how many samples a step is of (worker {worker}, step {step}): gradients of unequal batches weigh the same, "
        "samples/s cannot be told, and no epoch sees to it that each sample is used once. Take the batches from "
        "optimizer.batch_sampler(dataset) or offbeat.elastic(...), or say optimizer.step(samples=len(batch))",
    )
