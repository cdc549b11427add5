"""Schedulers are found without a word from the script, and have their state again."""

from __future__ import annotations

import gc
import math
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from offbeat.runtime.job.packing import pack, unpack
from offbeat.runtime.worker.early_copies import EarlyCopies
from offbeat.runtime.worker.process_state import (
    instances_of,
    is_plain,
    load_schedulers,
    random_state,
    scheduler_states,
    schedulers_of,
    set_random_state,
    watch_schedulers,
)

Make = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Make] = {
    "step": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4, 9], 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1.0 / (1 + epoch)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.1, 4), lr_scheduler.ExponentialLR(o, 0.9)]),
}


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)


def step(scheduler: Any, number: int) -> float:
    scheduler.optimizer.step()
    scheduler.step(1.0 / (number // 4 + 1)) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()
    return float(scheduler.optimizer.param_groups[0]["lr"])


@pytest.mark.filterwarnings("ignore:.*epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("before", [True, False], ids=["made before", "made after"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_goes_on_where_it_was(name: str, before: bool) -> None:
    """Through a message, as the coordinator keeps it, and whether it was made before the process began to watch or after."""
    one, other = optimizer(), optimizer()
    if before:
        watched = SCHEDULERS[name](one)
    watch_schedulers()
    if not before:
        watched = SCHEDULERS[name](one)
    for number in range(7):
        step(watched, number)
    states = scheduler_states(schedulers_of([one]))
    assert states
    plain, payload = pack(states)
    states = unpack(plain, memoryview(b"".join(payload)))
    again = SCHEDULERS[name](other)
    step(again, 0)  # what a script does before its first batch is overwritten
    assert load_schedulers(schedulers_of([other]), states) == []
    other.param_groups[0].update({key: value for key, value in one.param_groups[0].items() if key != "params"})
    assert [step(again, number) for number in range(7, 12)] == [step(watched, number) for number in range(7, 12)]


def test_only_those_of_its_optimizers_are_a_process_s() -> None:
    watch_schedulers()
    one, other = optimizer(), optimizer()
    mine, _ = lr_scheduler.StepLR(one, 3), lr_scheduler.StepLR(other, 3)
    assert schedulers_of([one]) == [mine]
    assert load_schedulers([], scheduler_states([mine])) == ["StepLR"]


def test_what_is_plain() -> None:
    assert is_plain({"a": [1, None, (2.0, math.inf)], 3: torch.zeros(2)})
    assert not is_plain({"a": [object()]}) and not is_plain({object(): 1}) and not is_plain(len)


def test_random_generators_go_on() -> None:
    state = random_state()
    drawn = torch.rand(2).tolist(), np.random.rand(), random.random()
    set_random_state(state)
    assert (torch.rand(2).tolist(), np.random.rand(), random.random()) == drawn


def test_a_model_without_values_is_no_early_copy() -> None:
    """A script makes one on the meta device to count the parameters of another size, or has a lazy layer where the model has a real one."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    early = EarlyCopies(model)
    with torch.device("meta"):
        others = [torch.nn.Sequential(torch.nn.Linear(2, 1))]
    others.append(torch.nn.Sequential(torch.nn.LazyLinear(1)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    assert not early.found(model) and len(others) == 2


@pytest.mark.parametrize(
    "look", [lambda: instances_of(lr_scheduler.LRScheduler), lambda: EarlyCopies(torch.nn.Linear(2, 1)).found(torch.nn.Linear(2, 1))]
)
def test_to_look_for_objects_does_not_disturb_other_threads(monkeypatch: pytest.MonkeyPatch, look: Callable[[], Any]) -> None:
    """CPython cannot finish a tuple of unknown length while somebody else holds it, for instance in a list of all objects."""
    begun, go_on, made = threading.Event(), threading.Event(), []

    def numbers() -> Iterator[int]:
        yield from range(5)
        begun.set()
        assert go_on.wait(60.0)
        yield from range(40)

    def looked(real: Callable[..., list[Any]], *classes: type) -> list[Any]:
        """Let the thread finish its tuple while the caller would look through these objects."""
        found = real(*classes)
        go_on.set()
        thread.join()
        return found

    thread = threading.Thread(target=lambda: made.append(tuple(numbers())))
    for name in ("get_objects", "get_referrers"):
        monkeypatch.setattr(gc, name, partial(looked, getattr(gc, name)))
    thread.start()
    assert begun.wait(60.0)
    look()
    assert [len(each) for each in made] == [45]
