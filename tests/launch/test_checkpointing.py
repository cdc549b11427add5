"""The options about checkpoints, and what a resumed job takes over from the one before."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat import cli
from offbeat.errors import ConfigurationError
from offbeat.launch import checkpointing
from offbeat.runtime.job.checkpoint_folder import CheckpointFolder
from offbeat.runtime.job.settings import CheckpointOrder

MANIFEST = {"version": 7, "seed": 3, "workers": 4, "servers": 2, "sync": None, "wire": "bf16", "optimizers": [{"sync": "ssp(staleness=3)"}]}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with one checkpoint."""
    folder = CheckpointFolder(tmp_path / "job")
    folder.prepare()
    folder.finish(folder.begin(7), MANIFEST)
    return folder.path


@pytest.mark.parametrize("text", ["0", "-1", "1.5v", "0v", "v", "ten", "1e3", "inf", "5m", ""])
def test_an_interval_that_is_none(text: str) -> None:
    with pytest.raises(ConfigurationError, match="must be seconds, such as 600, or versions of the model, such as 500v"):
        checkpointing.interval(text)


def test_what_the_options_order(tmp_path: Path, job: Path) -> None:
    assert checkpointing.order_of(None, None, None, None) is None
    new = checkpointing.order_of(tmp_path / "new", None, None, None)
    assert new == CheckpointOrder(folder=str(tmp_path / "new"), every_s=600.0, keep=2)
    resumed = checkpointing.order_of(None, "50v", 5, checkpointing.found(job))
    assert resumed == CheckpointOrder(folder=str(job), every_versions=50, keep=5), "a resumed job goes on with checkpoints"
    elsewhere = checkpointing.order_of(tmp_path / "new", None, None, checkpointing.found(job))
    assert elsewhere is not None and elsewhere.folder == str(tmp_path / "new")


def test_options_that_do_not_fit(tmp_path: Path, job: Path) -> None:
    for every, keep, message in (("9", None, "--every 9: there are no checkpoints"), (None, 3, "--keep 3: there are no checkpoints")):
        with pytest.raises(ConfigurationError, match=message):
            checkpointing.order_of(None, every, keep, None)
    with pytest.raises(ConfigurationError, match="--keep 0: must be at least 1"):
        checkpointing.order_of(tmp_path / "new", None, 0, None)
    with pytest.raises(
        ConfigurationError, match=r"it has checkpoints of an earlier job, the newest of version 7; go on from it with --resume"
    ):
        checkpointing.order_of(job, None, None, None)


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    assert checkpointing.found(None) is None
    with pytest.raises(ConfigurationError, match=r"--resume .*/none: there is no such folder"):
        checkpointing.found(tmp_path / "none")
    CheckpointFolder(tmp_path).begin(3)
    with pytest.raises(ConfigurationError, match="no complete checkpoint is in it"):
        checkpointing.found(tmp_path)


def test_the_same_command_begins_the_job_and_goes_on_with_it(tmp_path: Path, job: Path) -> None:
    assert checkpointing.found(None, auto=True, checkpoint=tmp_path / "none") is None
    saved = checkpointing.found(None, auto=True, checkpoint=job)
    assert saved is not None and saved.version == 7
    assert checkpointing.order_of(job, None, None, saved) is not None, "in the same folder"
    with pytest.raises(ConfigurationError, match="--auto-resume: there is no folder with checkpoints; add --checkpoint DIR"):
        checkpointing.found(None, auto=True)
    with pytest.raises(ConfigurationError, match=r"--auto-resume goes on from .*job, and --resume .*none from another folder"):
        checkpointing.found(tmp_path / "none", auto=True, checkpoint=job)


def flipped(path: Path) -> None:
    changed = bytearray(path.read_bytes())
    changed[len(changed) // 2] ^= 0x40
    path.write_bytes(changed)


@pytest.fixture
def damaged(job: Path) -> Path:
    """The folder of a job whose newest checkpoint, of version 9, is damaged."""
    folder = CheckpointFolder(job)
    made = folder.begin(9)
    (made / "model.pt").write_bytes(b"parameters")
    flipped(folder.finish(made, {**MANIFEST, "version": 9}) / "model.pt")
    return job


def test_a_damaged_one_is_named_and_the_next_older_one_taken(damaged: Path) -> None:
    for saved in (checkpointing.found(damaged), checkpointing.found(None, auto=True, checkpoint=damaged)):
        assert saved is not None and saved.version == 7
    order = checkpointing.order_of(None, None, None, saved)
    told, resumes = checkpointing.begin(None, saved, order)
    assert re.search(r"version-00000009 is damaged: model.pt has other bytes than were written .*; 2 versions are repeated, from ver", told)
    assert resumes.startswith(f"going on from {damaged / 'version-00000007'}, version 7: the script begins at its top")
    assert {path.name for path in damaged.iterdir()} == {"version-00000007", "damaged-version-00000009"}, "it counts for newer no more"
    assert checkpointing.begin(None, checkpointing.found(damaged), order) == [resumes]


def test_a_damaged_one_stays_where_it_is_if_the_job_writes_elsewhere(damaged: Path, tmp_path: Path) -> None:
    saved = checkpointing.found(damaged)
    told = checkpointing.begin(None, saved, checkpointing.order_of(tmp_path / "new", None, None, saved))
    assert len(told) == 2 and (damaged / "version-00000009").is_dir()


def test_a_damaged_one_that_the_user_has_named_is_refused(damaged: Path) -> None:
    named = damaged / "version-00000009"
    with pytest.raises(ConfigurationError, match=r"this checkpoint is damaged: model.pt has .*; --resume .*/job goes on from version 7"):
        checkpointing.found(named)
    (named / "checkpoint.json").unlink()
    with pytest.raises(ConfigurationError, match=r"this checkpoint is damaged: checkpoint.json is missing"):
        checkpointing.found(named)
    assert checkpointing.found(damaged / "version-00000007") is not None


@pytest.mark.parametrize("options", [["--resume"], ["--auto-resume", "--checkpoint"]])
def test_a_folder_without_a_sound_one_ends_the_command_before_a_process_starts(damaged: Path, options: list[str]) -> None:
    """A new job in its place would hide the loss."""
    flipped(damaged / "version-00000007" / "checkpoint.json")
    script = str(Path(__file__).parents[1] / "faults" / "scripts" / "train.py")
    with pytest.raises(ConfigurationError, match=r"no checkpoint in it is as it was written \(version-00000009: .*; version-00000007: "):
        CliRunner().invoke(cli.app, ["run", *options, str(damaged), script], catch_exceptions=False)


@pytest.mark.parametrize(
    ("finished", "epochs", "words"),
    [
        (False, [], "version 8: the script begins at its top; its own count of steps begins at 0"),
        (False, [0], "version 8: the script begins at its top; its own count of steps begins at 0"),
        (False, [1], "version 8, in epoch 1; epoch 0 is over: it gets no batches, and what the script does after them, such as"),
        (False, [5, 5], "version 8, in epoch 5; epochs 0 to 4 are over: they get no batches, and what the script does after"),
        (False, [1, 1, 0], "version 8, in epoch 0 of loader 2; what is before is over: it gets no batches, and what the script does after"),
        (True, [5], "version 8: the job had finished there, and trains on if its script asks for more"),
    ],
)
def test_a_resumption_says_from_where(job: Path, finished: bool, epochs: list[int], words: str) -> None:
    folder = CheckpointFolder(job)
    optimizers = [{"sync": "bsp", "places": [[pool, {"epoch": epoch}] for pool, epoch in enumerate(epochs)]}]
    folder.finish(folder.begin(8), {**MANIFEST, "version": 8, "finished": finished, "optimizers": optimizers})
    [told] = checkpointing.begin(None, checkpointing.found(job), None)
    assert told.startswith(f"going on from {job / 'version-00000008'}, {words}")
    assert finished or "count of steps begins at 0 (offbeat.steps goes on where the job was)" in told


def test_what_is_missing_at_the_end_is_counted() -> None:
    results = checkpointing.Results()
    results.add(20, None)
    results.add(20, None, last=True)
    assert (results.made, results.ended, results.missing()) == (1, True, None), "one of the same version was there"
    results.add(40, "No space left on device")
    assert results.missing() == "the last checkpoint failed (No space left on device): 1 of 2 failed, and the newest one is of version 20"
    results.add(40, None, last=True)
    assert (results.newest, results.missing()) == (40, None), "the job's end has made the one that had failed, of the same version"


def test_a_file_that_does_not_belong_to_it_is_told(job: Path) -> None:
    (job / "version-00000007" / "notes.txt").write_text("mine")
    told, _ = checkpointing.begin(None, checkpointing.found(job), None)
    assert told.endswith("notes.txt is no file of the checkpoint, and is not read")


def test_a_resumed_job_leaves_the_journal_of_the_one_before(tmp_path: Path, job: Path) -> None:
    journal, saved = tmp_path / "run.jsonl.zst", checkpointing.found(job)
    checkpointing.begin(journal, saved, None)  # there is none yet
    for text in ("first", "second", "third"):
        journal.write_text(text)
        assert checkpointing.begin(journal, None, None) == []
        assert journal.exists(), "a new job replaces it"
        checkpointing.begin(journal, saved, None)
    assert not journal.exists()
    assert [(tmp_path / f"run.{number}.jsonl.zst").read_text() for number in (1, 2, 3)] == ["first", "second", "third"]


def test_a_machine_that_comes_back_finds_checkpoints_of_its_own_job(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the folder is for the supervisor to judge."""
    taken = list[object]()

    def take_part(*arguments: object) -> int:
        taken.append(arguments)
        return 0

    monkeypatch.setattr(cli, "take_part", take_part)
    script = str(Path(__file__).parents[1] / "faults" / "scripts" / "train.py")
    options = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "localhost", "--no-preload", "--checkpoint", str(job)]
    done = CliRunner().invoke(cli.app, ["agent", *options, script], catch_exceptions=False)
    assert (done.exit_code, len(taken)) == (0, 1), done.output
    with pytest.raises(ConfigurationError, match="--auto-resume goes on from"):
        CliRunner().invoke(cli.app, ["agent", *options, "--auto-resume", "--resume", "other", script], catch_exceptions=False)
    with pytest.raises(ConfigurationError, match="--every soon: must be seconds"):
        CliRunner().invoke(cli.app, ["agent", *options, "--every", "soon", script], catch_exceptions=False)


def test_an_older_one_can_be_chosen_if_the_newer_ones_are_not_in_the_way(tmp_path: Path, job: Path) -> None:
    folder = CheckpointFolder(job)
    folder.finish(folder.begin(9), {**MANIFEST, "version": 9})
    older, newer = (checkpointing.found(job / f"version-0000000{version}") for version in (7, 9))
    assert older is not None and older.version == 7
    assert checkpointing.order_of(None, None, None, newer) is not None
    assert checkpointing.order_of(tmp_path / "new", None, None, older) is not None
    with pytest.raises(ConfigurationError, match="has a newer checkpoint, of version 9"):
        checkpointing.order_of(None, None, None, older)


def test_what_the_command_line_does_not_give_is_as_before(job: Path) -> None:
    saved = checkpointing.found(job)
    names = ("workers", "servers", "sync", "wire", "seed")
    assert checkpointing.taken_over(None, lambda _: False, names, seed=0) == {}
    before = {"workers": 4, "servers": 2, "sync": None, "wire": "bf16", "seed": 3}
    assert checkpointing.taken_over(saved, lambda _: False, names, seed=0) == before
    del before["workers"]
    assert checkpointing.taken_over(saved, lambda name: name == "workers", names, seed=0) == before
    with pytest.raises(ConfigurationError, match="--seed 0: the checkpoint is of a job with seed 3"):
        checkpointing.taken_over(saved, lambda name: name == "seed", names, seed=0)


def test_another_rule_is_named_beside_that_of_the_checkpoint(job: Path) -> None:
    saved = checkpointing.found(job)
    checkpointing.check_rule(saved, None)
    checkpointing.check_rule(saved, "ssp(staleness=3)")
    with pytest.raises(ConfigurationError, match=r"--sync 'bsp': .* is of a job under ssp\(staleness=3\)"):
        checkpointing.check_rule(saved, "bsp")
