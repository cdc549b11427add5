"""The fleet, driven by hand and by events in any order: who leads, who stands by, who returns, and why a job fails."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import examples

from offbeat.core import fleet as does
from offbeat.core.fleet import CLAIM_S, LEADS, LOADING_S, LOOK_S, SILENT_S, STANDBYS, STANDS_BY, TOGETHER_S, Fleet, State
from offbeat.errors import ProtocolError

KNOBS = ("--max-restarts", "--replicas", "--checkpoint", "--resume")
KILLED = "killed by SIGKILL"


class World:
    """A fleet, its processes, and the promises that it keeps: each action is checked against what has happened before it."""

    def __init__(self, servers: int = 1, *, replicas: int = 1, max_restarts: int = 3, **more: Any) -> None:
        self.servers, self.replicas, self.max_restarts = servers, replicas, max_restarts
        self.fleet = Fleet(servers, replicas=replicas, max_restarts=max_restarts, timeout_s=1.0, **{"returns": True, **more})
        self.now = 0.0
        self.lack: tuple[str | None] | None = None
        """What keeps processes from being started; None: nothing does."""
        self.of: dict[int, int] = {}
        """The server of each process that was started."""
        self.sends: defaultdict[int, set[int]] = defaultdict(set)
        """By server: processes that may send as its leader."""
        self.follow: defaultdict[int, set[int]] = defaultdict(set)
        """By server: standbys that were not given up."""
        self.gone: set[int] = set()
        self.fenced: set[int] = set()
        self.terms: defaultdict[int, int] = defaultdict(lambda: 1)
        self.claims: dict[int, does.Claim] = {}
        self.granted: set[tuple[int, int]] = set()
        self.again: defaultdict[int, int] = defaultdict(int)
        self.over = False
        self.seen: list[does.Action] = []
        self.fleet.begin()
        self.do()

    def do(self) -> None:
        """Carry out what the fleet has decided."""
        while actions := self.fleet.take():
            for action in actions:
                self.seen.append(action)
                assert not self.over or isinstance(action, does.Kill), "nothing happens after the end"
                self.check(action)

    def check(self, action: does.Action) -> None:
        match action:
            case does.Start(number, process, role):
                assert process not in self.of, "each process has its own number"
                if role == "again":
                    assert not self.sends[number], "the former leader has ended"
                    assert self.again[number] < self.max_restarts and not self.replicas
                if self.lack is not None and role != "leader":
                    self.fleet.not_started(action, self.lack[0], self.now)
                    return
                self.of[process] = number
                self.again[number] += role == "again"
                if role == "standby":
                    assert not self.follow[number], "one standby at a time"
                    self.follow[number].add(process)
                self.fleet.started(action, f"pid {process}", self.now)
            case does.SendJob(number, process, _):
                self.sends[number].add(process)
            case does.Alone(process):
                assert not self.follow[self.of[process]], "its standby was given up before"
            case does.Claim(number, term, _):
                assert term > self.terms[number] or self.claims.get(number) == action
                self.claims[number] = action
            case does.Fence(process, _):
                assert process not in self.fenced, "each process has one end"
                self.fenced.add(process)
                self.sends[self.of[process]].discard(process)
                self.follow[self.of[process]].discard(process)
            case does.Lead(number, process, term):
                assert not self.sends[number], "the former leader was given up before"
                assert process in self.follow[number] and term > self.terms[number]
                assert self.fleet._store is None or (number, term) in self.granted
                self.terms[number] = term
                self.follow[number].discard(process)
                self.sends[number].add(process)
            case does.Fail(reason):
                self.over = True
                if not reason.startswith("this job has begun again elsewhere"):
                    assert reason.startswith("server ") and any(knob in reason for knob in KNOBS), reason
            case _:
                pass
        for number in range(self.servers):
            assert len(self.sends[number]) <= 1, "one process leads"

    def texts(self) -> list[str]:
        """What users were told so far."""
        return [action[0] for action in self.seen if isinstance(action, does.Note | does.Fail)]

    # Events.

    def returning(self) -> bool:
        return self.fleet.returning

    def leader(self, number: int = 0) -> int:
        return self.fleet.servers[number].leader

    def standby(self, number: int = 0) -> int:
        found = self.fleet.servers[number].standby
        assert found is not None
        return found

    def here(self, number: int) -> Iterator[int]:
        yield from (process for process in (self.fleet.servers[number].leader, self.fleet.servers[number].standby) if process is not None)

    def listen(self, number: int = 0) -> None:
        for process in self.here(number):
            if self.fleet.processes[process].state is State.STARTING:
                self.fleet.heard(process, self.now)
                self.fleet.listens(process, f"at {process}", f"pid {process}", shares_memory=True)
                self.do()

    def end(self, process: int, how: str = KILLED) -> None:
        self.gone.add(process)
        self.sends[self.of[process]].discard(process)
        self.fleet.ended(process, how, self.now)
        self.do()

    def follows(self, number: int = 0) -> None:
        process = self.fleet.servers[number].standby
        if process is not None and self.fleet.processes[self.leader(number)].state in (State.LEADING, State.RETURNING):
            self.fleet.followed(self.leader(number), f"at {process}")
            self.do()

    def resume(self, number: int = 0) -> None:
        if self.fleet.processes[self.leader(number)].state in (State.LEADING, State.RETURNING):
            self.fleet.resumed(self.leader(number))
            self.do()

    def begun(self) -> World:
        """Let all of it begin."""
        for number in range(self.servers):
            self.listen(number)
        self.fleet.begin_job()
        self.do()
        for number in range(self.servers):
            self.follows(number)
        return self

    def wait(self, seconds: float, *silent: int) -> None:
        """Let time pass, in which all but some processes report."""
        self.now += seconds
        for process in (process for number in range(self.servers) for process in self.here(number) if process not in silent):
            self.fleet.heard(process, self.now)
        self.fleet.tick(self.now)
        self.do()

    def answer(self, number: int, where: str | None) -> None:
        """Let the store answer; ``where``: who leads, None: it fails."""
        claim = self.claims[number]
        if where == claim.where:
            self.granted.add((number, claim.term))
        self.fleet.answered(number, claim.term, where, "no route" if where is None else None, self.now)
        self.do()


@pytest.mark.parametrize("stands_by", [False, True])
@pytest.mark.parametrize("state", State)
def test_a_process_moves_as_its_table_says_and_in_no_other_way(stands_by: bool, state: State) -> None:
    table = STANDS_BY if stands_by else LEADS
    for happening in sorted({what for of in (LEADS, STANDS_BY) for moves in of.values() for what in moves}):
        world = World()
        process = world.standby() if stands_by else world.leader()
        world.fleet.processes[process].state = state
        if (to := table.get(state, {}).get(happening)) is not None:
            world.fleet._move(process, happening)
            assert world.fleet.processes[process].state is to
        else:
            with pytest.raises(ProtocolError, match=f"server 0 {happening} while it is {state.value} .expected one of: "):
                world.fleet._move(process, happening)


def test_a_standby_leads_after_the_former_leader_was_given_up_and_gets_a_standby() -> None:
    world = World(2).begun()
    old, new = world.leader(), world.standby()
    world.seen.clear()
    world.wait(3.0, old)
    kinds = [type(action).__name__ for action in world.seen]
    assert kinds == ["Fence", "Record", "Note", "Lead", "Record", "Start", "Record"]
    why = "server 0 has not reported for 3 s: its process is stopped or hangs, and the coordinator with it"
    assert world.texts() == [f"{why}: its standby leads from now on (term 2)"]
    assert world.leader() == new and world.returning()
    world.resume()
    assert not world.returning()
    world.listen()
    world.follows()
    assert world.fleet.all_follow() and world.texts()[1:] == [f"server 0 has a new standby (pid {world.standby()})"]
    world.end(old)
    assert world.leader() == new, "its end is of no interest any more"


def test_a_leader_without_a_standby_is_waited_for_longer_and_fails_with_its_reason() -> None:
    world = World(checkpoints="saves")
    world.begun()
    world.end(world.standby())
    world.wait(4.0, world.leader())
    assert world.fleet.failure is None
    world.end(world.leader())
    gone = f"server 0 {KILLED}, and what it held is gone with it (its standby could not lead yet)"
    assert world.fleet.failure == f"{gone}; offbeat run --resume saves goes on from the newest checkpoint"


def test_a_server_gets_no_more_standbys_than_three_that_cannot_follow() -> None:
    world = World().begun()
    for _ in range(STANDBYS):
        world.end(world.standby())
        world.listen()
    world.end(world.standby())  # the first of the four could lead
    assert world.fleet.servers[0].standby is None and world.texts()[-1].endswith("from now on, since 3 in a row could not follow it")


def test_a_frozen_server_that_can_return_is_killed_and_returns_once_its_end_is_seen() -> None:
    world = World(replicas=0).begun()
    frozen = world.leader()
    world.wait(9.0, frozen)
    assert not world.texts()
    world.wait(3.0, frozen)
    assert world.texts()[-1].endswith(": it is killed") and world.seen[-1] == does.Kill(frozen)
    world.end(frozen)
    assert world.leader() != frozen


def test_a_server_that_cannot_be_started_is_tried_again_for_some_time() -> None:
    world = World(replicas=0).begun()
    world.lack = ("no memory",)
    world.end(world.leader())
    while world.fleet.failure is None:
        world.wait(0.5)
    assert 60.0 <= world.now < 95.0 and world.fleet.failure.endswith(
        "(it could not be started again: no memory); there is no --checkpoint to go on from"
    )
    assert sum("is tried again" in text for text in world.texts()) == 1


@pytest.mark.parametrize(
    ("options", "mortal", "why"),
    [
        ({"max_restarts": 0}, None, "(--max-restarts is 0)"),
        ({"returns": False}, None, "see --replicas)"),
        ({}, "workers may be on other machines", "(workers may be on other machines); there is no --checkpoint to go on from"),
    ],
)
def test_a_server_that_cannot_return_ends_the_job_with_the_reason(options: dict[str, Any], mortal: str | None, why: str) -> None:
    world = World(replicas=0, **options).begun()
    if mortal is not None:
        world.fleet.mortal(world.leader(), mortal, lack=True)
        world.do()
        assert f"server 0 would not outlive its process: {mortal}" in world.texts(), "the user may mend what is lacking"
    world.end(world.leader())
    assert world.fleet.failure is not None and world.fleet.failure.endswith(why)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_server_is_away_from_when_its_process_was_last_known_to_serve(frozen: bool) -> None:
    world = World(replicas=0, max_restarts=1).begun()
    leader, silent_s = world.leader(), 2.0 * SILENT_S
    world.fleet.heard(leader, 3.0)
    if frozen:
        world.fleet.tick(3.0 + silent_s)
    world.now = 4.0 + silent_s
    world.end(leader)
    world.listen()
    assert world.seen[-1] == does.SendJob(0, world.leader(), 3.0 if frozen else 4.0 + silent_s)


def test_a_process_that_is_told_to_leave_is_done_without_if_the_notice_is_its_own() -> None:
    world = World().begun()
    told = world.leader()
    world.fleet.told(told, "SIGTERM", 0.0)
    for now in (TOGETHER_S / 2, TOGETHER_S):
        assert world.leader() == told
        world.fleet.heed(now)
        world.do()
    assert world.leader() != told and "server 0 was told to leave by SIGTERM: its standby leads from now on (term 2)" in world.texts()
    world.fleet.told(world.leader(), "SIGTERM", 1.0)
    world.fleet.heed(2.0)
    world.do()
    assert world.seen[-1] == does.Leave(), "its standby could not lead yet"


def test_a_takeover_waits_for_the_store_but_not_for_ever() -> None:
    for answers in (True, False):
        world = World(store="the store").begun()
        world.wait(3.0, world.leader())
        world.end(world.leader())  # which changes nothing any more
        world.answer(0, None)
        assert world.fleet.ready(0) and not any(isinstance(action, does.Lead) for action in world.seen)
        if answers:
            world.answer(0, world.claims[0].where)
            assert any(isinstance(action, does.Lead) for action in world.seen)
            continue
        world.now += CLAIM_S
        world.answer(0, None)
        assert "its standby cannot lead: the store has not answered for 10 s (no route)" in str(world.fleet.failure)


def test_a_store_that_hangs_or_says_otherwise_or_a_standby_that_is_gone_ends_the_job() -> None:
    cases: list[tuple[Callable[[World], None], str]] = [
        (lambda world: world.wait(CLAIM_S), "the store has not answered for 10 s (no answer yet)"),
        (lambda world: world.answer(0, "node4"), "the store says that the process at node4 leads"),
        (lambda world: world.end(world.standby()), "it is gone as well"),
        (lambda world: world.fleet.cut_off(world.standby()), "it is gone as well"),
    ]
    for event, why in cases:
        world = World(store="the store").begun()
        world.end(world.leader())
        event(world)
        assert f"server 0 {KILLED}, and its standby cannot lead: {why}" in str(world.fleet.failure)


def test_a_store_that_is_away_is_said_once_and_a_later_supervisor_ends_the_job() -> None:
    world = World(store="the store").begun()
    for _ in range(3):
        world.wait(LOOK_S)
        world.wait(LOOK_S)
        assert world.seen.pop() == does.Look(), "one at a time"
        world.fleet.looked(None, "no route")
        world.do()
    assert world.texts() == ["the store does not answer (no route): until it does, no standby can take over"]
    world.fleet.looked("process 7 of node2")
    assert world.fleet.failure == "this job has begun again elsewhere, under process 7 of node2: this one ends"


FATAL = ("mortal", "nobody", "other", "superseded", "finish", "all silent")
EVENTS = (
    *("listen", "follows", "resume", "end leader", "end standby", "silent leader", "silent standby", "told leader", "told standby"),
    *("heed", "tick", "cut from leader", "cut off", "late", "lack", "enough", "granted", "away", "looked", "begin job"),
)


def happens(world: World, event: str, number: int) -> None:
    """Let this happen to a server of the job, if it can."""
    fleet, leader, standby = world.fleet, world.leader(number), world.fleet.servers[number].standby
    match event:
        case "listen" | "follows" | "resume":
            getattr(world, event)(number)
        case "end leader" if leader not in world.gone:
            world.end(leader)
        case "end standby" if standby is not None:
            world.end(standby)
        case "silent leader":
            world.wait(15.0, leader)
            if world.seen[-1] == does.Kill(leader):
                world.end(leader)
        case "silent standby" if standby is not None:
            world.wait(3.0, standby)
        case "all silent":
            world.wait(LOADING_S, *(process for of in range(world.servers) for process in world.here(of)))
        case "told leader":
            fleet.told(leader, "SIGTERM", world.now)
        case "told standby" if standby is not None:
            fleet.told(standby, "SIGTERM", world.now)
        case "heed":
            world.now += TOGETHER_S
            fleet.heed(world.now)
        case "tick":
            world.wait(1.0)
        case "cut from leader" if standby is not None:
            fleet.cut_from_leader(leader, f"at {standby}", "a closed connection")
        case "cut off" if standby is not None:
            fleet.cut_off(standby)
        case "late":
            for process in sorted(world.fenced):
                fleet.ended(process, KILLED, world.now)
        case "mortal":
            fleet.mortal(leader, "workers may be on other machines")
        case "lack" | "nobody" | "enough":
            lacks: dict[str, tuple[str | None] | None] = {"lack": ("no memory",), "nobody": (None,), "enough": None}
            world.lack = lacks[event]
        case "granted" | "other" | "away" if number in world.claims:
            world.answer(number, {"granted": world.claims[number].where, "other": "node4", "away": None}[event])
        case "looked" | "superseded":
            fleet.looked(None if event == "looked" else "process 7 of node2")
        case "begin job" if fleet.all_listen() and not fleet._begun:
            fleet.begin_job()
        case "finish":
            fleet.finish()
            world.over = True
    world.do()


@examples(2000, quick=100)
@given(
    servers=st.integers(1, 3),
    replicas=st.sampled_from((0, 1, 1)),
    max_restarts=st.integers(0, 3),
    store=st.sampled_from((None, "the store")),
    begun=st.booleans(),
    calm=st.booleans(),
    events=st.lists(st.tuples(st.sampled_from((*EVENTS * 4, *["end leader"] * 4, *FATAL)), st.integers(0, 2)), min_size=15, max_size=60),
)
def test_whatever_happens_in_whichever_order_the_promises_hold(
    servers: int, replicas: int, max_restarts: int, store: str | None, begun: bool, calm: bool, events: list[tuple[str, int]]
) -> None:
    """`World.check` says which. ``calm``: after each event new processes go on as they should."""
    world = World(servers, replicas=replicas, max_restarts=max_restarts, store=store if replicas else None)
    if begun:
        world.begun()
    for event, number in events:
        for what in (event, "listen", "resume", "follows") if calm else (event,):
            happens(world, what, number % servers)
        if world.fleet.failure is not None:
            assert world.over, "the failure was told"
