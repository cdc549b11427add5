"""Check the options about checkpoints, before any process is started."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from offbeat.errors import ConfigurationError
from offbeat.runtime.job.checkpoint_folder import Checkpoint, CheckpointFolder, manifest_of
from offbeat.runtime.job.settings import CheckpointOrder

EVERY: Final = "600"
"""Seconds between two checkpoints, if the user does not choose."""
KEEP: Final = 2


def found(resume: Path | None) -> Checkpoint | None:
    """Return the newest complete checkpoint in the folder of ``--resume``, or the one that this folder is; None without the option.

    Raises:
        ConfigurationError: there is no complete checkpoint, or a newer version of offbeat has written it.
    """
    if resume is None:
        return None
    path = resume.absolute()
    manifest = manifest_of(path)
    checkpoint = CheckpointFolder(path).newest() if manifest is None else Checkpoint(path, manifest)
    if checkpoint is None:
        why = "there is no such folder" if not resume.is_dir() else "no complete checkpoint is in it (one that was cut off does not count)"
        raise ConfigurationError(f"--resume {resume}: {why}; name the folder of an earlier --checkpoint, or leave --resume out")
    return checkpoint


def order_of(checkpoint: Path | None, every: str | None, keep: int | None, resume: Checkpoint | None) -> CheckpointOrder | None:
    """Return what the options order; a job that resumes goes on with checkpoints in the same folder. None: no checkpoints.

    Raises:
        ConfigurationError: an option is wrong, or the folder has checkpoints of another job.
    """
    if checkpoint is None and resume is None:
        for option, value in (("--every", every), ("--keep", keep)):
            if value is not None:
                raise ConfigurationError(f"{option} {value}: there are no checkpoints; add --checkpoint DIR, or leave it out")
        return None
    kept = KEEP if keep is None else keep
    if kept < 1:
        raise ConfigurationError(f"--keep {kept}: must be at least 1")
    every_s, every_versions = interval(every or EVERY)
    own = None if resume is None else resume.path.parent
    path = own if checkpoint is None else checkpoint.absolute()
    assert path is not None
    folder = CheckpointFolder(path)
    folder.prepare()
    if path == own and resume is not None and (newest := folder.newest()) is not None and newest.version > resume.version:
        raise ConfigurationError(
            f"--resume {resume.path}: {path} has a newer checkpoint, of version {newest.version}, before which those of this job would not "
            "count; name another folder with --checkpoint, or remove the newer ones"
        )
    if path != own and (other := folder.newest()) is not None:
        raise ConfigurationError(
            f"--checkpoint {path}: it has checkpoints of an earlier job, the newest of version {other.version}; "
            f"go on from it with --resume {path}, or name another folder"
        )
    return CheckpointOrder(folder=str(path), every_s=every_s, every_versions=every_versions, keep=kept)


def interval(text: str) -> tuple[float | None, int | None]:
    """Return the seconds, or the versions, between two checkpoints.

    >>> interval("90"), interval("1.5s"), interval("500v"), interval("500versions")
    ((90.0, None), (1.5, None), (None, 500), (None, 500))
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|seconds?|v|versions?|)", text.strip())
    if match is not None:
        number, unit = match.groups()
        if not unit.startswith("v") and float(number) > 0:
            return float(number), None
        if unit.startswith("v") and number.isdecimal() and int(number) > 0:
            return None, int(number)
    raise ConfigurationError(f"--every {text}: must be seconds, such as 600, or versions of the model, such as 500v, and more than 0")


def taken_over(saved: Checkpoint | None, given: Callable[[str], bool], **values: Any) -> list[Any]:
    """Return the values of options: of a job that resumes, those of the checkpoint where the command line does not give them.

    Args:
        saved: the checkpoint; None: the job does not resume.
        given: returns True if the command line gives this option.
        values: the options, by name.

    Raises:
        ConfigurationError: the command line gives another seed, from which the order of samples is drawn.
    """
    if saved is None:
        return list(values.values())
    before = saved.manifest
    if "seed" in values and given("seed") and values["seed"] != before["seed"]:
        raise ConfigurationError(
            f"--seed {values['seed']}: the checkpoint is of a job with seed {before['seed']}, from which the order of samples is drawn; "
            "leave --seed out"
        )
    return [value if given(name) else before[name] for name, value in values.items()]


def check_rule(saved: Checkpoint | None, spelling: str | None) -> None:
    """Compare the rule of the command line, if it names one, with that of the checkpoint.

    Raises:
        ConfigurationError: they differ.
    """
    if saved is None or spelling is None:
        return
    before = saved.manifest["optimizers"][0]["sync"]
    if spelling != before:
        raise ConfigurationError(
            f"--sync '{spelling}': {saved.path} is of a job under {before}; "
            "leave --sync out, or load its model.pt in the script of a new job"
        )
