"""Phases add up: every nanosecond between two accounts is in exactly one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offbeat.core.phases import UNMEASURED, Phase, PhaseClock, Spent, slowest, with_device

PHASES = st.sampled_from(Phase)


@given(st.lists(st.tuples(PHASES, st.integers(0, 10**9), st.integers(0, 10**9)), max_size=40))
def test_an_account_is_the_whole_time(turns: list[tuple[Phase, int, int]]) -> None:
    wall = used = 0
    clock = PhaseClock(lambda: wall, lambda: used)
    expected = dict.fromkeys(Phase, 0)
    for phase, passed, worked in turns:
        wall, used = wall + passed, used + worked
        expected[clock.at] += passed
        clock.turn(phase)
    spent = clock.take()
    assert spent is not None
    assert abs(sum(spent.phases.values()) - wall * 1e-9) < 1e-6 * (len(spent.phases) + 1)
    for phase in Phase:
        assert abs(spent.phases.get(phase.label, 0.0) - expected[phase] * 1e-9) < 2e-6, phase
    assert "wait" not in spent.processor, "a worker that waits does no work of its own"


def test_of_several_processes_the_busiest_is_the_slowest() -> None:
    waits_in_backward = Spent({"forward": 0.1, "backward": 0.5, "push": 0.01}, {"forward": 0.1, "backward": 0.1, "push": 0.01})
    computes = Spent({"forward": 0.5, "backward": 0.1, "push": 0.01}, {"forward": 0.5, "backward": 0.1, "push": 0.01})
    loads = Spent({"data": 0.55, "forward": 0.01, "backward": 0.05}, {"data": 0.02, "forward": 0.01, "backward": 0.05})
    waits = Spent({"data": 0.02, "forward": 0.01, "backward": 0.05, "wait": 0.53}, {"data": 0.02, "forward": 0.01, "backward": 0.05})
    assert slowest([waits_in_backward, computes]) == 1
    assert slowest([waits, waits, loads, waits_in_backward]) == 2
    assert slowest([computes, None]) == 0


def test_the_next_account_begins_where_the_last_has_ended() -> None:
    now = 0
    clock = PhaseClock(lambda: now)
    now = 3_000_000
    clock.turn(Phase.BACKWARD)
    now = 5_000_000
    first = clock.take()
    now = 9_000_000
    second = clock.take()
    assert first is not None and first.phases == {"backward": 0.002, "own": 0.003}
    assert second is not None and second.phases == {"backward": 0.004}


def test_after_a_push_and_its_wait_comes_the_pull_and_other_waits_are_only_breaks() -> None:
    clock = PhaseClock(lambda: 0)
    clock.turn(Phase.PUSH)
    for before, after in ((Phase.PUSH, Phase.PULL), (Phase.DATA, Phase.DATA)):
        clock.turn(before)
        clock.waited(clock.wait())
        assert clock.at is after


def test_an_exception_ends_a_phase() -> None:
    clock = PhaseClock(lambda: 0)
    try:
        with clock.within(Phase.SAVE):
            raise ValueError
    except ValueError:
        pass
    assert clock.at is Phase.OWN


@given(
    st.lists(st.floats(0, 100), min_size=len(Phase), max_size=len(Phase)),
    st.dictionaries(st.sampled_from([Phase.FORWARD, Phase.BACKWARD]), st.floats(0, 100)),
)
def test_what_a_device_computes_comes_out_of_push_and_own_code(host: list[float], device: dict[Phase, float]) -> None:
    seconds = with_device(host, device)
    assert abs(sum(seconds) - sum(host)) < 1e-9 * (1 + sum(host))
    assert min(seconds) >= 0.0
    for phase in Phase:
        if phase not in (Phase.PUSH, Phase.OWN):
            assert host[phase] <= seconds[phase] <= max(host[phase], device.get(phase, 0.0)) + 1e-9
        else:
            assert seconds[phase] <= host[phase]


def test_a_clock_that_measures_nothing_says_so() -> None:
    with UNMEASURED.within(Phase.DATA):
        assert UNMEASURED.at is Phase.OWN
    assert UNMEASURED.take() is None
