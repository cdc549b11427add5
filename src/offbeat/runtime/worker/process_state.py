"""Read and set the state of one process that a version of the model does not include: random generators, buffers and schedulers.

An optimizer has no list of its schedulers (``torch.optim.lr_scheduler``), so `watch_schedulers` notes each one that is made.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import ref

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from offbeat.runtime.job.packing import packs

One = TypeVar("One")
_schedulers: list[ref[LRScheduler]] | None = None
"""All schedulers, in the order in which they were made; None: they are not watched yet."""


def random_state() -> dict[str, Any]:
    """Return the state of this process's random generators: torch's, NumPy's, Python's, and CUDA's if it is in use."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the random generators to what `random_state` has returned."""
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def buffers_of(models: Iterable[torch.nn.Module]) -> list[dict[str, torch.Tensor]]:
    """Return a copy of each model's buffers, by name; those that cannot be sent are left out."""
    return [{name: buffer.detach().clone() for name, buffer in model.named_buffers() if packs(buffer)} for model in models]


def load_buffers(models: Iterable[torch.nn.Module], saved: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Set the models' buffers to what `buffers_of` has returned; a buffer that is missing or of another shape stays as it is.

    Parameters without a gradient that are among them, by which a script keeps an average of the weights, are set as well.
    """
    with torch.no_grad():
        for model, buffers in zip(models, saved, strict=False):
            for name, tensor in (*model.named_buffers(), *model.named_parameters()):
                if name in buffers and buffers[name].shape == tensor.shape and not tensor.requires_grad:
                    tensor.copy_(buffers[name])


def instances_of(base: type[One]) -> list[One]:
    """Return all objects of this class, which is defined in Python, and of its subclasses.

    `gc.get_objects` would hold each object of the process for a moment, also a tuple that another thread is still filling. CPython then
    raises a SystemError in the other thread, since it cannot give a tuple its final length while two places refer to the tuple.
    """
    classes, new = [], [base]
    while new:
        classes.append(new.pop())
        new += classes[-1].__subclasses__()
    return [one for one in gc.get_referrers(*classes) if issubclass(type(one), base)]


def watch_schedulers() -> None:
    """Note every scheduler of this process, existing and future. Further calls do nothing."""
    global _schedulers
    if _schedulers is not None:
        return
    _schedulers = found = [ref(one) for one in instances_of(LRScheduler)]

    def noted(cls: type[LRScheduler], *_: Any, **__: Any) -> LRScheduler:
        scheduler: LRScheduler = object.__new__(cls)
        found.append(ref(scheduler))
        return scheduler

    # Several classes of schedulers do not call the base's __init__; each object passes through __new__.
    LRScheduler.__new__ = staticmethod(noted)  # type: ignore[assignment, method-assign]


def schedulers_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[LRScheduler]:
    """Return the living schedulers of these optimizers, in the order in which they were made."""
    living = [one() for one in _schedulers or ()]
    return [one for one in living if one is not None and any(getattr(one, "optimizer", None) is optimizer for optimizer in optimizers)]


def scheduler_states(schedulers: Iterable[LRScheduler]) -> list[dict[str, Any]]:
    """Return each scheduler's class name and state. Values that are not plain, such as functions, are left out."""
    return [
        {"class": type(one).__name__, "state": {key: value for key, value in one.state_dict().items() if is_plain(value)}}
        for one in schedulers
    ]


def is_plain(value: Any) -> bool:
    """Return True for None, numbers, strings and tensors that can be sent, and for lists, tuples and dicts of these."""
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return packs(value) if isinstance(value, torch.Tensor) else value is None or isinstance(value, bool | int | float | str)


def load_schedulers(schedulers: Sequence[LRScheduler], saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """Set each scheduler to the next state of its class among those that `scheduler_states` has returned.

    Returns:
        The class of each saved state for which there is no scheduler.
    """
    waiting = list(saved)
    for scheduler in schedulers:
        found = next((one for one in waiting if one["class"] == type(scheduler).__name__), None)
        if found is not None:
            waiting.remove(found)
            scheduler.load_state_dict({**scheduler.state_dict(), **_with_types_of(vars(scheduler), found["state"])})
    return [one["class"] for one in waiting]


def _with_types_of(present: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved values, with a `Counter` where the present object has one: in a message it has become a dict."""
    return {key: Counter(value) if isinstance(present.get(key), Counter) else value for key, value in saved.items()}
