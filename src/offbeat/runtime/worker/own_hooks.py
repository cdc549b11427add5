"""Watch the forward passes of a model by hooks that stay out of what a script makes of the model: pickles, copies and TorchScript.

The hooks hold what belongs to this process and ends with it, and TorchScript would compile them: without this, ``torch.save(model)`` of the
whole model and ``torch.jit.script(model)`` raise in a worker of a job, and a copy of the model would measure as it does.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")


def hook_forward(module: nn.Module, before: Callable[..., None], after: Callable[..., None] | None = None) -> list[RemovableHandle]:
    """Have functions of this library called before and after each forward pass of a module. Returns what takes the hooks off.

    A module that TorchScript has compiled takes no hooks, and is not watched. A class that has its own entry in `copyreg.dispatch_table`
    keeps it.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return []
    copyreg.dispatch_table.setdefault(type(module), _reduced)
    handles = [module.register_forward_pre_hook(before)]
    if after is not None:
        handles.append(module.register_forward_hook(after, always_call=True))
    return handles


def unhooked(script: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.jit.script`, which compiles a model without the hooks of this library."""

    @functools.wraps(script)
    def scripted(obj: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(obj, nn.Module):  # of a class, torch looks up names in the caller's frame
            return script(obj, *args, **kwargs | {"_frames_up": kwargs.get("_frames_up", 0) + 1})
        with _taken_off(obj):
            return script(obj, *args, **kwargs)

    return scripted


@contextmanager
def _taken_off(model: nn.Module) -> Iterator[None]:
    others = [(module, _others(module.__dict__)) for module in model.modules()]
    before = [(module, {name: module.__dict__[name] for name in hooks}) for module, hooks in others]
    for module, hooks in others:
        module.__dict__.update(hooks)
    try:
        yield
    finally:
        for module, hooks in before:
            module.__dict__.update(hooks)


def _others(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hooks of a module that has some of this library, without these."""
    hooks = [state.get(name, {}) for name in _HOOKS[:2]]
    ours = {key for each in hooks for key, hook in each.items() if str(getattr(hook, "__module__", "")).startswith("offbeat.")}
    return {
        name: type(each)((key, hook) for key, hook in each.items() if key not in ours)
        for name in _HOOKS
        if ours and (each := state.get(name))
    }


def _reduced(module: nn.Module) -> tuple[Any, ...]:
    reduced: Any = module.__reduce_ex__(2)
    function, arguments, *rest = reduced
    if rest and isinstance(state := rest[0], dict):
        rest[0] = state | _others(state)
    return function, arguments, *rest
