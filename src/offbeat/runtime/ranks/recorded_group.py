"""Let the group of a job's ranks outlive the coordinator's process, by writing down what the coordinator sees in it.

The ranks change their group without the coordinator, so that messages alone do not determine what the coordinator does. `RecordedGroup`
stands between the plane and a group in shared memory. Each value that the group returns to the plane is written to the server's
log as an answer (``runtime/recovery/answers.py``). While the next process of the coordinator handles the messages of an earlier process
again, `RecordedGroup` returns the earlier answers and changes nothing. So both processes come to the same events, effects and messages.

Of the call in which the earlier process died it may be unknown whether the group had been changed. Then the change is made once more, while
ranks have gone on. What makes that right, call by call:

``follow``, ``present``, ``measured``
    change nothing. Without a record nothing has followed from the answer: a newer one is as good.
``ticket``
    voids the ticket before. Without a record no source has been sent the ticket, and a newer one is as good.
``begin``, ``enter``
    The coordinator tells a rank that the rank takes part after the call. Until then the rank hands in nothing and gets nothing. To enter
    the rank once more gives the same, but for one more entry of the log, which counts once (`Joiners.entered`). ``begin`` leaves out
    ranks that take part.
``leave``
    A rank that does not take part stays as it is. Only the coordinator removes ranks, and nobody enters this one before the call is over,
    since its ticket is void. What is lost with the rank, under push-sum, cannot be found out afterwards. So it is written
    down under the lock of the group, before the change is complete. If the rank still takes part, the change had not become complete, and
    what is lost now replaces what was written down.
``pause``, ``resume``
    leave a rank in that state as it is. A rank leaves it by itself only when it has been told something that follows from this call.
``forget``
    voids the ticket of a process that is gone, also while the rank takes part. A next process of the rank gets its ticket after its
    welcome, which follows from this call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from offbeat.core.effects import Effect
from offbeat.core.rank_log import Entry, EntryKind, TooOld
from offbeat.runtime.ranks.group import Group
from offbeat.runtime.recovery.plain_graph import PURE, freeze, thaw
from offbeat.runtime.recovery.survival import Survival
from offbeat.transport.base import SharedMemory
from offbeat.types import Incarnation, Seconds, Version, WorkerId

Note = Callable[[Sequence[Effect]], None]


class SharedGroup(Group, Protocol):
    """A group in memory that outlives the coordinator's process. It can be written to a snapshot, and is attached to that memory then."""

    def leave(self, rank: WorkerId, incarnation: Incarnation, note: Note | None = None) -> Sequence[Effect]:
        """Remove a rank; ``note`` is called with the effects, if there are some, before the change is complete."""


class RecordedGroup(Group):
    """A group of which the coordinator's next process sees what this one has seen.

    Args:
        group: in memory that outlives this process.
        survival: of the server.
    """

    def __init__(self, group: SharedGroup, survival: Survival) -> None:
        self._group, self._survival = group, survival

    @property
    def memory(self) -> tuple[SharedMemory, ...]:
        return self._group.memory

    def follow(self, start: int) -> list[Entry]:
        found: list[Any] = self._survival.ask(lambda: self._group.follow(start), [])
        return [entry if isinstance(entry, Entry) else _entry(*entry) for entry in found]

    def measured(self, seconds: Seconds) -> Seconds:
        return float(self._survival.ask(lambda: seconds, None))

    def present(self, rank: WorkerId) -> bool:
        return bool(self._survival.ask(lambda: self._group.present(rank), False))

    def ticket(self, rank: WorkerId) -> list[int]:
        return list(self._survival.ask(lambda: self._group.ticket(rank), []))

    def begin(self, ranks: Sequence[WorkerId]) -> None:
        self._survival.ask(lambda: self._group.begin(ranks), None)

    def enter(self, rank: WorkerId, version: Version) -> None:
        why_not = self._survival.ask(lambda: self._tried(rank, version))
        if why_not is not None:
            raise TooOld(why_not)

    def _tried(self, rank: WorkerId, version: Version) -> str | None:
        try:
            self._group.enter(rank, version)
        except TooOld as error:
            return str(error)
        return None

    def forget(self, rank: WorkerId) -> None:
        self._survival.ask(lambda: self._group.forget(rank), None)

    def leave(self, rank: WorkerId, incarnation: Incarnation) -> Sequence[Effect]:
        def live(note: Callable[[Any], None]) -> Sequence[Effect]:
            return self._group.leave(rank, incarnation, lambda effects: note(freeze(tuple(effects))[0]))

        nothing: Sequence[Effect] = ()
        found = self._survival.change(live, nothing, lambda: not self._group.present(rank))
        effects: Sequence[Effect] = thaw(found, packages=PURE) if isinstance(found, bytes) else found
        return effects

    def pause(self, rank: WorkerId) -> None:
        self._survival.ask(lambda: self._group.pause(rank), None)

    def resume(self, rank: WorkerId) -> None:
        self._survival.ask(lambda: self._group.resume(rank), None)

    def close(self) -> None:
        self._group.close()


def _entry(seq: int, kind: int, *rest: Any) -> Entry:
    return Entry(seq, EntryKind(kind), *rest)
