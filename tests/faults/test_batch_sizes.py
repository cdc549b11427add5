"""Real jobs whose workers have batches of different sizes: the same training as one process on the joined batch, and equal step times."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.faults.job import SCRIPTS, Start
from tests.faults.scripts.sized import SIZE, data, model
from tests.tiers import marked

SIZED = str(SCRIPTS / "sized.py")


def on_joined_batches(size: int, epochs: int, *, sums: bool) -> dict[str, torch.Tensor]:
    trained, (inputs, labels) = model(), data()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01 if sums else 0.1, momentum=0.9)
    for _ in range(epochs):
        for x, y in zip(inputs.split(size), labels.split(size), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(trained(x), y, reduction="sum" if sums else "mean").backward()
            optimizer.step()
    return {name: p.detach() for name, p in trained.named_parameters()}


CASES = [("bsp", ()), ("full", ()), ("bsp", ("--sum",)), ("full", ("--sum",))]


@pytest.mark.parametrize(("sync", "more"), marked(CASES, night=CASES[1:3]))
def test_workers_with_batches_of_their_own_equal_one_process_on_the_joined_batch(
    start: Start, tmp_path: Path, sync: str, more: tuple[str, ...]
) -> None:
    ended = start("--workers", "3", "--sync", sync, "--batch", "0=24", SIZED, "--out", str(tmp_path), *more).ended()
    assert ended.status == 0, ended.err
    expected = on_joined_batches(24 + 8 + 8, 2, sums=bool(more))
    for worker in range(3):
        found = torch.load(tmp_path / f"{worker}.pt")
        for name, value in expected.items():
            assert (found[name] - value).norm() < 1e-5 * value.norm(), (worker, name)
    parts = [part for record in ended.records if record["kind"] == "fold" for part in record["parts"]]
    weights = {worker: {round(part["weight"], 9) for part in parts if part["worker"] == worker} for worker in range(3)}
    assert weights == ({0: {1.0}, 1: {1.0}, 2: {1.0}} if more else {0: {0.6}, 1: {0.2}, 2: {0.2}})
    assert ended.tally().problems() == []
    assert ended.out.count("dealt 6 batches of 6") == 2 * 3, ended.out


def test_even_shares_are_in_proportion_to_the_batches(start: Start) -> None:
    ended = start("--workers", "2", "--batch", "1=16,0=4", SIZED, "--deal", "even").ended()
    assert ended.status == 0, ended.err
    reports = ended.reports()
    assert [[split["indices"] for split in report["splits"]] for report in reports] == [[48, 192]] * 2
    assert ended.out.count("dealt 12 batches of 12") == 2 * 2, ended.out


@pytest.mark.parametrize("sync", marked(["bsp", "full"], night=["bsp"]))
def test_sizes_follow_the_measured_speeds(start: Start, sync: str) -> None:
    options = ("--sizes", "auto:12", "--epochs", "12", "--seconds", "0.0005", "0.004")
    ended = start("--workers", "2", "--sync", sync, "--kill", "1@70", SIZED, *options).ended()
    assert ended.status == 0, ended.err
    sizes = [record["batches"] for record in ended.records if record["kind"] == "resized"]
    assert sizes and all(sum(now.values()) == 24 for now in sizes), "the global batch is kept"
    assert all(now["0"] > 12 for now in sizes), "worker 0 is the fast one"
    assert any(now["0"] >= 16 for now in sizes)
    versions: dict[int, int] = defaultdict(int)
    for record in ended.records:
        if record["kind"] == "settle" and record["fate"] == "folded":
            versions[record["version"]] += record["samples"]
    assert max(versions.values()) <= 24 and sum(versions.values()) == 12 * SIZE
    assert "back" in ended.err or any(record["kind"] == "process" and record["what"] == "restarted" for record in ended.records)
    assert ended.tally().problems() == []


EPOCHS_OF_TIME = ("--sync", "ensemble(per_epoch=2, overlap=0.0, budget=24)")
REFUSED = [
    ((*EPOCHS_OF_TIME, "--batch", "auto", SIZED), "sets the batch sizes by itself"),
    ((*EPOCHS_OF_TIME, SIZED, "--sizes", "auto:8"), "sets the batch sizes by itself"),
    (("--batch", "auto", SIZED, "--deal", "even"), "deal='even' promises the number of batches"),
]


@pytest.mark.parametrize(("arguments", "why"), marked(REFUSED, night=REFUSED[1:2]))
def test_what_is_refused(start: Start, arguments: tuple[str, ...], why: str) -> None:
    ended = start("--workers", "2", *arguments).ended()
    assert ended.status != 0 and why in ended.err
