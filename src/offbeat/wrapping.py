"""Check what a script passes to `DistributedOptimizer`: what cannot work is refused at the wrapping, not in the middle of the training."""

from __future__ import annotations

import gc
from collections.abc import Set
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from offbeat.errors import ConfigurationError


def check_wrapped(optimizer: Any, model: Any) -> None:
    """Raise `ConfigurationError` unless these are an optimizer and one module, whose gradients are dense.

    >>> check_wrapped(torch.optim.SGD(nn.Linear(1, 1).parameters()), [nn.Linear(1, 1), nn.Linear(1, 1)])
    Traceback (most recent call last):
      ...
    offbeat.errors.ConfigurationError: the model is a list (expected a torch.nn.Module): pass several modules, or parameters without a \
module, as torch.nn.ModuleList([a, b]) or torch.nn.ParameterList([p])
    >>> image = torch.zeros(2, requires_grad=True)
    >>> check_wrapped(torch.optim.SGD([image]), nn.ParameterList([image]))
    Traceback (most recent call last):
      ...
    offbeat.errors.ConfigurationError: the optimizer has a tensor of shape (2,) that is not a torch.nn.Parameter, and so is in no model \
(torch.nn.ParameterList makes a new parameter of it): p = torch.nn.Parameter(tensor), and then the optimizer of p
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"the optimizer is {_kind(optimizer)} (expected an optimizer of torch.optim): "
            "offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)"
        )
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"the model is {_kind(model)} (expected a torch.nn.Module): pass several modules, or parameters without a module, as "
            "torch.nn.ModuleList([a, b]) or torch.nn.ParameterList([p])"
        )
    held = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    if (bare := next((one for one in held.values() if not isinstance(one, nn.Parameter)), None)) is not None:
        raise ConfigurationError(
            f"the optimizer has a tensor of shape {tuple(bare.shape)} that is not a torch.nn.Parameter, and so is in no model "
            "(torch.nn.ParameterList makes a new parameter of it): p = torch.nn.Parameter(tensor), and then the optimizer of p"
        )
    for name, module in model.named_modules():
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if sparse and id(module.weight) in held and module.weight.requires_grad:
            raise ConfigurationError(
                f"{name or 'the model'} is {_kind(module)}(sparse=True), whose gradient is sparse; gradients are exchanged "
                "dense: use sparse=False"
            )


def _kind(value: Any) -> str:
    """Return what a value is, with an article."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def check_process_group(model: nn.Module, *, in_job: bool) -> None:
    """Check that `torch.distributed` does not average the gradients that the job exchanges, in a worker of one process.

    Args:
        model: the script's.
        in_job: whether a launcher of offbeat has started this process.

    Raises:
        ConfigurationError: the model is wrapped in DDP or FSDP over several processes; or several processes of the script are connected
            by a process group, and none of them is in a job.
    """
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
        return
    processes = distributed.get_world_size()
    if not in_job:
        raise ConfigurationError(
            f"this script has connected {processes} processes by torch.distributed.init_process_group, and each would train a model of its "
            f"own: nothing connects them for offbeat. Start the script once, by offbeat run --workers {processes}, without "
            "torch.multiprocessing.spawn and without DistributedDataParallel"
        )
    kind = _sharing(model)
    if kind is not None:
        raise _shared(kind, processes)


def check_wrapped_later(trained: Set[int]) -> None:
    """Check, before the first step, that the script has not put a model with these parameters into DDP over the job's workers.

    It may do so after the wrapping of the optimizer, as Accelerate's ``prepare`` does: the model that was passed does not show it.

    Args:
        trained: the identities of the parameters.

    Raises:
        ConfigurationError: it has.
    """
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
        return
    for one in gc.get_objects():
        if type(one).__name__ == "DistributedDataParallel" and _sharing(one) and not trained.isdisjoint(map(id, one.parameters())):
            raise _shared("DistributedDataParallel", distributed.get_world_size())


def _shared(kind: str, processes: int) -> ConfigurationError:
    return ConfigurationError(
        f"the model is wrapped in {kind} over {processes} processes of this job: each step would wait for all of them, whatever the "
        "rule, and the death of one would end the others. Pass the model without it; a script that wraps where RANK is set "
        f"does not under offbeat run --no-torchrun-env. For {kind} inside a worker: --procs-per-worker"
    )


def _sharing(model: nn.Module) -> str | None:
    """Return by which class gradients are averaged among several processes; None: by none."""
    for module in model.modules():
        kind = type(module).__name__
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel") and module.process_group.size() > 1:  # type: ignore[operator]
            return kind
    if any(type(parameter.data).__name__ == "DTensor" for parameter in model.parameters()):
        return "FSDP2"
    return None


class KnownParameters:
    """The parameters that model and optimizer had when the optimizer was wrapped: the job trains these and no others.

    Args:
        optimizer, model: the script's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self._optimizer, self._model = optimizer, model
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        named = [(name, one) for name, one in model.named_parameters() if id(one) in held]
        self._frozen = [(name, one) for name, one in named if not one.requires_grad]
        self._trained = [(name, one) for name, one in named if one.requires_grad]
        self._held = len(held)
        self._without = 0
        """How many of the trained ones had no gradient at the last step, and were looked at then."""
        self._steps = 0
        self._shared: WeakKeyDictionary[KnownParameters, tuple[str, int]] = WeakKeyDictionary()
        """The wrapped optimizers that have some of these parameters too: the name of one, and how many steps each had made before this."""

    @property
    def trained(self) -> set[int]:
        """The `id` of each parameter that the job trains."""
        return {id(one) for _, one in self._trained}

    def share(self, other: KnownParameters) -> bool:
        """Note that another optimizer was wrapped before this one; return whether the two have a parameter in common."""
        theirs = other.trained
        name = next((name for name, one in self._trained if id(one) in theirs), None)
        if name is not None:
            self._shared[other], other._shared[self] = (name, other._steps), (name, 0)
        return name is not None

    def check_shared(self, *, servers_step: bool) -> None:
        """Count a step. Raise `ConfigurationError` if it would undo steps of another optimizer: on the servers each has a copy of its own.

        >>> model = nn.Linear(2, 1)
        >>> first, second = (KnownParameters(torch.optim.SGD(model.parameters()), model) for _ in range(2))
        >>> second.share(first)
        True
        >>> first.check_shared(servers_step=True)
        >>> second.check_shared(servers_step=True)
        Traceback (most recent call last):
          ...
        offbeat.errors.ConfigurationError: weight is a parameter of two wrapped optimizers, and the other one has stepped since this one \
was wrapped or stepped (0 steps then, 1 now). On the servers each has a copy of it, so that this step would undo the other's. Give each \
parameter to one optimizer (add the losses up), wrap the second one after the last step of the first, or take a rule whose workers step: \
full, majority, ensemble
        """
        for other, (name, seen) in self._shared.items() if servers_step else ():
            if other._steps > seen:
                raise ConfigurationError(
                    f"{name} is a parameter of two wrapped optimizers, and the other one has stepped since this one was wrapped or "
                    f"stepped ({seen} steps then, {other._steps} now). On the servers each has a copy of it, so that this step would undo "
                    "the other's. Give each parameter to one optimizer (add the losses up), wrap the second one after the last step of the "
                    "first, or take a rule whose workers step: full, majority, ensemble"
                )
        self._steps += 1

    def check(self) -> None:
        """Raise `ConfigurationError` if others have come, or have taken their places: no worker would train them.

        >>> model = nn.Linear(2, 1)
        >>> known = KnownParameters(torch.optim.SGD(model.parameters()), model)
        >>> model.bias = nn.Parameter(torch.zeros(1))
        >>> known.check()
        Traceback (most recent call last):
          ...
        offbeat.errors.ConfigurationError: bias is not the parameter that it was when the optimizer was wrapped, and the job does not \
train the new one: replace layers, and load with load_state_dict(assign=True), before the optimizer is made and wrapped
        """
        for name, parameter in self._frozen:
            if parameter.requires_grad and parameter.grad is not None:
                raise ConfigurationError(
                    f"{name} has a gradient, and was frozen (requires_grad=False) when the optimizer was wrapped: the job does not train "
                    "it. Wrap the optimizer while the parameter is trainable, in a parameter group of its own with lr=0, and set that "
                    "group's lr when its training begins; until then it may be frozen"
                )
        if (holds := sum(len(group["params"]) for group in self._optimizer.param_groups)) != self._held:
            raise ConfigurationError(
                f"the optimizer has {holds} parameters, and had {self._held} when it was wrapped: the job trains those only. Give an "
                "optimizer all its parameters before it is wrapped"
            )
        without = [(name, one) for name, one in self._trained if one.grad is None]
        if len(without) != self._without:
            self._without = len(without)
            present = {id(one) for one in self._model.parameters()}
            if (gone := next((name for name, one in without if id(one) not in present), None)) is not None:
                raise ConfigurationError(
                    f"{gone} is not the parameter that it was when the optimizer was wrapped, and the job does not train the new one: "
                    "replace layers, and load with load_state_dict(assign=True), before the optimizer is made and wrapped"
                )
