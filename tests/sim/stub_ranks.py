"""Ranks of jobs without servers: what the real ones do in ``runtime/ranks`` and the rooms of their families, in one thread.

A rank has the real shared memory of its family, and its own copy of two parameters. Where the real one sleeps until others have come as
far, this one yields `Shared`, and is asked again whenever something has happened at the instant.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tests.sim.stub_process import LR, Waits
from tests.sim.stub_worker import StubWorker

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.effects import Fence, Release
from offbeat.core.events import Pushed
from offbeat.core.policy import Plan
from offbeat.core.rank_log import Fenced
from offbeat.runtime.allreduce.one_host.rounds import OneHostRounds
from offbeat.runtime.worker.job_session import pushed_fields
from offbeat.transport.base import Message
from offbeat.types import Incarnation, Seconds, Version, WorkerId

if TYPE_CHECKING:
    from tests.sim.stepped_ranks import SteppedRanks


class Shared:
    """What a rank waits for in the memory that it shares with others. True also once it is fenced, to have it find that out.

    Args:
        there: says whether what is awaited is there.
    """

    def __init__(self, there: Callable[[], bool]) -> None:
        self._there = there
        self._fenced: Fenced | None = None

    def __call__(self) -> bool:
        try:
            return self._there()
        except Fenced as error:
            self._fenced = error
            return True

    def check(self) -> None:
        """Raise `Fenced` if that is why the wait is over."""
        if self._fenced is not None:
            raise self._fenced


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


class StubRank(StubWorker):
    """One process of a rank, of whichever family. See `StubWorker` for the arguments."""

    job: SteppedRanks

    def __init__(self, job: SteppedRanks, number: WorkerId, iteration: int) -> None:
        super().__init__(job, number, iteration)
        self.parameters = torch.tensor([1.0, -1.0])
        self._given: tuple[Any, Version] | None = None
        """Another rank's parameters, and their version, to begin with."""
        self._enters = True
        self.moves_on = False
        """It waits for somebody else than before, behind those who do so already."""
        self._outside = False
        """It has found out that it does not take part, and is still to hear why."""
        self._goal: Version = 0

    # What its family does.

    @abstractmethod
    def attach(self) -> None:
        """Be this rank in the memory that came with the welcome."""

    @property
    def contact(self) -> dict[str, Any]:
        """Return what other ranks need to know of it."""
        return {}

    @abstractmethod
    def begin(self) -> None:
        """Take part from now on."""

    @abstractmethod
    def catch_up(self) -> None:
        """Take what there is for a rank that waits for word of the coordinator."""

    @abstractmethod
    def resume(self) -> None:
        """Compute again."""

    @abstractmethod
    def contribute(self, gradient: torch.Tensor, samples: int) -> Generator[Any, None, None]:
        """Take part in a round, or in an exchange, with this gradient."""

    @abstractmethod
    def admit(self, rank: WorkerId, ticket: list[int]) -> None:
        """Another rank has this one's parameters."""

    # What drives it.

    def turn(self) -> None:
        """Something has come. What is awaited of others' memory is looked at by the job, for all ranks in the order in which they wait."""
        waits_for = self._waits_for
        if isinstance(waits_for, Shared) and not self.gone:
            self._waits_for = None
            super().turn()
            self._waits_for = waits_for
        else:
            super().turn()

    @property
    def waits_for_others(self) -> bool:
        """Whether it waits for something in memory."""
        return not self.gone and isinstance(self._waits_for, Shared)

    def look(self) -> bool:
        """Go on if what it waits for is there. Returns whether it did. A frozen process looks when it thaws."""
        if (thaw := self.thaw()) > self.job.now:
            self.job.at(thaw, lambda: None)
            return False
        assert self._waits_for is not None
        if not self._waits_for():
            return False
        self._go_on()
        return True

    def idle(self) -> None:
        """What it does while it waits for the coordinator."""
        busy = self.gone or self._enters or self._outside or self.fenced or self._alarm or self.waits_for_others
        if not busy and self.thaw() == self.job.now:
            try:
                self.catch_up()
            except Fenced:
                return  # the coordinator says so too

    def _go_on(self) -> None:
        self._alarm, self._waits_for = 0, None
        for wish in self._life:
            if isinstance(wish, Shared):
                self._waits_for = wish
                self.job.waiting.append(self)
                return
            if not callable(wish):
                self._alarm = self.job.agenda.at(wish, self._rings)
                return
            if not wish():
                self._waits_for = wish
                return

    # What it says and hears.

    def live(self) -> Waits:
        yield from self._join()
        yield from self._work_through()
        self.say("leaving")
        yield lambda: "farewell" in self.mail
        self.say("left", incarnation=self.incarnation, noticed=False)
        self.end("end of stream")

    def _join(self) -> Waits:
        vector = {"numel": 2, "dtype": "float32", "size": 2}
        hello = {"layout": self.layout.to_wire(), "optimizer": self.spec.to_wire(), "sync": self.job.script.sync, "local_only": None}
        self.servers[0].send({"kind": "hello", "worker": self.number, "pid": 0, "vector": vector, **hello})
        yield lambda: "welcome" in self.mail
        self.mail.pop("welcome")
        self.attach()
        self.say("ready", **self.contact)
        yield from self._settle()

    def _admitted(self) -> Waits:
        yield lambda: self._due
        if self.fenced:
            yield from self._tell(Fence(self.number, self.incarnation, ""))
            return
        self._release = self.serials[0]
        try:
            self._go_along()
        except Fenced:
            self._outside = True
        else:
            yield from self._resume()

    def _resume(self) -> Waits:
        """Compute from the parameters as they are."""
        yield from self._tell(Release(self.number, self.incarnation, self.version, 0, "", self.plan))

    def _rejoin(self) -> None:
        self.fenced, self.left_behind, self._release = False, self.incarnation, self.serials.get(0, self._release)
        self._enters, self._outside = True, False
        self.mail.clear()
        self.attach()
        self.say("ready", **self.contact)

    def _go_along(self) -> None:
        """Word has come to go on."""
        if self._enters:
            self._enters, given, self._given = False, self._given, None
            if given is not None:
                self.parameters, self.version = torch.tensor(given[0]), given[1]
            self.begin()
        self.catch_up()
        self.resume()
        self.note()

    def _push(self, push: Pushed) -> Waits:
        self.job.pushes += 1
        gradient = self._vector(gradient=True)
        self.job.offered.setdefault((self.number, self.incarnation), []).append(gradient)
        fields = {**pushed_fields(push), "version": self.version}
        self.say("push", number=self.job.pushes, steps=self._steps, push=fields)
        try:
            yield from self.contribute(gradient, push.samples)
        except Fenced as error:
            self._fall_out(error)
        else:
            self.note()
            yield from self._resume()

    def _fall_out(self, why: Fenced) -> None:
        """It does not take part any more, and will hear so."""
        self._outside = True

    def wait(self, there: Callable[[], bool]) -> Generator[Any, None, None]:
        """Wait until something is there in memory. Raises `Fenced` if this rank is not."""
        shared = Shared(there)
        since = self.job.waits[self.number] = self.job.journal_time
        yield shared
        del self.job.waits[self.number]
        self.job.waited.append((since, self.job.journal_time))
        try:
            shared.check()
        except Fenced:
            self.job.finds_out()
            raise

    def note(self) -> None:
        """It goes on with these parameters."""
        self.job.seen.setdefault((None, self.version), []).append(self.parameters.clone())
        self.job.went_on.append(WentOn(self.job.journal_time, self.number, self.incarnation, self.parameters.tolist()))

    def _sort(self, server: int, message: Message) -> None:
        header = message.header
        match header["kind"]:
            case "parameters":
                self.serials[0], self.incarnation = header["serial"], header["incarnation"]
                self.plan, self._goal = Plan(*header["plan"]), header["version"]
                if header["enters"]:
                    self._enters = True
                    self._given = (header["replica"], header["from"]) if header["replica"] is not None else None
            case "provide":
                own = {"replica": self.parameters.tolist(), "from": self.version}
                self.servers[0].send({"kind": "initial", "number": 0, "provided": True, **own})
            case "donate":
                if header["to"] is not None:
                    self.admit(header["to"], header["ticket"])
                    if self.job.ends_source(self, header["to"]):
                        self._waits_for = None
                        return
                told = {"to": header["to"], "number": header["number"], "failed": None}
                self.servers[0].send({"kind": "donation", **told, "replica": self.parameters.tolist(), "from": self.version})
            case "chief":
                pass
            case "farewell":
                self.mail["farewell"] = header
            case _:
                super()._sort(server, message)


class StubRounds(StubRank):
    """A rank of the allreduce family, in `runtime.allreduce.one_host`."""

    def attach(self) -> None:
        policy = self.policy
        assert isinstance(policy, RoundRule)
        self._partial, self._rounds = policy, OneHostRounds.attach(self.memory[0], self.number)

    def begin(self) -> None:
        self._rounds.send()

    def catch_up(self) -> None:
        self._apply(self._rounds.catch_up())
        assert self._alarm or self.version >= self._goal, f"rank {self.number} has version {self.version}, and was promised {self._goal}"

    def resume(self) -> None:
        self._rounds.resume(self.number)

    def contribute(self, gradient: torch.Tensor, samples: int) -> Generator[Any, None, None]:
        rounds = self._rounds
        rounds.send().copy_(gradient)
        rounds.arrive(clip=self._partial.carry_clip, samples=samples)
        yield from self.wait(lambda: rounds.wait(0.0))
        self._apply(rounds.results())

    def admit(self, rank: WorkerId, ticket: list[int]) -> None:
        self._rounds.admit(rank, self.version, ticket[0])

    def _apply(self, results: list[tuple[Version, torch.Tensor]]) -> None:
        for _, result in results if self._partial.delivery == "replay" else results[-1:]:
            self.parameters = self.parameters - LR * result
        if results:
            self.version = results[-1][0] + 1
            self._rounds.read()
