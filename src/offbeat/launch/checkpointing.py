"""Check the options about checkpoints, before any process is started."""

from __future__ import annotations

import contextlib
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


def found(resume: Path | None, *, auto: bool = False, checkpoint: Path | None = None) -> Checkpoint | None:
    """Return the checkpoint from which the job goes on; None: it begins anew.

    Args:
        resume: the folder of ``--resume``: the newest complete checkpoint in it, or the one that this folder is.
        auto: True with ``--auto-resume``: the newest complete checkpoint in the folder of ``--checkpoint``, if there is one.
        checkpoint: the folder of ``--checkpoint``.

    Raises:
        ConfigurationError: the options contradict each other, there is no complete checkpoint in the folder of ``--resume``, or a newer
            version of offbeat has written it.
    """
    check_folders(resume, auto=auto, checkpoint=checkpoint)
    if auto and checkpoint is not None:
        return CheckpointFolder(checkpoint.absolute()).newest()
    if resume is None:
        return None
    path = resume.absolute()
    manifest = manifest_of(path)
    saved = CheckpointFolder(path).newest() if manifest is None else Checkpoint(path, manifest)
    if saved is None:
        why = "there is no such folder" if not resume.is_dir() else "no complete checkpoint is in it (one that was cut off does not count)"
        raise ConfigurationError(f"--resume {resume}: {why}; name the folder of an earlier --checkpoint, or leave --resume out")
    return saved


def check_folders(resume: Path | None, *, auto: bool, checkpoint: Path | None) -> None:
    """Check which folders ``--auto-resume`` has to do with, without a look into them. Arguments are those of `found`.

    Raises:
        ConfigurationError: the options contradict each other.
    """
    if auto and checkpoint is None:
        raise ConfigurationError("--auto-resume: there is no folder with checkpoints; add --checkpoint DIR, or use --resume DIR")
    if auto and resume is not None:
        raise ConfigurationError(f"--auto-resume goes on from {checkpoint}, and --resume {resume} from another folder; leave one out")


def check_spelling(every: str | None, keep: int | None, *, any_folder: bool) -> tuple[float | None, int | None, int]:
    """Return what ``--every`` and ``--keep`` say: seconds or versions between two checkpoints, and how many are kept.

    Args:
        every, keep: the options; None: not given.
        any_folder: whether a folder is given, with ``--checkpoint`` or ``--resume``.

    Raises:
        ConfigurationError: an option is wrong, or there is no folder.

    >>> check_spelling("500v", None, any_folder=True)
    (None, 500, 2)
    """
    if not any_folder:
        for option, value in (("--every", every), ("--keep", keep)):
            if value is not None:
                raise ConfigurationError(f"{option} {value}: there are no checkpoints; add --checkpoint DIR, or leave it out")
    kept = KEEP if keep is None else keep
    if kept < 1:
        raise ConfigurationError(f"--keep {kept}: must be at least 1")
    return *interval(every or EVERY), kept


def order_of(checkpoint: Path | None, every: str | None, keep: int | None, resume: Checkpoint | None) -> CheckpointOrder | None:
    """Return what the options order; a job that resumes goes on with checkpoints in the same folder. None: no checkpoints.

    Raises:
        ConfigurationError: an option is wrong, or the folder has checkpoints of another job.
    """
    every_s, every_versions, kept = check_spelling(every, keep, any_folder=checkpoint is not None or resume is not None)
    if checkpoint is None and resume is None:
        return None
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
            f"go on from it with --resume {path} or --auto-resume, or name another folder"
        )
    return CheckpointOrder(folder=str(path), every_s=every_s, every_versions=every_versions, keep=kept)


def keep_journal(journal: Path | None, saved: Checkpoint | None) -> None:
    """Give the journal of the job before another name, so that that of the resumed job does not replace it.

    ``run.jsonl`` becomes ``run.1.jsonl``, or the first free number. A file that cannot be renamed is left to its fate.
    """
    if journal is None or saved is None or not journal.is_file():
        return
    name, dot, kind = journal.name.partition(".")
    number = 1
    while (former := journal.with_name(f"{name}.{number}{dot}{kind}")).exists():
        number += 1
    with contextlib.suppress(OSError):
        journal.rename(former)


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
