"""What a worker makes of the word that its computation is of no more use."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from offbeat.runtime.parameter_server.interrupts import Interrupts
from offbeat.runtime.worker.connection import WorkerConnection
from offbeat.transport.base import Message


@pytest.fixture
def interrupts() -> Interrupts:
    return Interrupts(cast(WorkerConnection, None), nn.Linear(1, 1))


def word(**header: Any) -> Message:
    return Message({"kind": "interrupt", **header}, memoryview(b""), ())


def test_word_that_comes_between_the_parameters_of_two_servers_counts(interrupts: Interrupts) -> None:
    interrupts.released(5)
    interrupts.heard(word(version=6, at_once=True))
    interrupts.released(5)  # the second server is slower
    assert interrupts.now()
    interrupts.released(6)
    interrupts.released(6)
    assert not interrupts.overtaken


def test_late_word_about_a_version_that_is_left_behind_does_not(interrupts: Interrupts) -> None:
    interrupts.released(6)
    interrupts.heard(word(version=6, at_once=False))
    assert not interrupts.overtaken
    interrupts.heard(word(version=7, at_once=False))
    assert (interrupts.overtaken, interrupts.now()) == (True, False)


class Silent:
    """A link over which nothing comes."""

    def glance(self) -> None:
        pass


def test_word_that_has_come_before_stops_the_body_at_its_first_module() -> None:
    model = nn.Linear(1, 1)
    interrupts = Interrupts(cast(WorkerConnection, Silent()), model)
    interrupts.heard(word(version=1, at_once=True))
    reached = []
    with interrupts.watch():
        reached.append("body")
        model(torch.ones(1, 1))
        reached.append("after the model")
    assert reached == ["body"] and interrupts.entries == 1
    interrupts.detach()
    model(torch.ones(1, 1))
