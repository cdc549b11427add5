"""Count the signals that tell a launcher's process to end: signals close together are one notice, a later one asks for the end at once.

An engine that cancels a job signals every process, some twice: Slurm signals all processes of a step, and an agent or torchrun passes the
same signal on. So a second signal means "at once" only if it comes after the first one had time to act.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator

from offbeat.launch.notice import NoticeCommand
from offbeat.runtime.job.notices import ends_in_order
from offbeat.types import Seconds

SAME_S: Seconds = 5.0
"""Seconds within which a further SIGTERM, which engines repeat, belongs to the same notice."""
SAME_INTERRUPT_S: Seconds = 1.0


class StopSignals:
    """Keep the first signal, and whether a later one insists.

    Args:
        clock: returns monotonic seconds.

    >>> times = iter([10.0, 10.2, 12.0])
    >>> told = StopSignals(lambda: next(times))
    >>> told.note(signal.SIGINT), told.note(signal.SIGINT), told.note(signal.SIGINT)
    (False, False, True)
    """

    def __init__(self, clock: Callable[[], Seconds] = time.monotonic) -> None:
        self._clock = clock
        self.number: int | None = None
        """The first signal; None: none has come."""
        self.insists = False
        """True once a signal has come that does not belong to the first notice."""
        self._since: Seconds = 0.0

    def note(self, number: int) -> bool:
        """Note a signal. Returns True if it asks for the end at once. For signal handlers."""
        now = self._clock()
        if self.number is None:
            self._since, self.number = now, number
        elif now - self._since >= (SAME_INTERRUPT_S if number == signal.SIGINT else SAME_S):
            self.insists = True
        return self.insists

    @contextlib.contextmanager
    def heeded(self, then: Callable[[], object]) -> Iterator[None]:
        """Note the signals that tell this process to end, for as long as the context lasts; call ``then`` after each, as its handler."""

        def on_signal(number: int, frame: object) -> None:
            self.note(number)
            then()

        before = {number: signal.signal(number, on_signal) for number in ends_in_order()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def look(self, notice: NoticeCommand | None, now: Seconds, say: Callable[[str], object]) -> bool:
        """Note a notice of the user's command as SIGTERM, and say so. Returns False if there is none, or a signal has come before."""
        if notice is None or self.number is not None or not notice.look(now):
            return False
        say(f"this machine will be taken away, says --notice-command {notice.command!r}")
        self.note(signal.SIGTERM)
        return True
