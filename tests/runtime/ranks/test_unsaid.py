"""A rank makes a step and dies before the coordinator has heard of it: shared memory has the step, and no message says what was in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.hand_driven_coordinator import Worker, coordinator

from offbeat.journal.file import read
from offbeat.runtime.gossip.one_host import OneHostGossip
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.ranks.plane import RankPlane


@pytest.mark.parametrize("sync", ["dpsgd", "sgp", "adpsgd"])
@pytest.mark.parametrize("computed", [True, False])
def test_a_step_with_a_gradient_counts_and_one_without_is_rejected(sync: str, computed: bool, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    host = coordinator(JobSettings(workers=2, journal=journal))
    ranks = [Worker(host, number, sync=sync) for number in range(2)]
    for rank in ranks:
        rank.greet(0.0)
    for rank in ranks:
        rank.say("ready", 0.0)
    side = host.first.driver.live_plane
    assert isinstance(side, RankPlane)
    for rank in ranks:
        rank.say("initial", 0.1, number=rank.number, provided=True, replica=[], **{"from": 0})
    processes = [OneHostGossip(side.memory[0], number) for number in range(2)]
    for process in processes:
        process.begin(torch.zeros(4))
    next(processes[1].stepping(torch.ones(4) if computed else None), None)
    host.on_lost(1, "its process ended", 0.2)
    host.close(True, "enough", 1.0)
    host.release_memory()
    records = list(read(journal))
    (pushed,) = [record for record in records if record["kind"] == "pushed" and record["worker"] == 1]
    assert pushed["samples"] == 0 and (pushed["nonfinite"] is None) == computed
    (settled,) = [record for record in records if record["kind"] == "settle" and record["worker"] == 1]
    assert settled["fate"] == ("folded" if computed else "rejected")
