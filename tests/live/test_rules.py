"""Every rule, live: the books add up, staleness keeps its bounds, and an epoch's end leaves all workers with the same parameters."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.core.promises import promised
from tests.live.harness import Job, Worker, seeded
from tests.live.samples import audited
from tests.support.rule_examples import spelled
from tests.tiers import marked
from torch import Tensor, nn

import offbeat
from offbeat.core.policy import Policy, ServerRule
from offbeat.errors import ConfigurationError
from offbeat.policies import rule

WORKERS, EPOCHS, SIZE, BATCH = 4, 3, 200, 5


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SIZE, 6, generator=generator)
    return torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))


def script(worker: Worker, sync: str | Policy, slow: int = 2) -> list[tuple[int, list[Tensor]]]:
    """A few epochs, one worker slower than the others; the version and the parameters after each epoch."""
    with seeded(worker.number):
        model = nn.Linear(6, 1)
    optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model, sync)
    dataset = data()
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=optimizer.batch_sampler(dataset, batch_size=BATCH))
    after = []
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            if worker.number == slow:
                threading.Event().wait(0.003)
            optimizer.step()
        after.append((optimizer.version, [p.detach().clone() for p in model.parameters()]))
    return after


def train(journal: Path, asked: str | Policy, **job: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The journal's records and the summary, after what holds for every rule has been checked."""
    with Job(WORKERS, journal=str(journal), **job) as running:
        results = running.run(lambda worker: script(worker, asked))
    for epoch in range(EPOCHS):
        # Where nobody waits, the first may have begun the next epoch when the last hears that this one is over.
        known: dict[int, list[Tensor]] = {}
        for version, parameters in (result[epoch] for result in results):
            assert all(torch.equal(a, b) for a, b in zip(known.setdefault(version, parameters), parameters, strict=True)), f"epoch {epoch}"
        assert len(known) == 1 or (asked != "bsp" and epoch < EPOCHS - 1)
    records = audited(journal)
    summary = running.summary
    assert summary is not None and summary["ok"]
    assert sum(summary["fates"].values()) == summary["pushes"]
    for report in summary["epochs"]:
        assert report["folded"] + report["dropped"] == report["indices"] == SIZE, report
        assert report["unused"] == report["rejected"] == 0, report
    assert [report["epoch"] for report in summary["epochs"]] == list(range(EPOCHS))
    return records, summary


def staleness(records: list[dict[str, Any]]) -> int:
    return max(int(part["staleness"]) for record in records if record["kind"] == "fold" for part in record["parts"])


def is_here(policy: Policy) -> bool:
    """Whether the books of this rule's jobs are those of `train`: averaging, interrupts and blocks have tests of their own."""
    assert isinstance(policy, ServerRule)
    return policy.scope == "job" and policy.averaging is None and policy.obsolete_work == "push_and_wait"


@pytest.mark.parametrize("job", [{}, {"servers": 2, "hosts": {1: "other", 2: "third"}}], ids=["shm", "mixed, 2 servers"])
@pytest.mark.parametrize("sync", marked(["ssp(staleness=0)", *spelled(ServerRule, where=is_here)], "bsp"))
def test_the_books_add_up(tmp_path: Path, sync: str, job: dict[str, Any]) -> None:
    records, summary = train(tmp_path / "journal", sync, **job)
    policy = rule(sync)
    promises = promised(type(policy))
    most = promises.most_stale(policy, WORKERS)
    assert most is None or staleness(records) <= most
    assert summary["sync"] == policy.spelling
    assert promises.drops or summary["fates"]["dropped"] == 0
    assert summary["per_worker"][0]["state"] == "finished"


def test_a_rule_is_an_object_or_its_spelling(tmp_path: Path) -> None:
    _, summary = train(tmp_path / "journal", offbeat.SSP(staleness=2))
    assert summary["sync"] == "ssp(staleness=2)"


def test_the_launcher_goes_before_the_script(tmp_path: Path) -> None:
    _, summary = train(tmp_path / "journal", "asp", sync="backup(b=2)")
    assert summary["sync"] == "backup(b=2)"


def test_a_rule_that_does_not_exist() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigurationError, match="asp"):
        offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, sync="asap")
