"""Live jobs whose workers draw the same samples, or of whose steps nobody knows how many samples they are of, say so; others do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.live.harness import Job, Worker
from tests.live.samples import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

import offbeat
from offbeat.journal.file import read
from offbeat.report.remarks import remarks

RULES = ["bsp", "asp", "psp(c=2, b=1.0)", "ensemble(steps=2)", "majority", "adpsgd"]


def batch(seed: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def drawn(sync: str, *, seeded: bool, samples: int | None) -> Any:
    def script(worker: Worker) -> None:
        model = nn.Linear(6, 1)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model, sync)
        for step in range(8):
            optimizer.zero_grad()
            model(batch(100 * step + (worker.number if seeded else 0))).square().mean().backward()
            optimizer.step(samples=samples)

    return script


def warned(job: Job, journal: Path) -> list[str]:
    found = [record for record in read(journal) if record["kind"] == "warning"]
    assert job.summary is not None
    assert [one["detail"] for one in job.summary["warnings"]] == [record["detail"] for record in found]
    assert all(record["detail"] in remarks(job.summary) for record in found)
    return [record["about"] for record in found]


@pytest.mark.parametrize("sync", RULES)
def test_workers_that_draw_the_same_samples(tmp_path: Path, sync: str) -> None:
    with Job(3, journal=str(tmp_path / "journal")) as job:
        job.run(drawn(sync, seeded=False, samples=4))
    assert warned(job, tmp_path / "journal") == ["equal_gradients"]
    assert job.summary is not None
    workers = job.summary["warnings"][0]["workers"]
    assert workers == [0, 1, 2] if sync == "bsp" else len(workers) > 1, "a late one may not be among them"


@pytest.mark.parametrize("sync", ["bsp", "majority", "ensemble(steps=2)"])
@pytest.mark.parametrize("seeded", [True, False])
def test_frozen_parameters_that_differ(tmp_path: Path, sync: str, seeded: bool) -> None:
    """A restarted script is not asked: a teacher that it has copied from the student is another one by then."""

    def script(worker: Worker) -> None:
        torch.manual_seed(7 if seeded else worker.number)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        with torch.no_grad():
            for parameter in model[0].parameters():
                parameter.requires_grad_(False).copy_(torch.full_like(parameter, 1.0 if seeded else worker.number))
        optimizer = worker.distribute(torch.optim.SGD(model[2].parameters(), lr=0.01), model, sync)
        for step in range(6):
            optimizer.zero_grad()
            model(batch(100 * step + worker.number)).square().mean().backward()
            optimizer.step(samples=4)

    with Job(2, journal=str(tmp_path / "journal")) as job:
        job.run(script)
    assert warned(job, tmp_path / "journal") == ([] if seeded else ["frozen_differ"])


@pytest.mark.parametrize("sync", ["bsp", "majority"])
@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("given", ["sampler", "subset", "batch_sampler"])
def test_parts_of_the_data_that_differ(tmp_path: Path, sync: str, seeded: bool, given: str) -> None:
    """A random split without a seed, as KFold(shuffle=True) makes it: what one worker trains on, another may keep for validation."""

    def script(worker: Worker) -> None:
        model = nn.Linear(1, 1)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model, sync)
        data = TensorDataset(torch.ones(48, 1))
        part = torch.randperm(48, generator=torch.Generator().manual_seed(0 if seeded else worker.number))[:32].tolist()
        loader: Any
        if given == "sampler":
            loader = offbeat.elastic(DataLoader(data, 4, sampler=SubsetRandomSampler(part)), optimizer=optimizer)
        elif given == "subset":
            loader = offbeat.elastic(Subset(data, part), batch_size=4, optimizer=optimizer)
        else:
            loader = DataLoader(Subset(data, part), batch_sampler=optimizer.batch_sampler(Subset(data, part), batch_size=4))
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    with Job(2, journal=str(tmp_path / "journal")) as job:
        job.run(script)
    assert warned(job, tmp_path / "journal") == ([] if seeded else ["data_differ"])


@pytest.mark.parametrize("sync", ["bsp", "majority"])
def test_steps_of_unknown_samples(tmp_path: Path, sync: str) -> None:
    with Job(2, journal=str(tmp_path / "journal")) as job:
        job.run(drawn(sync, seeded=True, samples=None))
    assert warned(job, tmp_path / "journal") == ["samples_unknown"]


@pytest.mark.parametrize("sync", RULES)
def test_no_false_alarm(tmp_path: Path, sync: str) -> None:
    def sampled(worker: Worker) -> None:
        trainer = Trainer(worker, sync)
        for _ in range(3):
            for (indices,) in trainer.loader(40, 4):
                trainer.step(torch.ones_like(indices))  # the same sample again and again

    with Job(2, journal=str(tmp_path / "journal")) as job:
        job.run(drawn(sync, seeded=True, samples=4))
    assert warned(job, tmp_path / "journal") == []
    with Job(2, journal=str(tmp_path / "sampled")) as job:
        job.run(sampled)
    assert warned(job, tmp_path / "sampled") == []
