"""Which settings of a resumed script the user has changed, and which are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offbeat.runtime.worker.changed_settings import differences

GROUP = {"lr": 0.1, "momentum": 0.9, "betas": (0.9, 0.99), "params": [0], "initial_lr": 0.1}
STEP = {"class": "StepLR", "state": {"step_size": 3, "gamma": 0.1, "last_epoch": 0, "base_lrs": [0.1], "_last_lr": [0.1]}}


def said(now: Any, *, then: Any = None, used: Any = None) -> list[str]:
    before = {"groups": [GROUP], "schedulers": [STEP]} if then is None else then
    return differences(now, before, before if used is None else used)


def with_group(**changed: Any) -> dict[str, Any]:
    return {"groups": [{**GROUP, **changed}], "schedulers": [STEP]}


def test_an_unchanged_script_hears_nothing_wherever_its_schedule_was() -> None:
    used = {"groups": [{**GROUP, "lr": 0.001}], "schedulers": [{**STEP, "state": {**STEP["state"], "last_epoch": 7}}]}
    assert said(with_group(betas=[0.9, 0.99]), used=used) == [], "a message has made a list of the pair"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"lr": 0.01, "initial_lr": 0.01}, "lr = 0.1 is used (script: 0.01; set optimizer.param_groups[0]"),
        ({"momentum": 0.0}, "momentum = 0.9 is used (script: 0.0;"),
        ({"betas": (0.9, 0.999)}, "betas = (0.9, 0.99) is used (script: (0.9, 0.999);"),
        ({"lr": torch.tensor(0.5)}, "lr = 0.1 is used (script: 0.5;"),
    ],
)
def test_a_changed_setting_is_named_with_both_values(changed: dict[str, Any], words: str) -> None:
    [line] = said(with_group(**changed))
    assert line.startswith(words)


def test_a_script_that_has_stepped_its_schedule_to_the_checkpoint_s_place_hears_nothing() -> None:
    """It has passed over the epochs that are over, with a step of its scheduler for each."""
    at = {"groups": [{**GROUP, "lr": 0.01}], "schedulers": [{**STEP, "state": {**STEP["state"], "last_epoch": 7}}]}
    assert said(at, used=at) == []


def test_groups_and_schedulers_that_differ_are_named() -> None:
    two = {"groups": [GROUP, {**GROUP, "lr": 0.2}], "schedulers": [STEP]}
    assert said(two) == ["the settings of 1 parameter groups are used (script: 2 groups, checkpoint: 1)"]
    [line] = said({**two, "groups": [GROUP, {**GROUP, "lr": 0.3}]}, then=two)
    assert line.startswith("lr = 0.2 of parameter group 1 is used (script: 0.3; set optimizer.param_groups[1]")
    [line] = said({"groups": [GROUP], "schedulers": [{**STEP, "state": {**STEP["state"], "gamma": 0.5}}]})
    assert line.startswith("gamma = 0.1 of StepLR is used (script: 0.5;")
    [line] = said({"groups": [GROUP], "schedulers": []})
    assert line.startswith("schedulers are none in the script, and were StepLR")
