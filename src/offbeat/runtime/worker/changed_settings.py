"""Compare the settings of a resumed script with those of the earlier job's script, and describe which are in use.

A resumed job goes on with the checkpoint's settings: learning rates are in the middle of a schedule, of which the script's own values are
the beginning. So the script's settings at its first batch are compared with those that the earlier script had at its first batch. The user
has changed the settings that differ, and expects the new values to be used. Or the script has passed over epochs that are over, and so has
stepped its schedulers to the values of the checkpoint: those need no word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

FOLLOWS: Final = ("initial_lr", "params", "last_epoch", "base_lrs", "best", "num_bad_epochs", "cooldown_counter")
"""Settings that a scheduler derives from others, or counters: the user does not set them."""


def differences(now: Mapping[str, Any], before: Mapping[str, Any], used: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each setting that the user has changed, with the value in use.

    Args:
        now, before: parameter groups and schedulers of the resumed script and of the earlier script, each at its first batch.
        used: parameter groups and schedulers of the checkpoint.

    >>> group = {"lr": 0.1, "momentum": 0.9}
    >>> then = {"groups": [group], "schedulers": []}
    >>> differences({"groups": [{**group, "lr": 0.01}], "schedulers": []}, then, {"groups": [{**group, "lr": 0.05}], "schedulers": []})
    ['lr = 0.05 is used (script: 0.01; set optimizer.param_groups[0]["lr"] after the first batch)']
    """
    return [*_groups(now["groups"], before["groups"], used["groups"]), *_schedulers(now["schedulers"], before["schedulers"], used)]


def _groups(now: Sequence[Any], before: Sequence[Any], used: Sequence[Any]) -> Iterator[str]:
    if len(now) != len(used):
        yield f"the settings of {min(len(now), len(used))} parameter groups are used (script: {len(now)} groups, checkpoint: {len(used)})"
    for number, (new, old, taken) in enumerate(zip(now, before, used, strict=False)):
        of = f" of parameter group {number}" if len(now) > 1 else ""
        for name in _changed(new, old, taken):
            script = f'script: {_shown(new[name])}; set optimizer.param_groups[{number}]["{name}"] after the first batch'
            yield f"{name} = {_shown(taken.get(name))}{of} is used ({script})"


def _schedulers(now: Sequence[Any], before: Sequence[Any], used: Mapping[str, Any]) -> Iterator[str]:
    names, olds = [one["class"] for one in now], [one["class"] for one in before]
    if names != olds:
        yield f"schedulers are {', '.join(names) or 'none'} in the script, and were {', '.join(olds) or 'none'}: a new one begins anew"
        return
    for new, old, taken in zip(now, before, used["schedulers"], strict=False):
        for name in _changed(new["state"], old["state"], taken["state"]):
            script = f"script: {_shown(new['state'][name])}; set it on the scheduler after the first batch"
            yield f"{name} = {_shown(taken['state'].get(name))} of {new['class']} is used ({script})"


def _changed(new: Mapping[str, Any], old: Mapping[str, Any], used: Mapping[str, Any]) -> list[str]:
    """Return the settings that are new, and not in use: a script that computes them from `offbeat.steps` has those of its place already."""
    names = [name for name in new if name in old and name not in FOLLOWS and name[0] != "_"]
    return [name for name in names if not _alike(new[name], old[name]) and not _alike(new[name], used.get(name))]


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(one.cpu(), other.cpu()))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    return bool(one == other)


def _shown(value: Any) -> str:
    return str(value.tolist() if isinstance(value, torch.Tensor) else value)[:60]
