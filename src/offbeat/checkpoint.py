"""Checkpoints: `save` writes one file with everything that a script needs to resume, `load` reads it. The format is that of
`torch.save`."""

from __future__ import annotations

import contextlib
import os
import secrets
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offbeat import session as sessions
from offbeat.core.phases import Phase
from offbeat.errors import ConfigurationError
from offbeat.files import flush, system_error
from offbeat.optimizer import DistributedOptimizer
from offbeat.runtime.worker.process_state import buffers_of, load_buffers, random_state, set_random_state
from offbeat.sampler import Passes
from offbeat.session import Session, Snapshot
from offbeat.types import FIRST_WORKER

FORMAT = 1
"""The format number in the file's ``offbeat`` part."""
PARTS = ("model", "optimizer", "sampler", "scheduler", "random", "buffers", "offbeat", "own")


def save(
    path: str | os.PathLike[str],
    *,
    model: Any,
    optimizer: Any,
    sampler: Any = None,
    scheduler: Any = None,
    **own: Any,
) -> None:
    """Write a checkpoint, from which `load` resumes.

    Call it on every worker, at the same place of the script: the main process (`offbeat.chief`) writes the file, the others send the states
    of their random generators and their BatchNorm statistics, and do not wait. If only the main process calls it, the file lacks these
    parts. The file is either complete or absent: it is written under another name in the same folder, flushed to the disk, and renamed.

    ``torch.load(path, weights_only=True)`` reads it without offbeat: under ``"model"`` and ``"optimizer"`` it has the results of
    ``state_dict()``, under ``"own"`` the script's own values.

    Args:
        path: the path of the file; its folder must exist.
        model, optimizer, sampler, scheduler: one object each with a ``state_dict``, or a list or dict of them (a GAN's two models, say).
            ``sampler`` is that of `DistributedOptimizer.batch_sampler`.
        own: the script's own values: numbers, words, tensors, None, and lists, tuples and dicts of these.

    Raises:
        ConfigurationError: a value that ``weights_only=True`` would not read back.
        OSError: the file cannot be written, for instance on a full disk. A previous file of that name is unchanged.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
    >>> save("/tmp/offbeat-doctest.pt", model=model, optimizer=optimizer, epoch=3)
    >>> load("/tmp/offbeat-doctest.pt", model=model, optimizer=optimizer)
    {'epoch': 3}
    >>> list(torch.load("/tmp/offbeat-doctest.pt", weights_only=True)["model"])
    ['weight', 'bias']
    """
    own = _plain("the script's own values", own)
    ours = [o._session for o in _objects(optimizer) if isinstance(o, DistributedOptimizer)]
    session = ours[0] if ours else sessions.current
    with nullcontext() if session is None else session.phases.within(Phase.SAVE):
        _save(Path(path), session, ours, model=model, optimizer=optimizer, sampler=sampler, scheduler=scheduler, own=own)


def _save(
    path: Path, session: Session | None, ours: list[Session], *, model: Any, optimizer: Any, sampler: Any, scheduler: Any, own: Any
) -> None:
    """Carry out `save` for these sessions, of which ``session`` is the one that says who writes."""
    mine = {"random": random_state(), "buffers": buffers_of(_objects(model))}
    if session is not None and not session.chief:
        session.hand_in(mine)
        return
    snapshots: dict[int, Snapshot] = {id(one): one.snapshot() for one in ours}
    worker = session.worker if session is not None else FIRST_WORKER
    others = snapshots[id(session)].others if session is not None and id(session) in snapshots else {}
    parts = {**others, worker: mine}

    def optimizer_state(one: Any) -> Any:
        return snapshots[id(one._session)].optimizer if isinstance(one, DistributedOptimizer) else one.state_dict()

    def sampler_state(one: Any) -> Any:
        if isinstance(one, Passes) and id(one.session) in snapshots:
            return one.state_at(snapshots[id(one.session)].places.get(one.pool))
        return one.state_dict()

    content = {
        "model": _each(model, lambda one: one.state_dict()),
        "optimizer": _each(optimizer, optimizer_state),
        "sampler": _plain("the sampler's state", _each(sampler, sampler_state)),
        "scheduler": _plain("the scheduler's state", _each(scheduler, lambda one: one.state_dict())),
        "own": own,
        "random": {number: part["random"] for number, part in sorted(parts.items())},
        "buffers": {number: part["buffers"] for number, part in sorted(parts.items())},
        "offbeat": {
            "format": FORMAT,
            "version": session.version if session is not None else 0,
            "workers": len(parts),
            "steps": 0 if session is None else session.made,
            "barriers": 0 if session is None else session.barriers,
        },
    }
    _write(path, content)


def load(
    path: str | os.PathLike[str],
    *,
    model: Any,
    optimizer: Any,
    sampler: Any = None,
    scheduler: Any = None,
) -> dict[str, Any]:
    """Resume from a checkpoint of `save`.

    Call it on every worker, after wrapping the optimizer and before the first step. Only the objects given are loaded. A restarted worker,
    which joins a running job, keeps the job's parameters, optimizer state and place in the epoch; it takes from the file the sampler's
    epoch number, the schedulers, models and parameters that the optimizer does not train (an average of the weights, for example), and the
    script's own values.

    Args:
        path: the path of the file.
        model, optimizer, sampler, scheduler: as they were given to `save`.

    Returns:
        The script's own values.

    Raises:
        ConfigurationError: the file is damaged, is not a checkpoint of `save`, or has other objects; or a step has been made already.
        FileNotFoundError: there is no such file.
    """
    content = _read(Path(path))
    if not isinstance(content, dict) or not isinstance(content.get("offbeat"), dict) or set(PARTS) - set(content):
        raise ConfigurationError(f"{path} was not written by offbeat.save: read it with torch.load and load its parts yourself")
    if content["offbeat"]["format"] > FORMAT:
        raise ConfigurationError(
            f"{path} has format {content['offbeat']['format']}, but this offbeat reads up to {FORMAT}: use the version that wrote it"
        )
    wrapped = [o for o in _objects(optimizer) if isinstance(o, DistributedOptimizer)]
    session = wrapped[0]._session if wrapped else sessions.current
    resumes = session is None or session.resumes
    if resumes:
        _load_each("model", model, content["model"], lambda one, state: one.load_state_dict(state))
    else:
        trained = set[int]().union(*(one._known.trained for one in wrapped))
        _load_each("model", model, content["model"], lambda one, state: _load_own(one, state, trained))
    _load_each("optimizer", optimizer, content["optimizer"], lambda one, state: one.load_state_dict(state))
    _load_each("sampler", sampler, content["sampler"], lambda one, state: one.load_state_dict(state))
    _load_each("scheduler", scheduler, content["scheduler"], lambda one, state: one.load_state_dict(state))
    if session is not None:
        session.go_on(content["offbeat"].get("steps", 0), content["offbeat"].get("barriers", 0))
    worker = session.worker if session is not None else FIRST_WORKER
    if resumes and worker in content["random"]:
        load_buffers(_objects(model), content["buffers"][worker])
        set_random_state(content["random"][worker])
    own: dict[str, Any] = content["own"]
    return own


def _load_own(model: torch.nn.Module, state: dict[str, Any], trained: Collection[int]) -> None:
    """Load a model of the script's own, such as an average of the weights; of one that the job trains, what it does not train: the job has
    the rest."""
    if not any(id(parameter) in trained for parameter in model.parameters()):
        model.load_state_dict(state)
        return
    for key, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.nn.Parameter) and id(value) not in trained and key in state:
            value.data.copy_(state[key])


# One object, or several.


def _objects(given: Any) -> list[Any]:
    found: list[Any] = []
    _each(given, found.append)
    return found


def _each(given: Any, what: Callable[[Any], Any]) -> Any:
    """Return the result of ``what`` for one object, or for each in a list or dict, in the same structure."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return {name: what(one) for name, one in given.items()}
    return [what(one) for one in given] if isinstance(given, list | tuple) else what(given)


def _load_each(name: str, given: Any, saved: Any, what: Callable[[Any, Any], Any]) -> None:
    if given is None:
        return
    if saved is None:
        raise ConfigurationError(f"load({name}=...): the checkpoint has no {name}; leave it out, or give it to save")
    if isinstance(given, Mapping):
        if set(given) != set(saved):
            raise ConfigurationError(f"load({name}=...): the checkpoint has {sorted(saved)}, but {sorted(given)} were given; pass the same")
        for key, one in given.items():
            what(one, saved[key])
    elif isinstance(given, list | tuple):
        if not isinstance(saved, list) or len(saved) != len(given):
            saved_as = f"a list of {len(saved)}" if isinstance(saved, list) else "no list"
            raise ConfigurationError(f"load({name}=...): got a list of {len(given)}, but {saved_as} was saved; pass what was saved")
        for one, state in zip(given, saved, strict=True):
            what(one, state)
    else:
        what(given, saved)


# The file.


def _plain(where: str, value: Any) -> Any:
    """Return the value with NumPy's numbers as Python's, so that ``weights_only=True`` reads it back.

    Raises:
        ConfigurationError: the value has a type that ``weights_only=True`` refuses.
    """
    if isinstance(value, np.generic):
        return value.item()
    if value is None or type(value) in (bool, int, float, complex, str, bytes) or isinstance(value, torch.Tensor):
        return value
    if type(value) in (list, tuple, set):
        return type(value)(_plain(f"{where}[{number}]", item) for number, item in enumerate(value))
    if type(value) is dict:
        return {_plain(f"a key of {where}", key): _plain(f"{where}[{key!r}]", item) for key, item in value.items()}
    if type(value) in (Counter, OrderedDict):
        return value
    raise ConfigurationError(
        f"save: {where} is a {type(value).__module__}.{type(value).__qualname__}, which torch.load(weights_only=True) refuses: "
        "save numbers, words, tensors, and lists and dicts of these"
    )


def _read(path: Path) -> Any:
    """Return the content of a file, each part of which has the checksum that `torch.save` has written: `torch.load` does not look.

    Raises:
        ConfigurationError: the file is damaged, or not one of `torch.save`.
        OSError: it cannot be opened.
    """
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as parts:
                broken = parts.testzip()
            if broken is None:
                file.seek(0)
                return torch.load(file, weights_only=True, map_location="cpu")
            reason = f"its part {broken!r} has other bytes than were written"
        except Exception as error:  # whatever the readers raise about bytes that are not their own
            reason = (str(error) or type(error).__name__).splitlines()[0]
    raise ConfigurationError(f"{path} is damaged, or was not written by offbeat.save ({reason}): load an older file")


@contextlib.contextmanager
def _checksums() -> Iterator[None]:
    """Have `torch.save` write the checksums that `_read` compares, whatever the script has chosen for its own files."""
    chosen = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(chosen)


def _write(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            with _checksums():
                torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, RuntimeError) and (first := system_error(error)) is not None:
            raise first from None  # such as a full disk, of which PyTorch says nothing
        raise
    flush(path.parent)
