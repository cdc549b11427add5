"""Objects that are turned into a table of plain data and back are as they were, and a table names nothing that is not offbeat's own."""

from __future__ import annotations

import contextlib
import random
from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import examples

from offbeat.core.events import Initialised, Joined, Pushed
from offbeat.core.job.coordinator import Coordinator
from offbeat.errors import ProtocolError
from offbeat.journal.worker_summary import WorkerTally
from offbeat.policies import rule
from offbeat.runtime.recovery.plain_graph import dumps, loads
from offbeat.transport.link import Link
from offbeat.types import WorkerState


def again(value: Any, **parts: Any) -> Any:
    table, blocks = dumps(value, parts)
    return loads(table, [memoryview(bytearray(block)) for block in blocks], parts)


def test_what_refers_to_one_thing_refers_to_one_thing_again() -> None:
    memory = memoryview(bytearray(range(64)))
    link = Link("s", "worker 1", shares_memory=False)
    link.bind("push", memory[8:24])
    whole: list[Any] = [memory[16:32], memory[20:20], memory[40:48].toreadonly(), link, {link: "it"}]
    whole.append(whole)
    one, none, other, made, keyed, itself = found = again(whole)
    assert itself is found and keyed[made] == "it"
    assert bytes(one) == bytes(range(16, 32)) and not len(none) and bytes(other) == bytes(range(40, 48)) and other.readonly
    region, _ = made._regions["push"]
    region[8:] = bytes(8)
    assert bytes(one[:8]) == bytes(8), "both are views of one block"


VALUES: list[Any] = [
    None,
    -(1 << 70),
    float("inf"),
    b"bytes",
    (1, ("two", [3])),
    {1: "one", "two": 2, (3, WorkerState.ALIVE): frozenset({4})},
    {5, 6},
    deque([1, 2, 3], maxlen=3),
    OrderedDict(a=1, b=2),
    Counter("hello"),
    defaultdict(partial(defaultdict, list), {1: defaultdict(list, {2: [3]})}),
    WorkerState.DEAD,
    np.float32(0.5),
    WorkerTally,
]


@pytest.mark.parametrize("value", VALUES, ids=[str(type(value).__name__) for value in VALUES])
def test_values_are_as_they_were(value: Any) -> None:
    found = again(value)
    assert type(found) is type(value) and found == value and repr(found) == repr(value)


def test_numbers_of_arrays_and_generators_are_as_they_were() -> None:
    array, tensor, chance = np.arange(6.0).reshape(2, 3), torch.arange(6).reshape(3, 2), random.Random(3)
    one, two, three = again([array, tensor, chance])
    np.testing.assert_array_equal(one, array)
    torch.testing.assert_close(two, tensor)
    assert three.random() == chance.random()


NO_DATA: list[Any] = [lambda: 0, Path("a"), open, random.random, memoryview(np.zeros(2)), frozenset({Link("s", "p")}), object(), Link]


@pytest.mark.parametrize("value", NO_DATA, ids=[str(type(value).__name__) for value in NO_DATA])
def test_what_is_no_data_is_not_sent(value: Any) -> None:
    with pytest.raises(TypeError):
        dumps([value], {})


ROWS: list[list[Any]] = [
    ["named", "os", "system"],
    ["named", "builtins", "eval"],
    ["named", "subprocess", "Popen"],
    ["named", "offbeat.cli", "main"],
    ["named", "offbeat.launch.processes", "start"],
    ["named", "offbeat.runtime.server", "main"],
    ["object", "offbeat.journal.file", "os", [], []],
    ["object", "pathlib", "Path", [], []],
    ["object", "offbeat.journal.file", "Journal", ["path", "nbytes"], ["/tmp/nowhere", 0]],
    ["method", "text", "format"],
    ["part", "none"],
    ["view", 0, 0, 1, False],
    ["tuple", None, [[0]]],
    ["array", False, "O", [1], b"12345678"],
    ["enum", "offbeat.types", "WorkerId", 1],
    ["list", None, [[7]]],
    ["nothing"],
    [],
]


@pytest.mark.parametrize("row", ROWS, ids=[str(row[:3]) for row in ROWS])
def test_a_table_names_nothing_else(row: list[Any]) -> None:
    with pytest.raises(ProtocolError, match="a state that cannot be read"):
        loads(msgpack.packb([[0], [row], []]), [], {})


@examples(300, quick=60)
@given(st.integers(0, 2**62))
def test_a_damaged_table_is_refused_or_makes_other_objects(seed: int) -> None:
    chance, whole = random.Random(seed), Coordinator(rule("dbw"), 3)
    for event in (Joined(0), Joined(1), Initialised(0), Pushed(0, 1, version=0, samples=8, compute_s=0.5)):
        whole.on(event, 0.0)
    table = bytearray(dumps([whole, memoryview(bytearray(8))], {})[0])
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(table))
        table[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
    with contextlib.suppress(ProtocolError):
        loads(table, [memoryview(bytearray(8))], {})
