"""Every rule, live: the books add up, staleness keeps its bounds, and an epoch's end leaves all workers with the same parameters."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.core.promises import promised
from tests.device import DEVICE
from tests.live.harness import APART, HALVES, Job, Worker, seeded
from tests.live.samples import audited, of_kind
from tests.support.rule_examples import spelled
from tests.support.same_state import same
from tests.tiers import marked
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.gossip.push_sum import GossipRule
from offbeat.core.policy import Policy, ServerRule
from offbeat.errors import ConfigurationError
from offbeat.policies import rule

Record = dict[str, Any]
WORKERS, EPOCHS, SIZE, BATCH = 4, 3, 120, 5
JOBS: dict[str, dict[str, Any]] = {
    "shm": {},
    "mixed, 2 servers": {"servers": 2, "hosts": {1: "other", 2: "third"}},
    "3 servers, 1 elsewhere": {"servers": 3, "elsewhere": (2,)},
    "int8": {"servers": 2, "elsewhere": (1,), "hosts": {1: "other", 2: "third"}, "wire": "int8"},
    "apart": {"hosts": APART},
    "halves": {"hosts": HALVES},
}


def script(worker: Worker, sync: str | Policy, slow: int = 2) -> list[tuple[int, list[Tensor]]]:
    """A few epochs, one worker slower than the others, and schedules of each worker's own steps; version and parameters after each."""
    with seeded(worker.number):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(DEVICE)
    optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5), model, sync)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    x = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    dataset = TensorDataset(x, x.sum(dim=1, keepdim=True))
    loader = DataLoader(dataset, batch_sampler=optimizer.batch_sampler(dataset, batch_size=BATCH))
    after = []
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            if worker.number == slow:
                threading.Event().wait(0.003)
            optimizer.step()
            schedule.step()
        after.append((optimizer.version, [p.detach().clone() for p in model.parameters()]))
    return after


def train(journal: Path, asked: str | Policy, **job: Any) -> tuple[list[list[tuple[int, list[Tensor]]]], list[Record], dict[str, Any]]:
    """What each worker has after each epoch, the journal's records, and the summary."""
    with Job(WORKERS, journal=str(journal), **job) as running:
        results = running.run(lambda worker: script(worker, asked))
    summary = running.summary
    assert summary is not None and summary["ok"]
    assert summary["per_worker"][0]["state"] == "finished"
    assert [report["epoch"] for report in summary["epochs"]] == list(range(EPOCHS))
    return results, audited(journal), summary


def pool_of_samples(policy: Policy) -> bool:
    """Whether all samples are in one pool: the books of rules with splits, or whose work is broken off, have tests of their own."""
    assert isinstance(policy, ServerRule)
    return policy.scope == "job" and policy.averaging is None and policy.obsolete_work == "push_and_wait"


PSP = (
    *("psp(c=4)", "psp(c=3, b=0.5)", "psp(c=2, b=0.6, future=hold)", "psp(c=3, b=0.6, future=drop, max_skew=1)"),
    *("psp(c=3, b=0.5, tau1=0.002, tau2=0.001, tau_max=0.05)", "psp(c=3, interrupt=True)"),
)
FRAGMENTS = (
    *("diloco(steps=3)", "diloco(steps=6, delay=1, alpha=0.5)", "decoupled(steps=3, quorum=2)"),
    "decoupled(steps=6, quorum=1, delay=1, alpha=0.5)",
)


def on(jobs: Sequence[str], *rules: str) -> list[tuple[str, str]]:
    return [(spelling, job) for spelling in rules for job in jobs]


def further(rules: Sequence[str]) -> list[str]:
    """All but the first setting of each rule."""
    kinds = [spelling.partition("(")[0] for spelling in rules]
    return [spelling for number, spelling in enumerate(rules) if kinds[number] in kinds[:number]]


SERVED, RANKS = list(JOBS)[:4], ["shm", "apart", "halves"]
CASES = [
    *on(SERVED[:2], "ssp(staleness=0)", *spelled(ServerRule, where=pool_of_samples)),
    *on(SERVED[:3], *PSP),
    *on(SERVED, *FRAGMENTS),
    *on(RANKS[:2], *spelled(RoundRule), "solo(delivery=latest, model_sync_every=4)"),
    *on(RANKS[2:], "majority", "solo(staleness=1)"),
    *on(RANKS, *spelled(GossipRule)),
]
EVERYWHERE = [*on(SERVED[:2], "bsp"), *on(SERVED[:3], PSP[1]), *on(SERVED, FRAGMENTS[1]), *on(RANKS, "dpsgd", "adpsgd")]
SMOKE = [
    *(("bsp", "mixed, 2 servers"), (PSP[1], "3 servers, 1 elsewhere"), (FRAGMENTS[1], "int8")),
    *(("majority", "shm"), ("solo", "apart"), ("dpsgd", "halves"), ("adpsgd", "apart")),
]
LIKE_OTHERS = [
    *on(SERVED[:2], *PSP),
    *on(SERVED[::2], *FRAGMENTS),
    *on(RANKS[::2], *(s for s in spelled(GossipRule) if s.startswith("sgp("))),
    *on(SERVED[:1], *further(spelled(ServerRule, where=pool_of_samples))),
    *on(RANKS[:1], *further(spelled(RoundRule))),
]
"""The settings of one rule, where they resemble each other: CI runs them in one or two places, and `EVERYWHERE` in all."""


@pytest.mark.parametrize(
    ("sync", "job"),
    marked(CASES, *SMOKE, night=[case for case in LIKE_OTHERS if case not in EVERYWHERE]),
)
def test_the_books_add_up(tmp_path: Path, sync: str, job: str) -> None:
    policy = rule(sync)
    results, records, summary = train(tmp_path / "journal", sync, **JOBS[job])
    assert summary["sync"] == policy.spelling
    folds = of_kind(records, "fold")
    stale = max(part["staleness"] for fold in folds for part in fold["parts"])
    may_drop = in_blocks = False
    if isinstance(policy, GossipRule):
        assert [fold["version"] for fold in folds] == list(range(1, EPOCHS * SIZE // BATCH + 1)), "one of each step of each rank"
        assert all(len(fold["parts"]) == 1 and fold["parts"][0]["weight"] == 1.0 for fold in folds) and stale > 0
    elif isinstance(policy, RoundRule):
        assert [fold["version"] for fold in folds] == list(range(1, results[0][-1][0] + 1))
        assert all(fold["divisor"] == WORKERS for fold in folds)
        assert stale <= (0 if policy.in_step else stale if policy.staleness is None else policy.staleness)
    elif isinstance(policy, ServerRule):
        promises, needs_all = promised(type(policy)), sync == "psp(c=4)" or sync.startswith("diloco")
        most = 0 if needs_all else promises.most_stale(policy, WORKERS)
        assert most is None or stale <= most
        in_blocks = policy.scope == "shard" or policy.averaging is not None
        may_drop = policy.averaging is None and not needs_all
        shards = {record.get("shard") for record in of_kind(records, "pushed")}
        assert shards == (set(range(JOBS[job].get("servers", 1))) if in_blocks else {None}), "every shard has its turn"
        assert in_blocks or sum(summary["fates"].values()) == summary["pushes"]
        assert in_blocks or promises.drops or summary["fates"]["dropped"] == 0
    for report in summary["epochs"]:
        assert report["folded"] + report["dropped"] == report["indices"] == SIZE and (may_drop or not report["dropped"]), report
    assert may_drop or summary["samples"] == EPOCHS * SIZE
    check_models(policy, results, range(EPOCHS - 1 if in_blocks else 0, EPOCHS))


def check_models(policy: Policy, results: list[list[tuple[int, list[Tensor]]]], epochs: Sequence[int]) -> None:
    """Those of one version are one, and after the last epoch all are of one version; replicas that are mixed are near each other."""
    if isinstance(policy, GossipRule):
        apart = max(float((a - b).abs().max()) for each in results for a, b in zip(each[-1][1], results[0][-1][1], strict=True))
        assert 0.0 < apart < 1.0, "replicas differ, and not by much"
        return
    for epoch in epochs if getattr(policy, "delivery", "replay") == "replay" else ():
        # Where nobody waits, the first may have begun the next epoch when the last hears that this one is over.
        known: dict[int, list[Tensor]] = {}
        for version, parameters in (result[epoch] for result in results):
            assert same(known.setdefault(version, parameters), parameters), f"epoch {epoch}"
        assert len(known) == 1 or (policy.spelling not in ("bsp", "full") and epoch < EPOCHS - 1)
    assert len({result[-1][0] for result in results}) == 1


def test_a_rule_is_an_object_or_its_spelling(tmp_path: Path) -> None:
    *_, summary = train(tmp_path / "journal", offbeat.SSP(staleness=2))
    assert summary["sync"] == "ssp(staleness=2)"


def test_the_launcher_goes_before_the_script(tmp_path: Path) -> None:
    *_, summary = train(tmp_path / "journal", "asp", sync="backup(b=2)")
    assert summary["sync"] == "backup(b=2)"


def test_a_rule_that_does_not_exist() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigurationError, match="asp"):
        offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, sync="asap")


STALE = [*on(SERVED[:2], "bsp", "psp(c=2)"), *on(SERVED[:1], "full", "dpsgd", "adacomm(steps=2)")]


@pytest.mark.parametrize(("sync", "job"), STALE)
def test_a_backward_pass_through_a_graph_from_before_a_step_is_refused(sync: str, job: str) -> None:
    """As in plain PyTorch, where the step writes to the parameters of the graph: it would compute with the new ones."""

    def twice(worker: Worker) -> str:
        with seeded(worker.number):
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(DEVICE)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.05), model, sync)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 6, device=DEVICE)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)  # no step between the two
            optimizer.step(samples=3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as refused:
            loss.backward()
        return str(refused.value)

    with Job(2, **JOBS[job]) as running:
        assert all(running.run(twice))


@pytest.mark.parametrize("sync", ["bsp", "psp(c=1)", "full", "adacomm(steps=1)"])
def test_hooks_of_the_wrapped_optimizers_step_are_called_whoever_steps(sync: str) -> None:
    def clipped(worker: Worker) -> None:
        with seeded(0):
            model = nn.Linear(6, 1).to(DEVICE)
        wrapped, calls = torch.optim.SGD(model.parameters(), lr=1.0), list[str]()

        def clip(*_: Any) -> None:
            calls.append("before")
            nn.utils.clip_grad_value_(model.parameters(), 0.25)

        wrapped.register_step_pre_hook(clip)
        wrapped.register_step_post_hook(lambda *_: calls.append("after"))
        optimizer = worker.distribute(wrapped, model, sync)
        before = model.weight.detach().clone()
        model(torch.ones(2, 6, device=DEVICE)).sum().backward()
        optimizer.step(samples=2)
        assert calls == ["before", "after"]
        assert torch.equal(model.weight, before - 0.25)

    with Job(1) as running:
        running.run(clipped)
