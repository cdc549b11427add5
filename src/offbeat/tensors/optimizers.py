"""Describe optimizers that a server can run: a name from a fixed list, and plain numbers.

The server builds the user's optimizer by its name from its own ``torch.optim``, so nothing that arrives can run code. For this reason
subclasses and other classes are refused: the server would run something else than the user wrote.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any, Final, TypeAlias

import torch

from offbeat.errors import ConfigurationError, ProtocolError

__all__ = ["Hyperparameters", "OptimizerSpec", "hyperparameters", "spec_of", "supported", "weighted_decay"]

Hyperparameters: TypeAlias = dict[str, Any]

_LARGEST: Final = 1e38
"""Of a number among the settings of an optimizer: torch refuses larger ones for float32."""
_FACTORS: Final = ("lr", "weight_decay")
_LARGEST_FACTOR: Final = 65504.0
"""Of settings that torch multiplies tensors with: it refuses larger ones for float16."""
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop")
"""Each element's step depends only on that element (and on scalars that are equal for all), so tensors may be cut anywhere."""
_WHOLE = ("Adafactor", "Muon")
"""The step needs the whole tensor in its true shape: row and column means, or singular vectors."""
_REFUSED = {
    "LBFGS": "it evaluates the loss several times within a step, and each time would need the gradients of all workers",
    "SparseAdam": "it needs sparse gradients, and gradients are exchanged dense; use Adam",
}
_DECOUPLED = ("AdamW", "Adafactor", "Muon")
"""Optimizers whose weight decay is a part of the step and not of the gradient; others are so with ``decoupled_weight_decay``."""
_FUSED = ("Adam", "AdamW", "Adagrad")
"""Optimizers whose fused CPU kernel is faster: one pass and no temporaries instead of eight passes."""
_FUSED_ON_GPU = ("Adam", "AdamW")
"""Those that have a fused kernel for CUDA as well."""
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings of how a step is computed; they do not change its result, and the server chooses them."""


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer as plain data."""

    name: str
    """Its class in ``torch.optim``."""
    groups: tuple[Hyperparameters, ...]
    """Settings of each parameter group, without the parameters; see `hyperparameters`."""

    @property
    def elementwise(self) -> bool:
        """True if a tensor may be cut and its parts stepped by different servers."""
        return self.name in _ELEMENTWISE

    def to_wire(self) -> dict[str, Any]:
        return {"name": self.name, "groups": [dict(group) for group in self.groups]}

    @classmethod
    def from_wire(cls, data: Any) -> OptimizerSpec:
        """Return the optimizer that `to_wire` has written, from data that a peer sent.

        Raises:
            ProtocolError: the optimizer is not on the list, or does not have or accept the settings.
        """
        name = data.get("name") if isinstance(data, Mapping) else None
        if not isinstance(name, str) or name not in supported():
            raise ProtocolError(f"no optimizer {name!r} can be run here (expected one of {', '.join(supported())})")
        return cls(name, tuple(checked(name, data.get("groups"))))


@cache
def supported() -> tuple[str, ...]:
    """Return the names of the optimizers that this version of torch has and a server can run."""
    return tuple(name for name in _ELEMENTWISE + _WHOLE if hasattr(torch.optim, name))


def spec_of(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Return the description from which servers build the same optimizer.

    >>> spec_of(torch.optim.SGD([torch.zeros(2)], lr=0.1, momentum=0.9)).name
    'SGD'

    Raises:
        ConfigurationError: a server cannot run it; the message says why and what to use.
    """
    kind = type(optimizer)
    if kind is not getattr(torch.optim, kind.__name__, None):
        raise ConfigurationError(
            f"{kind.__module__}.{kind.__qualname__} is not one of torch.optim's own classes, and servers run no code that is sent to them: "
            f"use one of {', '.join(supported())}, itself and not a subclass, or a rule under which workers step by themselves: "
            "full (bsp without servers) or ensemble"
        )
    if kind.__name__ not in supported():
        reason = _REFUSED.get(kind.__name__)
        why = f"works under no rule: {reason}" if reason else "cannot be run by a server: it is not known how its state can be divided"
        raise ConfigurationError(f"{kind.__name__} {why}; the known ones are {', '.join(supported())}")
    return OptimizerSpec(kind.__name__, tuple(hyperparameters(optimizer)))


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[Hyperparameters]:
    """Return the settings of each parameter group (learning rate, betas ...) as numbers, texts and lists that msgpack can carry.

    Left out are the parameters, how a step is computed (``foreach``, ``fused``), and what schedulers add (``initial_lr``).

    >>> hyperparameters(torch.optim.RMSprop([torch.zeros(2)], lr=torch.tensor(0.5)))[0]["lr"]
    0.5

    Raises:
        ConfigurationError: a value cannot be sent, or ``capturable`` or ``differentiable`` is set.
    """
    name = type(optimizer).__name__
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        for key in ("capturable", "differentiable"):
            if group.get(key):
                raise ConfigurationError(
                    f"{name}({key}=True) in group {index}: steps run on servers, where this means nothing; leave it out"
                )
        plain = {key: _plain(f"{name}({key}=...) in group {index}", group[key]) for key in _settings(name) if key in group}
        if "initial_accumulator_value" in plain:
            # Adagrad fills its state from the defaults, whatever the group says.
            plain["initial_accumulator_value"] = optimizer.defaults["initial_accumulator_value"]
        groups.append(plain)
    return groups


def checked(name: str, groups: Any) -> list[Hyperparameters]:
    """Return settings that a peer sent for optimizer ``name``, after torch has accepted them.

    Raises:
        ProtocolError: they are not a list of maps from its settings to numbers, texts, None, or lists of numbers; or torch refuses them.
    """
    if not isinstance(groups, list | tuple) or not groups:
        raise ProtocolError(f"the settings of {name} must be a list of at least one group, not {type(groups).__name__}")
    known = _settings(name)
    for index, group in enumerate(groups):
        if not isinstance(group, Mapping):
            raise ProtocolError(f"a group of {name}'s settings must be a map, not {type(group).__name__}")
        for key, value in group.items():
            if key not in known or not _is_plain(value):
                raise ProtocolError(
                    f"{name} has no setting {key!r} that can be a {type(value).__name__}; its settings are {', '.join(sorted(known))}"
                )
            _check_size(key, value, index)
        try:
            build(name, group, [torch.zeros(1, 1, device="cpu")])
        except (TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"{name} refuses the settings: {error}") from None
    return [dict(group) for group in groups]


def check_changed(spec: OptimizerSpec, groups: Any) -> None:
    """Check settings that a peer has changed since it sent ``spec``: those that a scheduler writes, mostly the learning rate.

    Args:
        spec: the optimizer.
        groups: the settings of each parameter group.

    Raises:
        ProtocolError: groups or settings differ from those of ``spec``, a value has another type that torch refuses, or is not finite.
    """
    if not isinstance(groups, list | tuple) or len(groups) != len(spec.groups):
        raise ProtocolError(f"settings of parameter groups must be a list of {len(spec.groups)} maps, one for each group of the optimizer")
    alike = True
    for index, (group, first) in enumerate(zip(groups, spec.groups, strict=True)):
        if not isinstance(group, Mapping) or group.keys() != first.keys():
            raise ProtocolError(f"settings of parameter group {index} must be a map of {', '.join(sorted(first))}")
        for key, value in group.items():
            alike = alike and _is_like(value, first[key])
            _check_size(key, value, index)
    if not alike:
        checked(spec.name, groups)


def build(name: str, settings: Mapping[str, Any], params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Return optimizer ``name`` over ``params``, to step them where the first of them is. The caller has checked ``settings``."""
    assert name in supported(), name
    stepped = list(params)
    extra = {"fused": True} if name in (_FUSED if stepped[0].is_cpu else _FUSED_ON_GPU) else {}
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(stepped, **as_arguments(settings), **extra)
    return optimizer


def load_settings(
    optimizer: torch.optim.Optimizer,
    groups: Iterable[Mapping[str, Any]],
    *,
    strict: bool = True,
    but: Callable[[dict[str, Any]], Iterable[str]] = lambda group: (),
) -> None:
    """Set all that an optimizer's parameter groups have, except the parameters, to what these groups have.

    Args:
        optimizer: its groups are changed.
        groups: from another optimizer's ``param_groups``, or from a ``state_dict``.
        strict: False: there may be more groups on one side, which are ignored.
        but: returns the names of a group's settings that are left.

    Raises:
        ValueError: the numbers of groups differ.

    >>> one, other = (torch.optim.SGD([torch.zeros(1)], lr=lr) for lr in (0.1, 0.2))
    >>> load_settings(one, other.param_groups)
    >>> one.param_groups[0]["lr"]
    0.2
    """
    for group, given in zip(optimizer.param_groups, groups, strict=strict):
        left = {"params", *but(group)}
        group.update({key: value for key, value in given.items() if key not in left})


@contextmanager
def weighted_decay(optimizer: torch.optim.Optimizer, weight: float) -> Iterator[None]:
    """Scale weight decay that is a part of the gradient, inside the ``with`` block, by the sum of the weights of a round's gradients.

    Each of these gradients would contain the decay if its rank had added it. A round with half of the ranks' gradients then has half of the
    decay, and over the same samples the decay is as set. Decay that is a part of the step (AdamW) stays: Adam's steps do not become smaller
    with the sum, and what the decay is balanced with is the step. Optimizers of other classes than torch.optim's stay as they are.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, weight_decay=0.5)
    >>> with weighted_decay(optimizer, 0.25):
    ...     optimizer.param_groups[0]["weight_decay"]
    0.125
    >>> optimizer.param_groups[0]["weight_decay"]
    0.5
    """
    weight = round(weight, 5)  # of three ranks each has 1/3, and the float32 sum is not 1
    name = type(optimizer).__name__
    gradients = type(optimizer) is getattr(torch.optim, name, None) and name not in _DECOUPLED and weight != 1.0
    groups = [
        group for group in optimizer.param_groups if gradients and not group.get("decoupled_weight_decay") and group.get("weight_decay")
    ]
    before = [group["weight_decay"] for group in groups]
    for group in groups:
        group["weight_decay"] = group["weight_decay"] * weight
    try:
        yield
    finally:
        for group, own in zip(groups, before, strict=True):
            group["weight_decay"] = own


def as_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as torch keeps them in a parameter group: lists, which msgpack makes of tuples, become tuples again."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}


@cache
def _settings(name: str) -> frozenset[str]:
    if name not in supported():
        return frozenset()
    return frozenset(inspect.signature(getattr(torch.optim, name)).parameters) - {"params"} - _IMPLEMENTATION


def _plain(where: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(where, item) for item in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise ConfigurationError(f"{where} is {value!r}, which cannot be sent to a server; use a number")


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(item is None or isinstance(item, int | float) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _is_like(value: Any, first: Any) -> bool:
    """Return True if a setting has the same type as before; integers and floats are alike."""
    if type(value) is float or type(value) is int:
        return type(first) is float or type(first) is int
    if isinstance(value, list | tuple):
        return isinstance(first, list | tuple) and len(value) == len(first) and all(map(_is_like, value, first))
    return type(value) is type(first)


def _check_size(key: str, value: Any, index: int) -> None:
    """Raise `ProtocolError` for a number with which torch could not make a step: the error would come in the middle of a fold."""
    most = _LARGEST_FACTOR if key in _FACTORS else _LARGEST
    for number in value if isinstance(value, list | tuple) else (value,):
        if isinstance(number, int | float) and not -most <= number <= most:
            raise ProtocolError(f"{key} of parameter group {index} must be finite, and from {-most:g} to {most:g}")
