"""`NaturalGradient`: an optimizer for workers that train apart for a while and then average their parameters (EnsembleSync, section 3.4).

This file decides which tensors are preconditioned along which axes and when, and applies momentum, weight decay and the bounds on a step.
fisher.py has the estimate of one axis. It is a plain ``torch.optim.Optimizer``, which uses no other worker and no session.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from offbeat.errors import ConfigurationError, warn
from offbeat.tensors import fisher

__all__ = ["NaturalGradient"]

FIRST_UPDATES = 10
"""After this many calls the factors are no longer updated at each step."""
MOST_NEW = 0.9
"""Largest share of one minibatch in a factor."""
SQUARES = (1e-12, 1e18)
"""Norms for which squares and their sums lose nothing in float32; other gradients are computed in float64."""
LARGEST = 1e70
"""Largest norm of a gradient whose fourth power, which factors need, fits a float64. No float32 comes near."""


def _whole(x: Any) -> bool:
    return isinstance(x, int) and x >= 1


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (lambda x: 0 <= x < math.inf, "a finite number of at least 0"),
    "momentum": (lambda x: 0 <= x < 1, "from 0 to below 1"),
    "weight_decay": (lambda x: 0 <= x < math.inf, "a finite number of at least 0"),
    "alpha": (lambda x: 0 < x < math.inf, "a finite number above 0; large values make it SGD"),
    "rank": (_whole, "an integer of at least 1; what is over half of a tensor's size is not used"),
    "update_period": (_whole, "an integer of at least 1 (steps)"),
    "history": (lambda x: 1 <= x < math.inf, "a finite number of at least 1 (minibatches)"),
    "max_change": (lambda x: x > 0, "above 0, and math.inf for no bound"),
    "max_total_change": (lambda x: x > 0, "above 0, and math.inf for no bound"),
}


class _Item(NamedTuple):
    """One parameter's part in a step."""

    group: dict[str, Any]
    param: Tensor
    gradient: Tensor
    """With weight decay; float32 or float64."""
    norm: float


class NaturalGradient(torch.optim.Optimizer):
    """SGD along an online estimate of the natural gradient, each step bounded in length.

    For each axis of size D > 1 of a tensor with at least two dimensions, the others flattened into the N rows of ``X`` (N, D), an estimate
    ``F = R' diag(d) R + rho I`` of the rows' second moment is kept, and from the last axis to the first
    ``X <- gamma beta X (F + (alpha / D) tr(F) I)^-1``: directions in which gradients are always large are shortened, and ``gamma`` keeps
    the norm of the whole. Then, as in SGD, ``v <- momentum v + X`` and the change is ``-lr v``: scaled down to the length ``max_change``
    where a tensor's is longer, and then all tensors alike where the change of the whole model is longer than ``max_total_change``.

    A factor starts with three updates from its first gradient, is updated with each of the first ten and then with every
    ``update_period``-th. Every gradient is preconditioned with the factor from before its own update. An axis costs two matrix products of
    N D rank per step, and two more in float64 with each update: large batches make this little beside the gradients' own.

    A gradient that is not finite skips the whole step: parameters, momentum and factors stay, `skipped` counts it. A tensor whose gradient
    is all zeros is no news for its factors. Half-precision gradients are worked on in float32, factors are float64; `load_state_dict` keeps
    both, so that training continues bit for bit, and takes the state of ``torch.optim.SGD`` too. The state is local to a worker. Servers
    cannot run this optimizer: it is for one process, or for rules whose workers step locally.

    >>> weight = torch.nn.Parameter(torch.ones(3, 2))
    >>> optimizer = NaturalGradient([weight], lr=0.1)
    >>> (weight ** 2).sum().backward()
    >>> optimizer.step()
    >>> round(torch.linalg.vector_norm(weight - 1).item(), 4)  # lr times the gradient's norm
    0.4899

    Args:
        params: parameters, named parameters, or parameter groups. All settings but ``max_total_change`` may differ between groups.
        lr: learning rate; a learning rate of SGD is a good start, since the norm is SGD's.
        momentum: share of the last ``v`` in the next, from 0 to below 1.
        weight_decay: times the parameter, added to the gradient before it is preconditioned.
        alpha: smoothing: how much of the mean eigenvalue is added to each. Smaller is bolder, and far below one
            the noise of a short history takes over; infinitely large is SGD.
        rank: of F at most; at most half of D (rounded up) is used.
        update_period: of the factors, in steps.
        history: how many minibatches a factor remembers: one is ``1 / history`` of the estimate, at most 0.9. In minibatches and not in
            samples, because the rows of a gradient are no samples; only those count with which the factor is updated.
        max_change: longest change of a tensor in one step (Euclidean norm, learning rate included); ``math.inf`` for no bound. Kaldi
            gives the last layer 1.5.
        max_total_change: the same of all tensors together.
        skip_1d: take tensors of one dimension (biases, scales) as in SGD. False: as matrices of a single row.
        freeze: apply the factors and no longer update them.

    Raises:
        ConfigurationError: a setting out of its range, or a parameter that is complex or has a sparse gradient.

    The paper: Povey, Zhang and Khudanpur, "Parallel training of DNNs with natural gradient and parameter averaging" (2014,
    https://arxiv.org/abs/1410.7455); numbers and schedule after Kaldi's convolutional layers. It departs from Kaldi in preconditioning the
    gradients of linear layers too, where Kaldi has the inputs and output derivatives of each sample, and in leaving out biases.
    """

    skipped: int = 0
    """Steps that were skipped because a gradient was not finite."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        alpha: float = 4.0,
        rank: int = 80,
        update_period: int = 4,
        history: float = 4.0,
        max_change: float = 0.75,
        max_total_change: float = 2.0,
        skip_1d: bool = True,
        freeze: bool = False,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "alpha": alpha, "rank": rank, "update_period": update_period,
            "history": history, "max_change": max_change, "max_total_change": max_total_change, "skip_1d": skip_1d, "freeze": freeze,
        }  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch.

        Raises:
            ConfigurationError: as for the constructor.
        """
        _check({**self.defaults, **param_group})
        if param_group.get("max_total_change", self.defaults["max_total_change"]) != self.defaults["max_total_change"]:
            raise ConfigurationError(
                f"max_total_change={param_group['max_total_change']} in a parameter group: it bounds all groups together; give it once, to "
                f"NaturalGradient, where it is {self.defaults['max_total_change']}"
            )
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.is_complex():
                raise ConfigurationError(f"a parameter of shape {tuple(param.shape)} is {param.dtype}: use its view_as_real")

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step. A closure computes loss and gradients again; its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        items = [_item(group, param) for group in self.param_groups for param in group["params"] if param.grad is not None]
        if all(item.norm < LARGEST for item in items):
            velocities = [self._velocity(item) for item in items]
            self._move(items, velocities)
        else:
            self._skip("a gradient")
        return loss

    def _velocity(self, item: _Item) -> Tensor:
        """Return ``v`` of this step. The last one stays in the state, since the step may still be skipped."""
        direction = self._precondition(item)
        before = self.state[item.param].get("momentum_buffer")
        if not item.group["momentum"] or before is None:
            return direction
        return direction.add(before, alpha=item.group["momentum"])

    def _precondition(self, item: _Item) -> Tensor:
        """Return the gradient, preconditioned along each axis with the factors in the state, and update these."""
        group, X = item.group, item.gradient
        if item.norm == 0 or X.ndim < (2 if group["skip_1d"] else 1):
            return X
        state = self.state[item.param]
        step = int(state.get("step", 0))
        updating = not group["freeze"] and (step < FIRST_UPDATES or step % group["update_period"] == 0)
        eta = min(MOST_NEW, 1 / group["history"])
        state["step"] = torch.tensor(step + 1)
        return fisher.along_axes(X, state, alpha=group["alpha"], rank=group["rank"], eta=eta, updating=updating)

    def _move(self, items: list[_Item], velocities: list[Tensor]) -> None:
        """Change the parameters by ``-lr v``, within the bounds."""
        lengths = [_norm(v) * float(item.group["lr"]) for item, v in zip(items, velocities, strict=True)]
        scales = [min(1.0, item.group["max_change"] / max(length, 1e-300)) for item, length in zip(items, lengths, strict=True)]
        total = math.hypot(*(length * scale for length, scale in zip(lengths, scales, strict=True)))
        if not math.isfinite(total):
            self._skip("the change, which learning rate and momentum make of finite gradients,")
            return
        shrink = min(1.0, self.param_groups[0]["max_total_change"] / max(total, 1e-300))
        for item, velocity, scale in zip(items, velocities, scales, strict=True):
            if item.group["momentum"]:
                # An unchanged gradient may be the parameter's ``grad`` itself, which the next backward pass overwrites.
                self.state[item.param]["momentum_buffer"] = velocity.clone() if velocity is item.gradient else velocity
            item.param.add_(velocity, alpha=-float(item.group["lr"]) * scale * shrink)

    def _skip(self, what: str) -> None:
        self.skipped += 1
        warn(
            f"NaturalGradient: {what} is not finite, so the step is skipped and the parameters stay as they are. "
            "If this goes on, lower the learning rate; `skipped` counts such steps."
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but keep the dtype of each state tensor: torch would convert factors to the parameter's dtype.

        Raises:
            ConfigurationError: a factor of the state has another size than the parameter's axis.
        """
        super().load_state_dict(state_dict)
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for index, param in zip(saved["params"], group["params"], strict=True):
                for key, value in state_dict["state"].get(index, {}).items():
                    if isinstance(value, Tensor):
                        self.state[param][key] = value.detach().to("cpu" if key == "step" else param.device, copy=True)
                fisher.check_sizes(self.state[param], param.shape)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)


def _item(group: dict[str, Any], param: Tensor) -> _Item:
    assert param.grad is not None
    if param.grad.is_sparse:
        raise ConfigurationError(f"the gradient of a parameter of shape {tuple(param.shape)} is sparse: make its layer with sparse=False")
    gradient = param.grad.to(torch.promote_types(param.grad.dtype, torch.float32))
    if group["weight_decay"]:
        gradient = gradient.add(param, alpha=group["weight_decay"])
    norm = _norm(gradient)
    if not SQUARES[0] < norm < SQUARES[1]:
        wide = gradient.double()
        norm = _norm(wide)
        gradient = wide if 0 < norm < LARGEST else gradient
    return _Item(group, param, gradient, norm)


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x))


def _check(settings: dict[str, Any]) -> None:
    for name, (allowed, words) in _RANGES.items():
        value = settings[name]
        if name == "lr" and isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, Real) or not allowed(value):
            raise ConfigurationError(f"NaturalGradient({name}={value!r}): {name} must be {words}")
