"""Keep this library's hooks out of pickles and copies of a model: they hold what belongs to this process and ends with it.

Without this, ``torch.save(model)``, of the whole model, raises in a worker of a job; and a copy of the model would measure as it does.
"""

from __future__ import annotations

import copyreg
from typing import Any

from torch import nn


def keep_out(module: nn.Module) -> None:
    """Leave the hooks of this library out when a module of this class is pickled or copied.

    Args:
        module: has hooks of this library, or gets them. A class that has its own entry in `copyreg.dispatch_table` keeps it.
    """
    copyreg.dispatch_table.setdefault(type(module), _reduced)


def _reduced(module: nn.Module) -> tuple[Any, ...]:
    reduced: Any = module.__reduce_ex__(2)
    function, arguments, *rest = reduced
    if rest and isinstance(state := rest[0], dict):
        hooks = [state.get(name, {}) for name in ("_forward_pre_hooks", "_forward_hooks")]
        ours = {key for each in hooks for key, hook in each.items() if str(getattr(hook, "__module__", "")).startswith("offbeat.")}
        kept = {
            name: type(each)((key, hook) for key, hook in each.items() if key not in ours)
            for name in ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")
            if (each := state.get(name)) and ours
        }
        rest[0] = state | kept
    return function, arguments, *rest
