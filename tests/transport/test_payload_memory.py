"""Where the bytes of a payload are: lent by the sender until they have left; received where their owner says, or into used memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from tests.contract.test_transport import MB, Pair, World

from offbeat.transport.base import Connection, Message
from offbeat.transport.buffers import KEPT_FROM_NBYTES, KEPT_NBYTES, Buffers

MANY = 32 * MB
"""More than the kernel takes at once."""


@pytest.fixture
def pair() -> Iterator[Pair]:
    world = World("tcp")
    yield Pair(world)
    for hub in world.hubs:
        hub.close()


def next_of(pair: Pair) -> Message:
    [(_, message)] = pair.world.pump_one(pair.server)
    assert isinstance(message, Message)
    return message


def place_at(connection: Connection, memory: memoryview | None) -> list[tuple[Mapping[str, Any], int]]:
    asked: list[tuple[Mapping[str, Any], int]] = []

    def place(header: Mapping[str, Any], nbytes: int) -> memoryview | None:
        asked.append((dict(header), nbytes))
        return memory

    connection.place_with(place)
    return asked


def test_what_is_lent_is_not_copied_before_its_owner_asks(pair: Pair) -> None:
    buffer = bytearray(b"a" * MANY)
    pair.up.send({"n": 1}, payload=[buffer], lent=True)
    buffer[-1:] = b"b"  # not yet with the kernel: the peer sees the change
    assert bytes(next_of(pair).payload[-2:]) == b"ab"
    pair.up.send({"n": 2}, payload=[buffer], lent=True)
    pair.up.copy_unsent()
    buffer[:] = b"c" * MANY
    assert bytes(next_of(pair).payload[-2:]) == b"ab"


def test_a_payload_is_received_at_its_place(pair: Pair) -> None:
    memory = bytearray(MB)
    asked = place_at(pair.down, memoryview(memory))
    pair.up.send({"n": 1}, payload=[b"a" * MB])
    message = next_of(pair)
    assert asked == [({"n": 1}, MB)]
    assert message.payload.obj is memory and memory == b"a" * MB


def test_a_payload_without_a_place_has_other_memory(pair: Pair) -> None:
    place_at(pair.down, None)
    pair.up.send({"n": 1}, payload=[b"a" * MB])
    assert next_of(pair).payload == b"a" * MB


def test_a_payload_under_way_leaves_its_place_at_once(pair: Pair) -> None:
    memory = bytearray(MANY)
    place_at(pair.down, memoryview(memory))
    pair.up.send({"n": 1}, payload=[b"a" * MANY])
    assert not pair.world.pump(lambda arrived: memory[0] != 0)[pair.server], "all of it came at once"
    pair.down.divert()
    memory[:] = bytes(MANY)
    message = next_of(pair)
    assert len(message.payload) == MANY and message.payload[-1] == ord("a")
    assert not any(memory)


def test_to_divert_does_nothing_where_nothing_is_under_way(pair: Pair) -> None:
    pair.down.divert()
    memory = bytearray(MB)
    place_at(pair.down, memoryview(memory))
    for number in range(2):
        pair.up.send({"n": number}, payload=[b"a" * MB])
        assert next_of(pair).payload.obj is memory
        pair.down.divert()


def test_memory_of_a_payload_is_used_again(pair: Pair) -> None:
    pair.up.send({"n": 1}, payload=[b"a" * MB])
    first = next_of(pair).payload
    where = first.obj
    pair.down.recycle(first)
    pair.up.send({"n": 2}, payload=[b"b" * MB])
    second = next_of(pair).payload
    assert second.obj is where and second == b"b" * MB


def test_little_memory_is_not_kept_and_never_too_much() -> None:
    buffers = Buffers()
    small = buffers.take(KEPT_FROM_NBYTES - 1)
    buffers.give(small)
    assert buffers.take(KEPT_FROM_NBYTES - 1).obj is not small.obj
    large = [buffers.take(KEPT_NBYTES // 2) for _ in range(3)]
    for memory in large:
        buffers.give(memory)
    again = [buffers.take(KEPT_NBYTES // 2).obj for _ in range(3)]
    assert sum(any(memory.obj is kept for kept in again) for memory in large) == 2
