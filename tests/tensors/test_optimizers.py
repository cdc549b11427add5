"""Which optimizers a server accepts, and how their settings travel."""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
import torch

from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.tensors.optimizers import OptimizerSpec, build, hyperparameters, spec_of, supported, weighted_decay


def one() -> list[torch.Tensor]:
    return [torch.zeros(2, 2)]


@pytest.mark.parametrize("name", supported())
def test_every_supported_optimizer_makes_the_trip(name: str) -> None:
    optimizer = getattr(torch.optim, name)(one())
    spec = spec_of(optimizer)
    read = OptimizerSpec.from_wire(msgpack.unpackb(msgpack.packb(spec.to_wire())))
    assert read == spec
    rebuilt = build(read.name, read.groups[0], one())
    for key in read.groups[0]:
        assert rebuilt.param_groups[0][key] == optimizer.param_groups[0][key]


def test_each_class_of_torch_is_either_supported_or_refused_with_a_reason() -> None:
    assert {"SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adafactor"} <= set(supported())
    for name in ("LBFGS", "SparseAdam"):
        with pytest.raises(ConfigurationError, match=f"{name} works under no rule: it "):
            spec_of(getattr(torch.optim, name)(one()))


def test_subclasses_and_foreign_classes_are_refused() -> None:
    class SGD(torch.optim.SGD):
        pass

    with pytest.raises(ConfigurationError, match=r"SGD is not one of torch\.optim's own classes"):
        spec_of(SGD(one()))


@pytest.mark.parametrize("flag", ["capturable", "differentiable"])
def test_flags_about_graphs_are_refused(flag: str) -> None:
    optimizer = torch.optim.Adam(one())
    optimizer.param_groups[0][flag] = True
    with pytest.raises(ConfigurationError, match=flag):
        spec_of(optimizer)


def test_settings_are_plain_and_only_the_optimizers_own() -> None:
    given: list[dict[str, Any]] = [{"params": one(), "lr": 0.5}, {"params": one()}]
    optimizer = torch.optim.AdamW(given, lr=torch.tensor(0.25), betas=(0.5, 0.75))
    torch.optim.lr_scheduler.OneCycleLR(torch.optim.SGD(one(), lr=1.0, momentum=0.9), max_lr=1.0, total_steps=3)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    groups = hyperparameters(optimizer)
    assert groups[1] == {
        "lr": 0.25, "betas": [0.5, 0.75], "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False, "maximize": False,
    }  # fmt: skip
    assert groups[0]["lr"] == 0.5


def test_a_setting_that_cannot_travel_is_named() -> None:
    optimizer = torch.optim.SGD(one())
    optimizer.param_groups[0]["lr"] = object()
    with pytest.raises(ConfigurationError, match=r"SGD\(lr=\.\.\.\) in group 0"):
        hyperparameters(optimizer)


@pytest.mark.parametrize(
    "data",
    [
        None,
        {"name": "LBFGS", "groups": [{}]},
        {"name": "Optimizer", "groups": [{}]},
        {"name": "lr_scheduler", "groups": [{}]},
        {"name": "SGD", "groups": []},
        {"name": "SGD", "groups": None},
        {"name": "SGD", "groups": [3]},
        {"name": "SGD", "groups": [{"lr": -1.0}]},
        {"name": "SGD", "groups": [{"lr": "fast"}]},
        {"name": "SGD", "groups": [{"lr": [{}]}]},
        {"name": "SGD", "groups": [{"params": [1]}]},
        {"name": "SGD", "groups": [{"self": 1}]},
        {"name": "SGD", "groups": [{"fused": True}]},
        {"name": "Adam", "groups": [{"betas": [0.9]}]},
        {"name": "Adam", "groups": [{"betas": 3}]},
    ],
)
def test_nonsense_from_a_peer_is_refused(data: Any) -> None:
    with pytest.raises(ProtocolError):
        OptimizerSpec.from_wire(data)


@pytest.mark.parametrize(("name", "weighted"), [("SGD", True), ("Adam", True), ("RMSprop", True), ("AdamW", False), ("Adafactor", False)])
def test_decay_is_weighted_where_it_is_a_part_of_the_gradient(name: str, weighted: bool) -> None:
    optimizer = getattr(torch.optim, name)([torch.zeros(2, 2, requires_grad=True)], lr=0.1, weight_decay=0.5)
    with weighted_decay(optimizer, 0.75):
        assert optimizer.param_groups[0]["weight_decay"] == (0.375 if weighted else 0.5)
    with weighted_decay(optimizer, 1.0000001):
        assert optimizer.param_groups[0]["weight_decay"] == 0.5
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
