"""Step an optimizer from one memory into another, in one pass, where torch's own optimizers step in place.

To copy a block to the other memory and to step it there is always right, and for plain SGD, whose step is one pass, takes 1.3 times as
long. The optimizers of `_FUSED` in ``optimizers.py`` do so much in a step that the copy costs a few percent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def step_across(
    name: str,
    settings: Mapping[str, Any],
    parameters: tuple[torch.Tensor, torch.Tensor],
    states: tuple[Mapping[str, Any], Mapping[str, Any]],
    grad: torch.Tensor,
) -> bool:
    """Make a step of SGD with the operations of `torch.optim.SGD`, in its order, so that the bits are its own.

    Update rule, where d is the weight decay, mu the momentum, tau the dampening and eta the learning rate::

        g <- g + d p        m <- mu m + (1 - tau) g        g <- g + mu m  (nesterov)  or  m        p <- p - eta g

    Args:
        name, settings: the optimizer's class in ``torch.optim``, and the settings of the parameter's group.
        parameters, states: p and the optimizer's state of it, where they are read and where they are written.
        grad: g; overwritten.

    Returns:
        False if nothing was done: the optimizer is another one, or one of the states lacks a momentum, or has one that is not used.
    """
    if name != "SGD":
        return False
    momentum, (parameter, to) = settings["momentum"], parameters
    buffer, to_buffer = (state.get("momentum_buffer") for state in states)
    if (buffer is None or to_buffer is None) if momentum != 0 else buffer is not None:
        return False
    if settings["maximize"]:
        torch.neg(grad, out=grad)
    if settings["weight_decay"] != 0:
        grad.add_(parameter, alpha=settings["weight_decay"])
    if momentum != 0:
        assert isinstance(buffer, torch.Tensor) and isinstance(to_buffer, torch.Tensor)
        torch.mul(buffer, momentum, out=to_buffer).add_(grad, alpha=1 - settings["dampening"])
        grad = grad.add_(to_buffer, alpha=momentum) if settings["nesterov"] else to_buffer
    torch.add(parameter, grad, alpha=-settings["lr"], out=to)
    return True
