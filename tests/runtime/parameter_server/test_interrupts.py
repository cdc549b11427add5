"""How a computation is broken off that is of no more use; when it is, is decided in ``core/worker.py``."""

from __future__ import annotations

from copy import deepcopy
from typing import cast

import torch
from torch import nn

from offbeat.core.gradient_contents import GradientContents
from offbeat.runtime.parameter_server.interrupts import Interrupts
from offbeat.runtime.worker.connection import WorkerConnection


class Silent:
    """A link over which nothing comes."""

    def glance(self) -> None:
        pass


def test_word_that_has_come_before_stops_the_body_at_its_first_module() -> None:
    model = nn.Linear(1, 1)
    interrupts = Interrupts(cast(WorkerConnection, Silent()), model, lambda: True, GradientContents())
    reached = []
    with interrupts.watch():
        reached.append("body")
        model(torch.ones(1, 1))
        reached.append("after the model")
    assert reached == ["body"]
    interrupts.detach()
    model(torch.ones(1, 1))


def test_a_computation_that_is_of_use_is_not_broken_off() -> None:
    model = nn.Linear(1, 1)
    interrupts = Interrupts(cast(WorkerConnection, Silent()), model, lambda: False, GradientContents())
    reached = []
    with interrupts.watch():
        model(torch.ones(1, 1))
        reached.append("after the model")
    assert reached == ["after the model"]


def test_a_copy_of_the_model_is_not_broken_off() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Sequential(Own(1, 1)))
    interrupts = Interrupts(cast(WorkerConnection, Silent()), model, lambda: True, GradientContents())
    with interrupts.watch():
        for part in deepcopy(model).modules():
            assert not part._forward_pre_hooks
    assert model[0][0]._forward_pre_hooks
