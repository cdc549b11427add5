"""Run the plane of rounds among the ranks of one host: write to their shared memory which ranks take part, and read its log.

The ranks change their group without the coordinator, so that messages alone do not determine what the coordinator does. Each value that
`OneHostGroup` returns to the plane is written to the server's log as an answer (``runtime/recovery/answers.py``). While the next process of
the coordinator handles the messages of an earlier process again, `OneHostGroup` returns the earlier answers and changes nothing. So both
processes come to the same events, effects and messages.

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
from typing import Any, TypeAlias

import torch

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.effects import Effect
from offbeat.core.policy import Policy
from offbeat.core.rank_log import Entry, EntryKind, TooOld
from offbeat.policies import rule_of
from offbeat.policies.eager import Full
from offbeat.runtime.allreduce.model_means import means_numel
from offbeat.runtime.allreduce.one_host.rounds import OneHostRounds
from offbeat.runtime.ranks.group import Group
from offbeat.runtime.ranks.plane import RankPlane
from offbeat.runtime.recovery.plain_graph import PURE, freeze, thaw
from offbeat.runtime.recovery.survival import NOBODY, Survival
from offbeat.transport.base import SharedMemory
from offbeat.types import Incarnation, Seconds, Version, WorkerId

Note: TypeAlias = Callable[[Sequence[Effect]], None]


class OneHostPlane(RankPlane):
    """Follow a job whose ranks are all on the host of server 0."""

    backend = "one_host"


class OneHostGroup(Group):
    """Hold what the ranks of one host share: the rounds of one job and, if the rule has them, the rounds that average parameters.

    Args:
        shared: the rounds of gradients, and of parameters if there are some.
        survival: of the server.
    """

    def __init__(self, shared: Sequence[Any], survival: Survival = NOBODY) -> None:
        self._shared, self._first, self._survival = shared, shared[0], survival

    @classmethod
    def of_rounds(
        cls, policy: RoundRule, ranks: int, numel: int, size: int, dtype: torch.dtype, seed: int, survival: Survival
    ) -> OneHostGroup:
        """Return the group of a job, in new memory, or in that of an earlier process of the coordinator.

        Args:
            policy: the job's rule.
            ranks: the greatest number of ranks.
            numel, size: elements of a gradient with its hyperparameters, and the number of parameters.
            dtype: of both.
            seed: seed of the rule's draws.
            survival: of server 0.

        Raises:
            ConfigurationError: there is not enough memory.
        """

        def kept(make: Callable[[], OneHostRounds], rule: RoundRule) -> OneHostRounds:
            found: OneHostRounds = survival.once("rounds", make, lambda block: cls.attached(block, rule))
            return found

        shared = [kept(lambda: OneHostRounds.create(policy, ranks, numel, dtype=dtype, seed=seed, followed=True), policy)]
        if policy.model_sync_every is not None:
            shared.append(kept(lambda: OneHostRounds.create(Full(), ranks, means_numel(size), dtype=dtype), Full()))
        return cls(shared, survival)

    @staticmethod
    def attached(block: SharedMemory, rule: Policy) -> Any:
        """Return what an earlier process of the coordinator has made in this block."""
        return OneHostRounds.attach(block, None, rule_of(RoundRule, rule))  # type: ignore[type-abstract]

    def __getstate__(self) -> dict[str, Any]:
        """Have a snapshot of the server refer to the memory, which the next process attaches."""
        return {"rules": [shared.rule for shared in self._shared], "memory": self.memory, "survival": self._survival}

    def __setstate__(self, state: dict[str, Any]) -> None:
        shared = [self.attached(*each) for each in zip(state["memory"], state["rules"], strict=True)]
        OneHostGroup.__init__(self, shared, state["survival"])

    @property
    def memory(self) -> tuple[SharedMemory, ...]:
        """Return the shared blocks: that of the gradients' rounds first."""
        return tuple(shared.block for shared in self._shared)

    def follow(self, start: int) -> list[Entry]:
        found: list[Any] = self._survival.ask(lambda: self._first.follow(start), [])
        return [entry if isinstance(entry, Entry) else _entry(*entry) for entry in found]

    def measured(self, seconds: Seconds) -> Seconds:
        return float(self._survival.ask(lambda: seconds))

    def present(self, rank: WorkerId) -> bool:
        return bool(self._survival.ask(lambda: self._first.present(rank), False))

    def begin(self, ranks: Sequence[WorkerId]) -> None:
        """Enter the ranks that the job begins with, and do not take part yet."""

        def begin() -> None:
            for rank in ranks:
                for shared in self._shared:
                    if not shared.present(rank):
                        shared.enter(rank, 0 if shared is self._first else shared.done)

        self._survival.ask(begin)

    def enter(self, rank: WorkerId, version: Version) -> None:
        def why_not() -> str | None:
            try:
                self._first.enter(rank, version)
            except TooOld as error:
                return str(error)
            for shared in self._shared[1:]:
                shared.enter(rank, shared.done)
            return None

        if (reason := self._survival.ask(why_not)) is not None:
            raise TooOld(reason)

    def ticket(self, rank: WorkerId) -> list[int]:
        """Return numbers that authorise another rank to admit `rank`'s current process, one for each of the rounds."""
        # A source admits a joiner to the rounds of gradients first. The other way round here, no stale source can do only the second part.
        return list(self._survival.ask(lambda: [shared.ticket(rank) for shared in reversed(self._shared)][::-1], []))

    def forget(self, rank: WorkerId) -> None:
        """Withdraw the tickets of a rank whose process is gone."""

        def forget() -> None:
            for shared in reversed(self._shared):  # as in `ticket`: else the rank might be in the rounds of parameters alone
                shared.forget(rank)

        self._survival.ask(forget)

    def leave(self, rank: WorkerId, incarnation: Incarnation) -> Sequence[Effect]:
        def live(note: Callable[[Any], None]) -> Sequence[Effect]:
            return self._leave(rank, incarnation, lambda effects: note(freeze(tuple(effects))[0]))

        nothing: Sequence[Effect] = ()
        found = self._survival.change(live, nothing, lambda: not self._first.present(rank))
        effects: Sequence[Effect] = thaw(found, packages=PURE) if isinstance(found, bytes) else found
        return effects

    def _leave(self, rank: WorkerId, incarnation: Incarnation, note: Note) -> Sequence[Effect]:
        """Remove a rank. Gradients that it has handed in stay, and nothing is lost.

        ``note`` is called with the effects, if there are some, before the change is complete.
        """
        for shared in self._shared:
            shared.leave(rank)
        return ()

    def pause(self, rank: WorkerId) -> None:
        self._survival.ask(lambda: self._first.pause(rank))

    def resume(self, rank: WorkerId) -> None:
        self._survival.ask(lambda: self._first.resume(rank))

    def close(self) -> None:
        for shared in self._shared:
            shared.close()


def _entry(seq: int, kind: int, *rest: Any) -> Entry:
    return Entry(seq, EntryKind(kind), *rest)
