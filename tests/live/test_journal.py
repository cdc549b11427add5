"""The summary of a live job is what a new count of its compressed journal gives, epochs and all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.live.harness import Job, Worker
from tests.live.samples import Trainer
from tests.tiers import marked

from offbeat.journal import epoch_reports
from offbeat.journal.file import read
from offbeat.journal.summary import Tally

EPOCHS, SIZE, BATCH = 12, 120, 5


def script(worker: Worker, sync: str) -> int:
    trainer = Trainer(worker, sync)
    loader = trainer.loader(SIZE, BATCH)
    for _ in range(EPOCHS):
        trainer.through(loader)
    assert len(trainer.optimizer.reports) == EPOCHS
    return trainer.optimizer.version


@pytest.mark.parametrize("sync", marked(["asp", "bsp", "backup(b=1)", "majority"], "asp"))
def test_a_recount_of_the_journal_gives_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str) -> None:
    monkeypatch.setattr(epoch_reports, "EPOCHS_KEPT", 5)
    path = tmp_path / "run.jsonl.zst"
    with Job(3, journal=str(path)) as running:
        versions = running.run(lambda worker: script(worker, sync))
    tally = Tally.of(read(path))
    assert tally.problems() == []
    assert running.summary is not None
    counted, told = (json.loads(json.dumps(summary)) for summary in (tally.summary(), running.summary))
    assert counted == told
    assert told["version"] >= max(versions) and told["pushes"] == sum(told["fates"].values())
    assert [epoch["epoch"] for epoch in told["epochs"]] == list(range(EPOCHS))[-5:]
    assert told["earlier_epochs"]["epochs"] == EPOCHS - 5
    assert told["earlier_epochs"]["indices"] == (EPOCHS - 5) * SIZE
