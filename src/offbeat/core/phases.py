"""Say where a worker's time goes: every moment between two pushes belongs to one phase, so that the phases add up to the whole.

A `PhaseClock` is told when another phase begins (`turn`), and gives an account with each push (`take`). It has no clock of its own: a live
worker gives it two of its process (``runtime/worker/phase_watch.py``), the simulator gives it the virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Final, NamedTuple

from offbeat.types import Seconds


class Phase(IntEnum):
    """Name what a worker does, in the order of a step. The journal has these names in lower case."""

    DATA = 0
    """It waits for its loader: the sampler, the data set and the collation, or processes of the loader."""
    FORWARD = 1
    """The model computes with gradients enabled."""
    BACKWARD = 2
    """Gradients are computed."""
    OWN = 3
    """The script's own code: all that is none of the others, such as the loss, logging, or a loader that is no ``DataLoader``."""
    EVALUATION = 4
    """The script computes without gradients: an evaluation, or the roll-outs of reinforcement learning."""
    GC = 5
    """Python collects garbage, in the script's thread."""
    UPDATE = 6
    """The optimizer steps in this process, under rules where it does."""
    SAVE = 7
    """The script saves, or this worker's state is copied for a checkpoint."""
    PUSH = 8
    """The gradient is collected, encoded and sent."""
    WAIT = 9
    """The worker waits for the job: for the rule, for samples, or at a barrier."""
    PULL = 10
    """The parameters that have come are loaded."""
    COMPUTE = 11
    """Computing whose parts are not separated: of simulated workers, or on a device that had not finished when it was asked."""

    @property
    def label(self) -> str:
        """The phase's name in journals.

        >>> Phase.FORWARD.label
        'forward'
        """
        return self.name.lower()


PHASES: Final = tuple(phase.label for phase in Phase)
NOT_SEPARATED: Final = ((Phase.COMPUTE.label, 1.0),)
"""The phases of an iteration of which only the whole time is known, with their shares of it."""
COMPUTING: Final = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.OWN, Phase.EVALUATION, Phase.GC, Phase.UPDATE, Phase.COMPUTE})
"""Phases in which a worker that has its processor to itself uses it, unless its script sleeps or reads."""
_TOGETHER: Final = frozenset(phase.label for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.COMPUTE))
"""Phases in which processes of one worker may wait for each other."""
WAITING: Final = Phase.WAIT
NS: Final = 1e-9


class Spent(NamedTuple):
    """The account of the time since a worker's last push, in seconds by the name of the phase; phases without time are left out."""

    phases: Mapping[str, Seconds]
    """Wall time."""
    processor: Mapping[str, Seconds]
    """Processor time of the process, all threads together; none for `WAITING`."""


def slowest(accounts: Sequence[Spent | None]) -> int:
    """Return which process of a worker its others wait for: the one that is busy for longest.

    All come to the push together, so that their accounts are equally long. A fast process waits for others in its own forward or backward
    pass too, where `torch.distributed` exchanges: of these, only processor time counts.

    >>> slowest([Spent({"data": 0.1, "backward": 0.9}, {"backward": 0.2}), Spent({"data": 0.7, "backward": 0.3}, {"backward": 0.2}), None])
    1
    """

    def busy_s(account: Spent | None) -> Seconds:
        if account is None:
            return -1.0
        measured = ((account.processor if name in _TOGETHER else account.phases).get(name, 0.0) for name in account.phases)
        return sum(measured) - account.phases.get(Phase.WAIT.label, 0.0)

    return max(range(len(accounts)), key=lambda rank: busy_s(accounts[rank]))


class PhaseClock:
    """Account for a worker's time by phases.

    Args:
        wall: the time, in nanoseconds.
        processor: the processor time that this process has used, in nanoseconds; None: it is not accounted for.

    >>> now = iter([0, 5_000_000, 7_000_000]).__next__
    >>> clock = PhaseClock(now)
    >>> clock.turn(Phase.FORWARD).label
    'own'
    >>> clock.take().phases
    {'forward': 0.002, 'own': 0.005}
    """

    def __init__(self, wall: Callable[[], int], processor: Callable[[], int] | None = None) -> None:
        self.at = Phase.OWN
        """The present phase."""
        self._wall, self._processor = wall, processor if processor is not None else lambda: 0
        self._spent, self._used = [0] * len(Phase), [0] * len(Phase)
        self._since, self._used_before = wall(), self._processor()

    def turn(self, phase: Phase) -> Phase:
        """Begin another phase now. Returns the one that ends."""
        now, used, before = self._wall(), self._processor(), self.at
        self._spent[before] += now - self._since
        self._used[before] += used - self._used_before
        self._since, self._used_before, self.at = now, used, phase
        return before

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Count the body as a phase, and go on with the phase before."""
        before = self.turn(phase)
        try:
            yield
        finally:
            self.turn(before)

    def wait(self) -> Phase:
        """Begin to wait. Returns what `waited` needs."""
        return self.turn(WAITING)

    def waited(self, before: Phase) -> None:
        """End a wait: after a push comes the pull, after anything else the same."""
        self.turn(Phase.PULL if before is Phase.PUSH else before)

    def take(self, device: Mapping[Phase, Seconds] | None = None) -> Spent | None:
        """Return the account since the last call, and begin the next; None: this clock does not measure.

        Args:
            device: how long a device has computed in each phase, for which the host does not wait; see `with_device`.
        """
        self.turn(self.at)
        spent, used = self._spent, self._used
        self._spent, self._used = [0] * len(Phase), [0] * len(Phase)
        seconds = [ns * NS for ns in spent]
        if device is not None:
            seconds = with_device(seconds, device)
        wall = {PHASES[at]: round(time_s, 6) for at, time_s in enumerate(seconds) if time_s >= 5e-7}
        processor = {PHASES[at]: round(ns * NS, 6) for at, ns in enumerate(used) if ns >= 500 and at != WAITING}
        return Spent(wall, processor)


class Unmeasured(PhaseClock):
    """A clock that measures nothing, where phases are switched off or the process is not a worker's own."""

    def __init__(self) -> None:
        super().__init__(lambda: 0)

    def turn(self, phase: Phase) -> Phase:
        return Phase.OWN

    def take(self, device: Mapping[Phase, Seconds] | None = None) -> Spent | None:
        return None


UNMEASURED: Final[PhaseClock] = Unmeasured()


def with_device(host: list[Seconds], device: Mapping[Phase, Seconds]) -> list[Seconds]:
    """Return the seconds by phase where a device computes what the host has only ordered.

    The host waits for the device later: in the push, which copies the gradient, or in the script's own code, which asks for the loss. So a
    phase lasts as long as the host or the device needs for it, whichever is longer, and the difference comes out of push and own code. The
    sum stays the same.

    >>> host = [0.0] * len(Phase)
    >>> host[Phase.FORWARD], host[Phase.BACKWARD], host[Phase.PUSH] = 1.0, 2.0, 7.0
    >>> seconds = with_device(host, {Phase.FORWARD: 3.0, Phase.BACKWARD: 4.0})
    >>> seconds[Phase.FORWARD], seconds[Phase.BACKWARD], seconds[Phase.PUSH]
    (3.0, 4.0, 3.0)
    """
    seconds = list(host)
    for phase, time_s in device.items():
        for source in (Phase.PUSH, Phase.OWN):
            if source is not phase:
                moved = min(max(0.0, time_s - seconds[phase]), seconds[source])
                seconds[phase] += moved
                seconds[source] -= moved
    return seconds
