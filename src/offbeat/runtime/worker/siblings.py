"""Coordinate the sessions of one process: it has one for each of its optimizers, for example for a GAN's two models.

The process waits with one session at a time. Meanwhile the other sessions' messages must be read, and a rank's replica kept up to date.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from offbeat.session import orders
from offbeat.types import Seconds

if TYPE_CHECKING:
    from offbeat.runtime.worker.job_session import JobSession

IDLE_S: Final[Seconds] = 0.02
"""Seconds between two times that a waiting process tends its sessions."""


class Siblings:
    """Hold the sessions of one process, in the order in which they were made.

    Args:
        sessions: the list that all sessions of the process share; each session is added when it joins its job.
    """

    def __init__(self, sessions: list[JobSession]) -> None:
        self._sessions = sessions

    def __len__(self) -> int:
        return len(self._sessions)

    def __getitem__(self, number: int) -> JobSession:
        return self._sessions[number]

    def __iter__(self) -> Iterator[JobSession]:
        return iter(self._sessions)

    def add(self, session: JobSession) -> int:
        """Add a session and return its number. All sessions share one count of calls: a call of any session is progress of the script."""
        self._sessions.append(session)
        session.link.calls = self._sessions[0].link.calls
        self.tend_while_waiting()
        return len(self._sessions) - 1

    def tend_while_waiting(self) -> None:
        """Arrange that the sessions are tended whenever the process waits, if any has work to do then."""
        if any(session.tended for session in self._sessions):
            for session in self._sessions:
                session.link.meanwhile = IDLE_S, partial(self._tend, session)

    def glance_at_others(self, stepped: JobSession) -> None:
        """Read what the other sessions have been sent: a checkpoint needs the replica of one whose training is over, too."""
        for session in self._sessions:
            if session.tended and session is not stepped and not session.link.closed.is_set():
                session.link.glance()

    def tend_others(self, waiting: JobSession) -> None:
        """Tend all sessions except the one with which the process waits."""
        for session in self._sessions:
            if session.tended and session is not waiting:
                session.link.glance()
                # In the middle of a step the script may hold a graph of another session's model, which must not change then.
                if not waiting.in_step:
                    session.idle()

    def _tend(self, waiting: JobSession) -> None:
        if waiting.tended:
            waiting.idle()
        self.tend_others(waiting)

    def refresh_others(self, ended: JobSession) -> None:
        """Give the other sessions the newest parameters, after the process has waited with ``ended`` for an epoch's end."""
        for session in self._sessions:
            if session is not ended and not session.link.closed.is_set():
                session.refresh()

    def with_sampler(self) -> JobSession | None:
        """Return the first session with a sampler; None if no session has one."""
        return next((session for session in self._sessions if session.has_sampler), None)

    def told(self, own: JobSession, signal: str) -> None:
        """Report over all sessions that a signal asks the process to end. ``own`` may not have joined yet."""
        if signal != "SIGINT":
            orders.note(signal)
        for session in self._sessions or [own]:
            session.link.told()

    def fail(self, own: JobSession, why: Mapping[str, Any]) -> int | None:
        """Report over one session that an exception ends the process, and let no session leave, unless the job has ended before the
        script. ``own`` may not have joined yet.

        Returns:
            The worker that has reported the same failure before; None: no worker has.
        """
        reporting = next((session for session in self._sessions if not session.link.closed.is_set()), own)
        before = reporting.link.fail(why)
        for session in self._sessions:
            session.link.failed = not why["over"]
        return before

    def notice(self, own: JobSession) -> None:
        """Order all sessions to leave; if one is waiting, the process ends at once. ``own`` may not have joined yet."""
        orders.note(None)
        for session in self._sessions or [own]:
            session.link.notice()

    def interrupt(self, own: JobSession, dropped: bool) -> bool:
        """Note a Ctrl-C in all sessions; return True if `KeyboardInterrupt` may be raised at once, since no session is in a call."""
        at_once = [session.link.interrupt(dropped) for session in self._sessions or [own]]  # a list: every session has to note it
        return all(at_once)
