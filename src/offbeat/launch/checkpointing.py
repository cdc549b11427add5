"""Check the options for checkpoints, and prepare their files, before any process is started."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offbeat.errors import ConfigurationError
from offbeat.journal.epoch_reports import epoch_words
from offbeat.runtime.job.checkpoint_folder import COMPLETE, MANIFEST, Checkpoint, CheckpointFolder, Damaged, Unsound, sound_manifest
from offbeat.runtime.job.settings import CheckpointOrder

EVERY: Final = "600"
"""Seconds between two checkpoints by default."""
KEEP: Final = 2


@dataclass
class Results:
    """Record the results of a job's checkpoints so far, for its outcome.

    >>> results = Results()
    >>> results.add(20, None)
    >>> results.add(40, "No space left on device")
    >>> results.missing()
    'the last checkpoint failed (No space left on device): 1 of 2 failed, and the newest one is of version 20'
    """

    newest: int | None = None
    """Version of the newest checkpoint that was made; None: there is none."""
    made: int = 0
    failed: int = 0
    ended: bool = False
    """True once server 0 has reported the result of the checkpoint after which the job ends."""
    reason: str | None = None
    """The reason for which the last checkpoint failed; None: it was made."""

    def add(self, version: int, failed: str | None, *, last: bool = False) -> None:
        """Add a checkpoint's result. ``failed``: the reason if it failed; ``last``: it is the one after which the job ends."""
        self.ended = self.ended or last
        if last and failed is None and version == self.newest:
            return  # nothing has been folded since the checkpoint before
        self.reason = failed
        if failed is None:
            self.newest, self.made = version, self.made + 1
        else:
            self.failed += 1

    def missing(self) -> str | None:
        """Return, as a sentence, what is missing at the job's end; None: the last checkpoint was made, or there was to be none."""
        if self.reason is None:
            return None
        left = "this job has made none" if self.newest is None else f"the newest one is of version {self.newest}"
        return f"the last checkpoint failed ({self.reason}): {self.failed} of {self.failed + self.made} failed, and {left}"


def found(resume: Path | None, *, auto: bool = False, checkpoint: Path | None = None) -> Checkpoint | None:
    """Return the checkpoint from which the job resumes; None: it begins anew.

    Args:
        resume: the folder of ``--resume``: one checkpoint, or a folder whose newest sound checkpoint is taken.
        auto: True with ``--auto-resume``: take the newest sound checkpoint in the folder of ``--checkpoint``, if any was completed there.
        checkpoint: the folder of ``--checkpoint``.

    Raises:
        ConfigurationError: the options contradict each other, there is no sound checkpoint in the folder of ``--resume``, or another
            version of offbeat has written it.
    """
    check_folders(resume, auto=auto, checkpoint=checkpoint)
    if auto and checkpoint is not None:
        return _newest(checkpoint, "--auto-resume with --checkpoint")
    if resume is None:
        return None
    return _newest(resume, "--resume") if not _is_checkpoint(resume) else _named(resume)


def _newest(given: Path, option: str) -> Checkpoint | None:
    """Return the newest sound checkpoint in a folder; None with ``--auto-resume``: none was ever completed there."""
    saved, damaged = CheckpointFolder(given.absolute()).search()
    if saved is None and damaged:
        listed = "; ".join(f"{one.path.name}: {one.reason}" for one in damaged)
        raise ConfigurationError(f"{option} {given}: no checkpoint in it is as it was written ({listed}); name another folder")
    if saved is None and option == "--resume":
        why = "there is no such folder" if not given.is_dir() else "no complete checkpoint is in it (one that was cut off does not count)"
        raise ConfigurationError(f"--resume {given}: {why}; name the folder of an earlier --checkpoint, or leave --resume out")
    return saved


def _is_checkpoint(path: Path) -> bool:
    """Return True if a path is one checkpoint, possibly damaged, and not a folder of checkpoints."""
    return (path / MANIFEST).exists() or (path.name.startswith(COMPLETE) and not CheckpointFolder(path.absolute()).versions())


def _named(resume: Path) -> Checkpoint:
    """Return the checkpoint at the path that the user has given."""
    path = resume.absolute()
    try:
        return Checkpoint(path, sound_manifest(path))
    except Unsound as error:
        if not path.is_dir():
            raise ConfigurationError(f"--resume {resume}: there is no such folder; name the folder of an earlier --checkpoint") from None
        other = CheckpointFolder(path.parent).newest()
        advice = "name another one" if other is None else f"--resume {resume.parent} goes on from version {other.version}"
        raise ConfigurationError(f"--resume {resume}: this checkpoint is damaged: {error}; {advice}") from None


def check_folders(resume: Path | None, *, auto: bool, checkpoint: Path | None) -> None:
    """Check the folders with ``--auto-resume``, without reading them. Arguments are those of `found`.

    Raises:
        ConfigurationError: the options contradict each other.
    """
    if auto and checkpoint is None:
        raise ConfigurationError("--auto-resume: there is no folder with checkpoints; add --checkpoint DIR, or use --resume DIR")
    if auto and resume is not None:
        raise ConfigurationError(f"--auto-resume goes on from {checkpoint}, and --resume {resume} from another folder; leave one out")


def check_spelling(every: str | None, keep: int | None, *, any_folder: bool) -> tuple[float | None, int | None, int]:
    """Return the meaning of ``--every`` and ``--keep``: the seconds, or the versions, between two checkpoints, and the number to keep.

    Args:
        every, keep: the options; None: not given.
        any_folder: True if ``--checkpoint`` or ``--resume`` gives a folder.

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
    """Return the order for checkpoints; None: no checkpoints. A job that resumes writes to the same folder unless another is given.

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
    aside = () if resume is None else [one.path for one in resume.passed_over]
    others = [version for version, folder_of in folder.versions() if folder_of not in aside]
    if path == own and resume is not None and others and others[0] > resume.version:
        raise ConfigurationError(
            f"--resume {resume.path}: {path} has a newer checkpoint, of version {others[0]}, before which those of this job would not "
            "count; name another folder with --checkpoint, or remove the newer ones"
        )
    if path != own and others:
        raise ConfigurationError(
            f"--checkpoint {path}: it has checkpoints of an earlier job, the newest of version {others[0]}; "
            f"go on from it with --resume {path} or --auto-resume, or name another folder"
        )
    return CheckpointOrder(folder=str(path), every_s=every_s, every_versions=every_versions, keep=kept)


def begin(journal: Path | None, saved: Checkpoint | None, order: CheckpointOrder | None) -> list[str]:
    """Prepare the files of a job that resumes, before any process is started. Returns lines for the user.

    The earlier job's journal is renamed: ``run.jsonl`` to ``run.1.jsonl``, or the first free number. So is each damaged checkpoint that is
    newer than the resumed one, if it is in this job's folder. A file that cannot be renamed is left.
    """
    if saved is None:
        return []
    _keep_journal(journal)
    lines = [
        f"{one.path} is damaged: {one.reason}; {one.version - saved.version} versions are repeated, from version {saved.version} on"
        + _set_aside(one, order)
        for one in saved.passed_over
    ]
    try:
        foreign = sorted({path.name for path in saved.path.iterdir()} - {MANIFEST, *saved.manifest["files"]})
    except OSError:
        foreign = []
    lines += [f"{saved.path / name} is no file of the checkpoint, and is not read" for name in foreign]
    return [*lines, f"going on from {saved.path}, version {saved.version}{_place(saved)}"]


def _place(saved: Checkpoint) -> str:
    """Return, in words, which epochs a resumed script passes over before it trains, and what becomes of its own count of steps."""
    if saved.manifest.get("finished", False):
        return ": the job had finished there, and trains on if its script asks for more"
    places = [dict(optimizer["places"]) for optimizer in saved.manifest["optimizers"] if optimizer.get("places")]
    epochs = {pool: place["epoch"] + (place.get("rest") == []) for pool, place in places[0].items()} if places else {}
    own = "its own count of steps begins at 0 (offbeat.steps goes on where the job was)"
    if not any(epochs.values()):
        return f": the script begins at its top; {own}"
    newest, epoch = max(epochs), max(epochs.values())
    if epochs[newest] < epoch:  # the script makes its loader anew, for each epoch or for each fold
        place, over = epoch_words(epochs[newest], newest), "what is before is over: it gets"
    else:
        place, over = str(epoch), "epoch 0 is over: it gets" if epoch == 1 else f"epochs 0 to {epoch - 1} are over: they get"
    again = "what the script does after them, such as an evaluation, is done again, unless it counts with offbeat.epochs"
    return f", in epoch {place}; {over} no batches, and {again}; {own}"


def _set_aside(damaged: Damaged, order: CheckpointOrder | None) -> str:
    """Rename a damaged checkpoint if it is in the folder of this job's checkpoints, where it would count as newer than they."""
    if order is None or Path(order.folder) != damaged.path.parent:
        return ""
    try:
        return f" (the folder is now {CheckpointFolder(damaged.path.parent).set_aside(damaged).name})"
    except OSError as error:
        return f" (it stays in the way of newer ones, since it cannot be renamed: {error.strerror})"


def _keep_journal(journal: Path | None) -> None:
    if journal is None or not journal.is_file():
        return
    name, dot, kind = journal.name.partition(".")
    number = 1
    while (former := journal.with_name(f"{name}.{number}{dot}{kind}")).exists():
        number += 1
    with contextlib.suppress(OSError):
        journal.rename(former)


def interval(text: str) -> tuple[float | None, int | None]:
    """Return the seconds, or the versions, between two checkpoints, from the text of ``--every``.

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


def taken_over(saved: Checkpoint | None, given: Callable[[str], bool], names: Sequence[str], *, seed: int) -> dict[str, Any]:
    """Return the options that a resumed job takes from its checkpoint, by name: those that the command line does not give.

    Args:
        saved: the checkpoint; None: the job does not resume.
        given: returns True if the command line gives this option.
        names: names of these options.
        seed: the command line's seed.

    Raises:
        ConfigurationError: the command line gives another seed, from which the order of samples is drawn.
    """
    before = {} if saved is None else dict(saved.manifest)
    if before.get("least", 0) < before.get("workers", 0) and "least" in before:
        before["workers"] = f"{before['least']}..{before['workers']}"
    if "seed" in before and given("seed") and seed != before["seed"]:
        raise ConfigurationError(
            f"--seed {seed}: the checkpoint is of a job with seed {before['seed']}, from which the order of samples is drawn; "
            "leave --seed out"
        )
    return {name: before[name] for name in names if name in before and not given(name)}


def check_rule(saved: Checkpoint | None, spelling: str | None) -> None:
    """Compare the rule of the command line, if it names one, with the checkpoint's rule.

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
