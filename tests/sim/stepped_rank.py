"""A rank of a job without servers: the real session, memory and replica, in the thread of the job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tests.sim.stepped_process import LOOK, MAIL, SteppedProcess, Wait

from offbeat.core.events import Pushed
from offbeat.runtime.gossip.member import OneHostGossipMember
from offbeat.runtime.members import part_of
from offbeat.runtime.ranks.member import RankMember
from offbeat.runtime.ranks.worker_side import RankSession
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import OptimizerSpec
from offbeat.types import Incarnation, Seconds, Version, WorkerId

if TYPE_CHECKING:
    from tests.sim.stepped_ranks import SteppedRanks


class WentOn(NamedTuple):
    """A rank goes on."""

    t: Seconds
    worker: WorkerId
    incarnation: Incarnation
    parameters: list[float]


class SourceEnd(NamedTuple):
    """The end of a source between its two acts: it has admitted the joiner, and has not sent its replica."""

    source: WorkerId
    joiner: WorkerId
    version: Version
    """Of its replica, at which the joiner was admitted."""
    how: str


class SteppedRankSession(RankSession):
    """The real session, which says when it waits for others and when it goes on."""

    def __init__(self, rank: SteppedRank, *arguments: Any, **options: Any) -> None:
        self._rank = rank
        super().__init__(*arguments, **options)

    def _hear(self) -> None:
        while self._rank.pause(Wait.OTHERS) == MAIL:
            self._rank.read()
        super()._hear()

    def _push(self, push: Pushed) -> None:
        self._rank.offer(gradient=True)
        super()._push(push)

    def _resume(self) -> None:
        if not self._fenced:
            self._rank.note()
        super()._resume()

    def _fall_out(self, why: Any) -> None:
        self._rank.falls_out()
        super()._fall_out(why)


class SteppedRank(SteppedProcess):
    """One process of a rank, of whichever family. Arguments as for `SteppedProcess`."""

    job: SteppedRanks
    session: SteppedRankSession
    moves_on = False
    """It waits for somebody else than before, behind those who do so already."""
    _for: WorkerId | None = None
    """For whom it waits in gossip, the first of them."""

    def _make_session(self, layout: Layout, spec: OptimizerSpec, optimizer: torch.optim.Optimizer) -> SteppedRankSession:
        settings = self.job.worker_settings(self.number)
        return SteppedRankSession(self, settings, layout, spec, self.model, optimizer, part_of=self._part, hub=self.hub)

    def _joined(self) -> None:
        with self.session._back_if_fenced():
            self.session._start()

    def _part(self, *arguments: Any) -> RankMember:
        member = part_of(*arguments)
        give = member.give_to

        def give_to(rank: WorkerId | None, ticket: Any) -> Any:
            given = give(rank, ticket)
            if rank is not None and self.job.ends_source(self, rank, member.version):
                self.pause(Wait.NOTHING)
            return given

        member.give_to = give_to  # type: ignore[method-assign]
        return member

    def tend(self) -> None:
        """Do what the thread of the heartbeat does beside a rank that is not about to read: connect again where a server has died."""
        self.session.link._links.tend()
        while self.is_cut:
            self.session.link._links.tend()

    def pause(self, what: Wait) -> str:
        now = self.job.journal_time
        if what is Wait.OTHERS:
            if self.number not in self.job.waits:
                self._for = self._first_behind()
            self.job.waits.setdefault(self.number, now)
            if self not in self.job.waiting:
                self.job.waiting.append(self)
        elif self.number in self.job.waits and what is not Wait.NOTHING:
            self.job.waited.append((self.job.waits.pop(self.number), now))
        return super().pause(what)

    @property
    def waits_for_others(self) -> bool:
        """Whether it waits for something in memory."""
        return not self.gone and self._waits is Wait.OTHERS

    def look(self) -> bool:
        """Go on if what it waits for is there. Returns whether it did. A frozen process looks when it thaws."""
        if (thaw := self.thaw()) > self.job.now:
            if self._makes_its_step_now():
                self.job.finds_out()
            self.job.at(thaw, lambda: None)
            return False
        self.resume(LOOK)
        before, self._for = self._for, self._first_behind() if self.waits_for_others else None
        self.moves_on = self.waits_for_others and self._for != before
        return not self.waits_for_others

    def idle(self) -> None:
        """Let it take what there is for it, where it waits for the coordinator."""
        if not self.gone and self._waits is Wait.TENDING and self.thaw() == self.job.now:
            self.resume(LOOK)

    def _makes_its_step_now(self) -> bool:
        member = self.session._part
        averages = isinstance(member, OneHostGossipMember) and member._gossip.rule.exchange == "average"
        return averages and self._first_behind() is None

    def _first_behind(self) -> WorkerId | None:
        """Return for whom it waits, the first of them; None: nobody, or its rule sums gradients."""
        member, number = self.session._part, self.number
        if not isinstance(member, OneHostGossipMember):
            return None
        memory: Any = member._gossip._memory  # type: ignore[attr-defined]
        behind: WorkerId | None = memory.read(
            lambda state: next(iter(state.gossip.behind(number)), None) if number in state.gossip.present else None
        )
        return behind

    def note(self) -> None:
        """It goes on with these parameters."""
        if self.gone or not self.job.knows(self.number, self.session.link.incarnation):
            return
        session, parameters = self.session, self.vector()
        self.job.seen.setdefault((None, session.version), []).append(parameters)
        self.job.went_on.append(WentOn(self.job.journal_time, self.number, session.link.incarnation, parameters.tolist()))

    def falls_out(self) -> None:
        """It finds out that it does not take part any more."""
        if self.number in self.job.waits:
            self.job.finds_out()
