"""The injector on a machine of make-believe: what is stopped goes on, what is down comes up, and each fault is proved or said not to be."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tests.chaos.fake import FakeClock, FakeMachine
from tests.tiers import examples

from offbeat.chaos.injector import PROOF_S, Injector
from offbeat.chaos.schedule import KINDS, Fault, chances, schedule


def fault(kind: str, at_s: float, pick: float = 0.0, seconds: float = 1.0, target: str = "worker") -> Fault:
    return Fault(0, at_s, kind, target, pick, seconds, 0.6)


def played(
    machine: FakeMachine, faults: Iterable[Fault], until_s: float = 80.0, *, revive: bool = False, insists: bool = False
) -> list[Fault]:
    """Run a schedule for so long, in make-believe time, and return what was done."""
    clock = FakeClock(0.0)
    injector = Injector(machine.find, faults, insists=insists)
    while clock.now() < until_s:
        injector.tick(clock.now())
        if revive:
            machine.revive()
        clock.wait(injector.wake_at(clock.now()) - clock.now())
    injector.release(clock.now())
    return injector.faults


def test_a_kill_a_stop_and_a_cut() -> None:
    machine = FakeMachine(2)
    faults = [fault("kill", 1.0), fault("stop", 2.0, pick=0.5, seconds=3.0), fault("cut", 2.5, target="link", seconds=2.0)]
    done = played(machine, faults)
    assert machine.log == [("worker 0", "kill"), ("worker 1", "stop"), ("a link", "cut"), ("a link", "up"), ("worker 1", "up")]
    assert [(entry.victim, entry.done, entry.proved) for entry in done] == [
        ("worker 0", True, True),
        ("worker 1", True, True),
        ("a link", True, True),
    ]
    assert [entry.until_s and round(entry.until_s, 2) for entry in done] == [None, 5.0, 4.5]


def test_a_slow_process_is_stopped_and_running_in_turn_for_its_part_of_the_time() -> None:
    machine = FakeMachine(1)
    (entry,) = played(machine, [fault("slow", 1.0, seconds=2.0)])
    names = [name for _, name in machine.log]
    assert names[:-1:2] == ["slow"] * len(names[:-1:2]) and 7 <= names.count("slow") <= 9
    assert machine.victims[0].now == "up" and entry.proved


def test_a_stopped_process_is_hit_by_nothing_else() -> None:
    machine = FakeMachine(1)
    first, second, third = played(machine, [fault("stop", 1.0, seconds=3.0), fault("kill", 2.0), fault("kill", 5.0)])
    assert (first.done, second.done, third.done) == (True, False, True)
    assert second.note == "no worker to hit"


def test_a_process_that_dies_of_a_kill_is_hit_by_nothing_else() -> None:
    machine = FakeMachine(1)
    machine.victims[0].deaf = True  # it takes its time to die
    kill, stop = played(machine, [fault("kill", 1.0), fault("stop", 1.01)])
    assert (kill.done, stop.done, stop.note) == (True, False, "no worker to hit")


def test_a_fault_of_a_plan_is_tried_again_until_it_hits_somebody_or_the_job_is_over() -> None:
    machine = FakeMachine(1)
    done = played(machine, [fault("stop", 1.0, seconds=3.0), fault("kill", 2.0), fault("kill", 50.0)], insists=True)
    assert [(entry.done, entry.note) for entry in done] == [(True, ""), (True, ""), (False, "no worker to hit")]
    assert 4.0 <= (done[1].injected_at_s or 0.0) <= 4.5, "once it is running again"


def test_a_signal_without_effect_is_not_called_a_fault_that_happened() -> None:
    machine = FakeMachine(1)
    machine.victims[0].deaf = True
    (entry,) = played(machine, [fault("kill", 1.0)])
    assert (entry.done, entry.proved) == (True, False)
    assert entry.note == f"not seen within {PROOF_S:.1f} s"


def test_the_last_worker_is_not_told_to_leave() -> None:
    machine = FakeMachine(2)
    for victim in machine.victims.values():
        victim.deaf = True  # it takes its time to leave
    first, again, last = played(machine, [fault("term", 1.0), fault("term", 2.0), fault("term", 3.0, pick=0.5)])
    assert (first.done, again.done, last.done) == (True, True, False)
    assert machine.log == [("worker 0", "term")] * 2 and last.note == "not done: no other worker would be left"


@examples(300)
@given(st.integers(0, 2**32), st.integers(1, 5), st.floats(0.1, 3.0), st.floats(1.0, 40.0), st.booleans())
def test_whatever_is_drawn_nothing_stays_stopped_or_down(seed: int, workers: int, mtbf_s: float, until_s: float, revive: bool) -> None:
    machine = FakeMachine(workers)
    of = chances(KINDS, ["worker"])
    done = played(machine, schedule(seed, mtbf_s=mtbf_s, timeout_s=2.0, of=of, count=40), until_s, revive=revive)
    assert all(victim.now in ("up", "gone") for victim in [*machine.victims.values(), machine.link])
    assert all(entry.proved is not False for entry in done if entry.done)
    assert all(entry.until_s is not None for entry in done if entry.done and entry.kind not in ("kill", "term"))
    for name in {name for name, _ in machine.log}:
        done_to = [what for who, what in machine.log if who == name]
        for before, after in pairwise(done_to):
            assert before in ("kill", "term", "up") or after == "up", "what was stopped was hit by another fault"


def test_a_proof_that_the_end_of_the_job_overtakes_is_looked_for_once_more() -> None:
    machine = FakeMachine(2)
    for victim in machine.victims.values():
        victim.deaf = True
    injector = Injector(machine.find, [fault("kill", 0.0), fault("kill", 0.0, pick=0.5)])
    injector.tick(0.0)
    machine.victims[0].now = "gone"
    injector.release(0.01)
    assert [entry.proved for entry in injector.faults] == [True, None]
