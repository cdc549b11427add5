"""Wire formats, live: what travels between hosts is rounded, and nothing else changes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, TypeAlias

import pytest
import torch
from tests.live.harness import APART, HALVES, Job, Worker, wait
from tests.live.test_equality import Case
from tests.tiers import marked
from torch import Tensor

from offbeat.errors import ConfigurationError
from offbeat.optimizer import DistributedOptimizer
from offbeat.runtime.parameter_server.encoding import WorkerEncoding
from offbeat.runtime.parameter_server.worker_side import WorkerSession

STEPS = 40
PLAIN: dict[str, Tensor] = {}
EVERYWHERE: dict[str, Mapping[str, Any]] = {
    "apart-1": {"hosts": APART},
    "apart-2": {"hosts": APART, "servers": 2},
    "halves-2": {"hosts": HALVES, "servers": 2, "elsewhere": (1,)},
}


@pytest.fixture(autouse=True, params=[False, True], ids=["one bucket", "many buckets"])
def buckets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is smaller than a bucket, so that all tests run with small buckets too."""
    if request.param:
        monkeypatch.setattr("offbeat.tensors.buckets.BUCKET_NBYTES", 256)
        monkeypatch.setattr("offbeat.tensors.blocks.BLOCK_NUMEL", 64)


def encodings(worker: Worker) -> list[WorkerEncoding]:
    assert isinstance(worker.session, WorkerSession)
    return list(worker.session._exchange._encodings.values())


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return max(float((one[name] - value).norm() / value.norm()) for name, value in other.items())


def in_bf16(values: Mapping[str, Tensor]) -> bool:
    """True if bfloat16 can represent them all."""
    return all(torch.equal(value, value.bfloat16().float()) for value in values.values())


def parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


Values: TypeAlias = dict[str, Tensor]


def train(case: Case, sync: str = "bsp", wires: Mapping[int, str] | None = None, **job: Any) -> list[tuple[Values, Values, int]]:
    """Of each worker: the parameters after the last step, those after a pull, and the number of its connections that encode."""

    def script(worker: Worker) -> tuple[Values, Values, int]:
        model = case.model_of(worker)
        wire: Any = wires[worker.number] if wires is not None else "float32"
        optimizer = worker.distribute(case.optimizer(model), model, sync, wire=wire)
        for number in range(case.steps):
            optimizer.zero_grad()
            case.backward(model, case.batch(worker.number, number))
            optimizer.step(samples=case.sizes[worker.number])
        stepped = parameters(model)
        optimizer.pull()
        return stepped, parameters(model), len(encodings(worker))

    with Job(len(case.sizes), **job) as running:
        return running.run(script)


NEAR = [(where, wire) for where in EVERYWHERE for wire in ("bf16", "int8")]


@pytest.mark.parametrize(("where", "wire"), marked(NEAR, night=[("apart-1", "int8"), ("halves-2", "bf16")]))
def test_a_job_stays_near_the_joined_batch(where: str, wire: str) -> None:
    case = Case(steps=STEPS)
    PLAIN.update(PLAIN or case.plain().parameters)
    for number, (stepped, pulled, encoded) in enumerate(train(case, wire=wire, **EVERYWHERE[where])):
        halves = where == "halves-2"
        assert encoded == (1 if where == "apart-1" or (halves and number < 2) else 2), "only connections that do not share memory encode"
        assert 0.0 < distance(pulled, PLAIN) < 0.02
        if encoded == EVERYWHERE[where].get("servers", 1):
            assert in_bf16(stepped) == (wire == "bf16"), f"worker {number} computes with rounded parameters"
            assert 0.0 < distance(stepped, pulled) < (0.004 if wire == "bf16" else 1e-3)
        assert not in_bf16(pulled), "a pull that the script asks for is exact"


def test_on_one_host_nothing_is_encoded() -> None:
    case = Case(steps=STEPS)
    PLAIN.update(PLAIN or case.plain().parameters)
    for _, pulled, encoded in train(case, wire="int8"):
        assert encoded == 0
        assert distance(pulled, PLAIN) < 1e-5


@pytest.mark.parametrize("sync", ["asp", "ssp(staleness=2)", "backup(b=1)"])
def test_each_worker_may_have_its_own_format(sync: str) -> None:
    case = Case(steps=10)
    wires = {0: "float32", 1: "bf16", 2: "int8", 3: "int8"}
    results = train(case, sync, wires, hosts=APART, servers=2)
    assert [encoded for _, _, encoded in results] == [0, 2, 2, 2]
    for number, (stepped, _, _) in enumerate(results):
        assert in_bf16(stepped) == (wires[number] == "bf16")


@pytest.mark.smoke
@pytest.mark.parametrize("why", ["dropped", "rejected"])
def test_a_push_that_is_not_used_gives_its_feedback_back(why: str) -> None:
    """Of worker 0's three pushes the first is folded, the second is not used, and the third is folded."""
    case, ahead, first = Case(sizes=(8, 8)), threading.Event(), threading.Event()

    def step(worker: Worker, model: torch.nn.Module, optimizer: Any, number: int) -> Tensor:
        optimizer.zero_grad()
        case.backward(model, case.batch(worker.number, number))
        if worker.number == 0 and number == 1:
            wait(ahead)
            if why == "rejected":
                next(model.parameters()).grad.fill_(torch.nan)  # type: ignore[union-attr]
        optimizer.step(samples=8)
        [encoding] = encodings(worker)
        return torch.cat([bucket.feedback for bucket in encoding.feedback])

    def script(worker: Worker) -> list[Tensor]:
        model = case.model_of(worker)
        optimizer = worker.distribute(case.optimizer(model), model, "backup(b=1)", wire="int8")
        if worker.number == 1:
            wait(first)
            optimizer.pull()
            feedback = [step(worker, model, optimizer, 1)]
            ahead.set()
            return feedback
        feedback = [step(worker, model, optimizer, 0)]
        first.set()
        return [*feedback, step(worker, model, optimizer, 1), step(worker, model, optimizer, 2)]

    with Job(2, hosts=APART) as job:
        folded, unused, folded_too = job.run(script)[0]
        fates = job.finish()["fates"]
    assert (fates["folded"], fates[why]) == (3, 1)
    assert bool(folded.any())
    assert torch.equal(unused, folded), "bit by bit what it was before the push"
    assert not torch.equal(folded_too, folded)


def test_a_worker_that_comes_back_begins_without_feedback() -> None:
    """The fate of its predecessor's last push is no business of a new process."""
    case, died = Case(sizes=(8, 8)), threading.Event()

    def script(worker: Worker) -> bool:
        model = case.model_of(worker)
        optimizer = worker.distribute(case.optimizer(model), model, "asp", wire="int8")
        before = [bool(bucket.feedback.any()) for encoding in encodings(worker) for bucket in encoding.feedback]
        for number in range(3 if not died.is_set() or worker.number == 0 else 0):  # the job is over by then
            optimizer.zero_grad()
            case.backward(model, case.batch(worker.number, number))
            optimizer.step(samples=8)
        if worker.number == 1 and not died.is_set():
            died.set()
            worker.die()
        return any(before)

    with Job(2, hosts=APART) as job:
        threads = job.start_all(script)
        wait(died)
        job.join(*threads)
        job.join(job.start(1, script))
        assert job.results(0, 1) == [False, False]


@pytest.mark.parametrize(
    ("sync", "match"),
    [
        ("majority", "majority has no servers, and its ranks exchange float32 only; leave wire out"),
        ("ensemble(steps=2)", "under ensemble workers push parameters, which travel as float32 only"),
        ("psp(c=2)", "under psp each shard decides for itself, and its blocks travel as float32 only"),
    ],
)
def test_rules_that_cannot_use_a_format_refuse_it(sync: str, match: str) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match=match):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, sync, wire="bf16")

    def script(worker: Worker) -> None:
        with pytest.raises(ConfigurationError, match=match):
            worker.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model, "bsp", wire="bf16")

    with Job(1, sync=sync) as job:
        job.run(script)


def test_an_unknown_format_is_refused_by_name() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match=r"wire='fp8': must be one of float32, bf16, int8"):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, wire="fp8")  # type: ignore[arg-type]
