"""Parts of batches, pieces of models, and calls that the processes of a worker make together."""

from __future__ import annotations

import socket
import threading
from typing import Any

import hypothesis.strategies as st
import msgpack  # type: ignore[import-untyped]
import pytest
import torch
from hypothesis import given
from torch import nn

from offbeat.errors import JobError, ProtocolError
from offbeat.runtime.group import values
from offbeat.runtime.group.channel import Follower, Leader
from offbeat.runtime.group.shadow import Shadow
from offbeat.runtime.group.values import REPLICATED, Piece
from offbeat.session import LEADERLESS, Place


@given(batch=st.lists(st.integers(), min_size=1, max_size=40, unique=True), size=st.integers(1, 9))
def test_equal_parts_have_every_sample_and_repeat_as_few_as_possible(batch: list[int], size: int) -> None:
    parts = [Place(rank, size).part(batch) for rank in range(size)]
    assert len({len(part) for part in parts}) == 1
    joined = [sample for part in parts for sample in part]
    assert joined[: len(batch)] == batch
    assert len(joined) < len(batch) + size


@given(shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6), size=st.integers(1, 4), sharded=st.booleans())
def test_pieces_do_not_overlap_and_each_process_finds_its_own(shapes: list[list[int]], size: int, sharded: bool) -> None:
    def own(rank: int) -> list[Piece]:
        return [Piece(f"p{i}", rank if sharded else REPLICATED, tuple(shape), "float32") for i, shape in enumerate(shapes)]

    joined = values.joined([own(rank) for rank in range(size)])
    assert sum(piece.numel for piece in joined) == (size if sharded else 1) * sum(torch.Size(shape).numel() for shape in shapes)
    if joined:
        parameters = {f"p{i}": nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(shapes)}
        model = nn.ParameterDict(parameters)
        shadow = Shadow(model, torch.optim.SGD(model.parameters(), lr=0.1), parameters, joined)
        pieces = shadow.pieces
        assert values.from_wire(msgpack.unpackb(msgpack.packb(pieces))) == list(pieces)
        memory = memoryview(bytearray(shadow.layout.nbytes))
        for number, piece in enumerate(pieces):
            piece.within(memory).fill_(number)
        assert all(bool((piece.within(memory) == number).all()) for number, piece in enumerate(pieces))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ([("a", (2,), "float32")], r"train \[2, 1\] parameters"),
        ([("a", (2,), "float32"), ("c", (3,), "float32")], r"\['b', 'c'\] have the same place"),
        ([("a", (2,), "float32"), ("b", (4,), "float32")], "'b' differs"),
        ([("a", (2,), "float64"), ("b", (3,), "float32")], "'a' differs"),
    ],
)
def test_processes_with_different_models_are_told_where(other: list[tuple[str, tuple[int, ...], str]], why: str) -> None:
    mine = [Piece("a", REPLICATED, (2,), "float32"), Piece("b", REPLICATED, (3,), "float32")]
    with pytest.raises(JobError, match=why):
        values.joined([mine, [Piece(name, REPLICATED, shape, dtype) for name, shape, dtype in other]])


def test_only_trained_parameters_are_pieces() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    assert list(values.trained(model, optimizer)) == ["0.weight"]


def ends() -> tuple[Leader, Follower]:
    ours, theirs = socket.socketpair()
    return Leader(Place(0, 2, (ours.detach(),))), Follower(Place(1, 2, (theirs.detach(),)))


def test_a_call_is_made_when_all_have_made_it() -> None:
    leader, follower = ends()
    follower.announce("step", {"samples": 4})
    assert leader.gather("step") == [{"samples": 4}]
    answer: dict[str, Any] = {"held": [[0, number] for number in range(100_000)]}  # more than a socket takes at once
    answer |= {
        "grant": None,
        "barrier": None,
        "before": 0,
        "restarted": False,
        "over": None,
        "ended": False,
        "moved": False,
        "loads": True,
        "version": 0,
        "batch": None,
        "overlap": None,
        "resumes": True,
        "order": ["SIGTERM", 1.5],
        "reports": [],
    }
    waiting = threading.Thread(target=leader.answer, args=(answer,))
    waiting.start()
    assert follower.await_answer() == answer
    waiting.join()


def test_what_no_process_of_a_worker_sends_is_refused_in_words() -> None:
    leader, follower = ends()
    said: list[tuple[str, Any, str]] = [
        ("step", {"samples": -1}, r"process 1 of this worker sent 1\.samples = -1 \(expected an integer from 0"),
        ("step", 7, r"sent 1 = 7 \(expected a map\)"),
        ("DistributedOptimizer", {"pieces": [["weight", 1, [3]]]}, r"sent 1\.pieces\.0 = a list of length 3 "),
    ]
    for call, values_, why in said:
        follower.announce(call, values_)
        with pytest.raises(ProtocolError, match=why):
            leader.gather(call)
    leader.answer({"version": 3})
    with pytest.raises(ProtocolError, match=r"process 0 of this worker sent grant = nothing"):
        follower.await_answer()
    follower._link._connection.send_bytes(b"\xc1")
    with pytest.raises(ProtocolError, match="process 1 of this worker sent 1 bytes that are not msgpack"):
        leader.gather("step")


def test_different_calls_and_the_end_of_a_process_are_errors() -> None:
    leader, follower = ends()
    follower.announce("pull", {})
    with pytest.raises(JobError, match=r"process 0 of this worker calls step\(\) and process 1 calls pull\(\)"):
        leader.gather("step")
    del follower
    with pytest.raises(JobError, match="process 1 of this worker has ended"):
        leader.gather("step")


def test_without_its_leader_a_process_ends() -> None:
    leader, follower = ends()
    del leader
    with pytest.raises(SystemExit) as ended:
        follower.await_answer()
    assert ended.value.code == LEADERLESS
    with pytest.raises(SystemExit):
        follower.announce("step", {})
