"""Messages over shared links: when each arrives, beside a simulation in small steps, in order, with all its bytes, and cut off."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.sim.event_queue import EventQueue
from offbeat.sim.network import Network
from offbeat.sim.sharing import fair_rates

HOSTS = 4
STEP = 1 / 1024


@dataclass
class Sent:
    """A message of a test."""

    at: float
    source: int
    target: int
    nbytes: float
    left: float = 0.0
    arrived: float | None = None
    behind: Sent | None = field(default=None, repr=False)


MESSAGES = st.lists(
    st.builds(
        Sent,
        at=st.integers(0, 64).map(lambda n: n / 8),
        source=st.integers(0, HOSTS - 1),
        target=st.integers(0, HOSTS - 1),
        nbytes=st.integers(1, 64).map(float),
    ).filter(lambda one: one.source != one.target),
    min_size=1,
    max_size=8,
)


def by_small_steps(messages: list[Sent], bytes_per_s: float) -> list[float]:
    """The time at which each message has arrived, within a step for each change of rates."""
    for one in messages:
        one.left, one.arrived = one.nbytes, None
    ordered = sorted(messages, key=lambda one: one.at)
    for number, one in enumerate(ordered):
        one.behind = next((b for b in reversed(ordered[:number]) if (b.source, b.target) == (one.source, one.target)), None)
    now = 0.0
    ended: dict[int, float] = {}
    while len(ended) < len(messages):
        going = [one for one in ordered if id(one) not in ended and one.at <= now and (one.behind is None or id(one.behind) in ended)]
        rates = fair_rates([(2 * one.source, 2 * one.target + 1) for one in going], [bytes_per_s] * (2 * HOSTS))
        now += STEP
        for one, rate in zip(going, rates, strict=True):
            one.left -= rate * STEP
            if one.left <= 0.0:
                ended[id(one)] = now
    return [ended[id(one)] for one in messages]


def carried(messages: list[Sent], bytes_per_s: float) -> None:
    """Send them through a network, which says when they arrive."""
    queue = EventQueue()
    network = Network(queue, 8.0 * bytes_per_s, HOSTS)

    def arrive(one: Sent, serial: int) -> None:
        assert one.arrived is None
        one.arrived = queue.now

    def begin(one: Sent, serial: int) -> None:
        network.send((one.source, one.target), one.source, one.target, one.nbytes, partial(arrive, one))

    for one in sorted(messages, key=lambda one: one.at):
        queue.at(one.at, partial(begin, one))
    while queue.step(until=1e9):
        pass


@pytest.mark.few(8)
@given(MESSAGES)
def test_messages_arrive_when_small_steps_say(messages: list[Sent]) -> None:
    carried(messages, 16.0)
    assert [one.arrived for one in messages] == pytest.approx(by_small_steps(messages, 16.0), abs=STEP * (2 * len(messages) + 2))


@given(MESSAGES, st.sampled_from([1.0, 3.7, 1e9]))
def test_no_link_carries_more_than_it_can(messages: list[Sent], bytes_per_s: float) -> None:
    """All arrive, those of a connection in order, and the bytes of each host's messages took at least the time of its link."""
    carried(messages, bytes_per_s)
    for one in messages:
        assert one.arrived is not None and one.arrived - one.at >= one.nbytes / bytes_per_s * (1 - 1e-6)
        before = [other for other in messages if (other.source, other.target, other.at) == (one.source, one.target, one.at)]
        assert [other.arrived for other in before] == sorted(other.arrived or 0.0 for other in before)
    for host in range(HOSTS):
        for through in ([one for one in messages if one.source == host], [one for one in messages if one.target == host]):
            for begin in {one.at for one in through}:
                later = [one for one in through if one.at >= begin]
                last = max(one.arrived or 0.0 for one in later)
                assert sum(one.nbytes for one in later) <= (last - begin) * bytes_per_s * (1 + 1e-6)


def test_a_message_within_a_host_takes_no_time_and_one_behind_another_waits() -> None:
    queue, arrived = EventQueue(), list[tuple[str, float]]()
    network = Network(queue, bits_per_s=8.0, hosts=2)
    for name, connection, target, nbytes in (("first", 1, 1, 2.0), ("second", 1, 1, 1.0), ("beside", 2, 1, 1.5), ("within", 3, 0, 9.0)):
        network.send(connection, 0, target, nbytes, lambda _, name=name: arrived.append((name, queue.now)))  # type: ignore[misc]
    while queue.step(until=100.0):
        pass
    assert arrived == [("within", 0.0), ("beside", 3.0), ("first", 3.5), ("second", 4.5)]


def test_the_link_of_a_connection_that_is_cut_is_free() -> None:
    queue, arrived = EventQueue(), list[float]()
    network = Network(queue, bits_per_s=8.0, hosts=3)
    network.send("lost", 1, 0, 100.0, lambda _: arrived.append(-1.0))
    network.send("kept", 2, 0, 3.0, lambda _: arrived.append(queue.now))
    queue.at(2.0, lambda _: network.cut(lambda name: name == "lost"))
    while queue.step(until=1000.0):
        pass
    assert arrived == [pytest.approx(4.0)]


def test_a_late_hour_does_not_stop_a_short_message() -> None:
    """A rate times the smallest step of a clock at this hour is more than what rounding may leave over."""
    queue, arrived = EventQueue(), list[float]()
    network = Network(queue, bits_per_s=1e12, hosts=2)
    queue.at(1e9, lambda _: network.send(0, 0, 1, 1.0, lambda _: arrived.append(queue.now)))
    for _ in range(20):
        queue.step(until=2e9)
    assert arrived == [pytest.approx(1e9)] and not len(queue)
