"""A fold over spans equals a step of the plain optimizer over whole tensors, for every optimizer; and state goes back and forth."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.tensors import blocks
from offbeat.tensors.absent import ABSENT
from offbeat.tensors.halves import Halves
from offbeat.tensors.layout import ALIGNMENT, Layout, Span, view
from offbeat.tensors.optimizers import hyperparameters, spec_of, supported
from offbeat.tensors.shard import Shard
from offbeat.tensors.state import assemble_state_dict, split_state_dict

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"momentum": 0.5, "dampening": 0.2},
            {"maximize": True}, {"foreach": True}, {"fused": True, "momentum": 0.9}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1}, {"maximize": True}, {"foreach": True}, {"fused": True}],
    "AdamW": [{}, {"amsgrad": True}, {"fused": True}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9}],
    "Adagrad": [{}, {"initial_accumulator_value": 0.5, "lr_decay": 0.1}],
    "ASGD": [{"t0": 2, "lambd": 0.1}],
}  # fmt: skip
CASES = [(name, settings) for name in supported() for settings in SETTINGS.get(name, [{}])]
IDS = [f"{name}-{'-'.join(settings) or 'plain'}" for name, settings in CASES]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that tensors are cut and runs hold several."""
    monkeypatch.setattr(blocks, "BLOCK_NUMEL", 64)


def channels_last(conv: nn.Conv2d) -> nn.Conv2d:
    conv.weight.data = conv.weight.data.to(memory_format=torch.channels_last)
    return conv


def make_model(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module
    if name == "Muon":
        model = nn.Sequential(nn.Linear(7, 9, bias=False), nn.Linear(9, 5, bias=False))
    else:
        model = nn.Sequential(channels_last(nn.Conv2d(3, 5, 3)), nn.Linear(13, 11), nn.LayerNorm(11))
    return model.to(dtype)


def make_optimizer(name: str, settings: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, of which the second goes against the order of the model and has settings of its own."""
    parameters = list(model.parameters())
    groups = [{"params": parameters[1:2]}, {"params": [*parameters[:1], *parameters[:1:-1]], "lr": 0.03, "weight_decay": 0.02}]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(groups, lr=0.05, **settings)
    return optimizer


class Job:
    """Servers without a network: one flat memory of parameters, or two halves of it, and a shard per span."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, count: int, *, threads: int = 1, halves: int = 1) -> None:
        self.layout, self.spec, self.optimizer = Layout.of(model, optimizer), spec_of(optimizer), optimizer
        self.memory = bytearray(self.layout.nbytes)
        self.spans = self.layout.spans(count, self.spec.elementwise)
        for spec, parameter in self.tensors(model):
            view(memoryview(self.memory), spec).copy_(parameter.detach())
        memories = [memoryview(self.memory), *(memoryview(bytearray(self.layout.nbytes)) for _ in range(halves - 1))]
        self.halves = [Halves(*(memory[s.start : s.stop] for memory in memories)) for s in self.spans]
        self.shards = [
            Shard(self.layout, span, self.spec, half, threads=threads) for span, half in zip(self.spans, self.halves, strict=True)
        ]

    def tensors(self, model: nn.Module) -> list[tuple[Any, nn.Parameter]]:
        parameters = dict(model.named_parameters())
        return [(spec, parameters[spec.name]) for spec in self.layout.tensors]

    def flat(self, model: nn.Module, gradients: Sequence[torch.Tensor]) -> bytearray:
        """The push memory for gradients given in model order."""
        memory = bytearray(self.layout.nbytes)
        by_name = dict(zip((name for name, _ in model.named_parameters()), gradients, strict=True))
        for spec in self.layout.tensors:
            view(memoryview(memory), spec).copy_(by_name[spec.name])
        return memory

    def fold(self, memories: Sequence[tuple[bytearray, float]], **options: Any) -> list[Any]:
        for halves in self.halves:
            halves.turn()
        return [
            shard.fold([(memoryview(memory)[s.start : s.stop], weight) for memory, weight in memories], **options)
            for shard, s in zip(self.shards, self.spans, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        parts = [(headers, b"".join(data)) for headers, data in (shard.state() for shard in self.shards)]
        return assemble_state_dict(self.layout, self.spec, parts, self.optimizer.state_dict()["param_groups"])

    def load(self, state_dict: dict[str, Any]) -> None:
        parts = split_state_dict(self.layout, self.spec, state_dict, self.optimizer, self.spans)
        for shard, (headers, data) in zip(self.shards, parts, strict=True):
            shard.load_state(shard.read_state(headers, memoryview(b"".join(data))))

    def check(self, model: nn.Module, **tolerance: Any) -> None:
        for spec, parameter in self.tensors(model):
            torch.testing.assert_close(view(memoryview(self.memory), spec), parameter.detach(), **tolerance, msg=spec.name)


def random_gradients(model: nn.Module, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in model.parameters()]


def step_both(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One fold of two gradients, weights 0.25 and 0.75, and the plain step with their sum."""
    a, b = random_gradients(model, seed), random_gradients(model, seed + 1000)
    job.fold([(job.flat(model, a), 0.25), (job.flat(model, b), 0.75)], hyperparameters=hyperparameters(optimizer))
    for parameter, x, y in zip(model.parameters(), a, b, strict=True):
        parameter.grad = torch.empty_like(parameter).copy_(0.25 * x.float() + 0.75 * y.float())
    optimizer.step()


def states_match(mine: dict[str, Any], plain: dict[str, Any]) -> None:
    assert mine["param_groups"] == plain["param_groups"]
    assert mine["state"].keys() == plain["state"].keys()
    for slot, entry in plain["state"].items():
        assert list(mine["state"][slot]) == list(entry)
        for key, value in entry.items():
            assert mine["state"][slot][key].dtype == value.dtype and mine["state"][slot][key].shape == value.shape
            torch.testing.assert_close(mine["state"][slot][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.few(30)
@pytest.mark.parametrize(("name", "settings"), CASES, ids=IDS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_equals_the_plain_optimizer_and_its_checkpoints(name: str, settings: dict[str, Any], count: int) -> None:
    model = make_model(name)
    optimizer = make_optimizer(name, settings, model)
    job = Job(model, optimizer, count)
    for seed in range(4):
        step_both(job, model, optimizer, seed)
        if seed == 1:
            optimizer.param_groups[0]["lr"] = 0.2
    tolerance: dict[str, float] = {"rtol": 1e-2, "atol": 1e-3} if name == "Muon" else {"rtol": 1e-4, "atol": 2e-5}
    job.check(model, **tolerance)
    if name != "Muon":
        states_match(job.state_dict(), optimizer.state_dict())
    resumed = Job(model, optimizer, count % 3 + 1)
    resumed.load(job.state_dict() if name == "Muon" else optimizer.state_dict())
    step_both(resumed, model, optimizer, 5)
    resumed.check(model, **tolerance)


def test_state_that_an_optimizer_makes_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Adagrad of torch 2.6 does not make it in a step as well."""
    step = torch.optim.Adagrad.step

    def as_in_torch_2_6(self: torch.optim.Adagrad, closure: Any = None) -> Any:
        assert all(self.state[parameter] for group in self.param_groups for parameter in group["params"]), "state that nobody has made"
        return step(self, closure)

    monkeypatch.setattr(torch.optim.Adagrad, "step", as_in_torch_2_6)
    model = make_model("Adagrad")
    optimizer = make_optimizer("Adagrad", {"initial_accumulator_value": 0.5}, model)
    job = Job(model, optimizer, 2)
    for seed in range(2):
        step_both(job, model, optimizer, seed)
    job.check(model, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("name", "settings"), CASES, ids=IDS)
def test_a_fold_into_the_other_half_gives_the_same_bits_and_leaves_the_half_that_was_read(name: str, settings: dict[str, Any]) -> None:
    model = make_model(name)
    optimizer = make_optimizer(name, settings, model)
    one, two = (Job(model, optimizer, 2, halves=count) for count in (1, 2))
    for seed in range(5):
        before = [bytes(halves.now) for halves in two.halves]
        gradients = [(one.flat(model, random_gradients(model, seed)), 1.0)]
        changed = hyperparameters(optimizer)
        for group in changed if seed == 3 else ():
            group |= {"momentum": 0.0, "nesterov": False} if "nesterov" in group else {"lr": 0.2}
        found = [job.fold(gradients, hyperparameters=changed, measures="differences") for job in (one, two)]
        assert found[0] == found[1]
        assert [bytes(halves.before) for halves in two.halves] == before
        assert [bytes(halves.now) for halves in two.halves] == [bytes(halves.now) for halves in one.halves] != before
        assert [part for headers, parts in (shard.state() for shard in two.shards) for part in (headers, *map(bytes, parts))] == [
            part for headers, parts in (shard.state() for shard in one.shards) for part in (headers, *map(bytes, parts))
        ]
        if seed == 1:
            two.load(one.state_dict())


@pytest.mark.few(20)
@pytest.mark.parametrize(("name", "settings"), CASES, ids=IDS)
@pytest.mark.parametrize("halves", [1, 2])
def test_a_tensor_without_a_gradient_keeps_its_value_and_its_state(name: str, settings: dict[str, Any], halves: int) -> None:
    """Before it has made a step and after, as in the plain optimizer. Where one of two gradients has it, the other counts as zeros."""
    if settings == {"fused": True, "momentum": 0.9}:
        pytest.skip("torch's own step fails where some tensors have a momentum and others have none")
    model = make_model(name)
    optimizer = make_optimizer(name, settings, model)
    job, chance = Job(model, optimizer, 2, threads=2, halves=halves), random.Random(name)
    for seed in range(8):
        pair = [random_gradients(model, seed), random_gradients(model, seed + 1000)]
        for parameter, gradients in zip(model.parameters(), zip(*pair, strict=True), strict=True):
            there = [chance.random() < (0.1, 0.6, 1.0)[seed % 3] for _ in gradients]
            terms = [weight * one for one, here, weight in zip(gradients, there, (0.25, 0.75), strict=True) if here]
            parameter.grad = torch.empty_like(parameter).copy_(torch.stack(terms).sum(0)) if terms else None
            for one, here in zip(gradients, there, strict=True):
                one.copy_(one if here else torch.tensor(ABSENT))
        weighted = [(job.flat(model, gradients), weight) for gradients, weight in zip(pair, (0.25, 0.75), strict=True)]
        job.fold(weighted, hyperparameters=hyperparameters(optimizer))
        optimizer.step()
        if seed == 5 and name != "Muon":
            job.load(job.state_dict())
    for span, now in zip(job.spans, job.halves, strict=True):
        memoryview(job.memory)[span.start : span.stop] = bytes(now.now)
    job.check(model, rtol=1e-3, atol=1e-3)
    if name != "Muon":
        states_match(job.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
def test_a_checkpoint_in_which_tensors_differ_in_age(name: str) -> None:
    model = make_model(name)
    optimizer = make_optimizer(name, {"momentum": 0.9} if name == "SGD" else {}, model)
    for skip in (0, 1, 1, None):
        for i, (parameter, gradient) in enumerate(zip(model.parameters(), random_gradients(model, 7), strict=True)):
            parameter.grad = None if i == skip or i == 4 else gradient
        optimizer.step()
    job = Job(model, optimizer, 3)
    job.load(optimizer.state_dict())
    for seed in range(2):
        step_both(job, model, optimizer, seed)
    job.check(model, rtol=1e-4, atol=2e-5)
    states_match(job.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    model = make_model(name, dtype)
    model.get_submodule("1").float()
    optimizer = make_optimizer(name, {"eps": 1e-4} if name != "SGD" else {"momentum": 0.9}, model)
    job = Job(model, optimizer, 2)
    for seed in range(3):
        step_both(job, model, optimizer, seed)
    tolerance = 1e-4 if dtype == torch.float64 else 6e-2
    job.check(model, rtol=tolerance, atol=tolerance)
    make_optimizer(name, {}, model).load_state_dict(job.state_dict())


def test_sixteen_bit_sums_are_rounded_once() -> None:
    model = nn.Linear(40, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.zero_()
    job = Job(model, torch.optim.SGD(model.parameters(), lr=1.0), 1)
    gradients = [(job.flat(model, random_gradients(model, seed)), 1 / 16) for seed in range(16)]
    job.fold(gradients)
    exact = sum((random_gradients(model, seed)[0].double() for seed in range(16)), torch.zeros(1, 40, dtype=torch.float64)) / 16
    assert torch.equal(view(memoryview(job.memory), job.layout.tensors[0]), -exact.float().bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("measures", ["norms", "differences"])
def test_norms_and_how_far_g_is_from_the_one_before(dtype: torch.dtype, measures: str) -> None:
    model = make_model("SGD", dtype)
    job = Job(model, torch.optim.SGD(model.parameters()), 3)
    weights, last = [0.5, 0.25, 0.25], None
    for version in range(3):
        gradients = [random_gradients(model, 10 * version + seed) for seed in range(3)]
        found = job.fold([(job.flat(model, g), w) for g, w in zip(gradients, weights, strict=True)], measures=measures)
        vectors = [torch.cat([t.double().reshape(-1) for t in g]) for g in gradients]
        for i, vector in enumerate(vectors):
            assert sum(part.parts[i] for part in found) == pytest.approx(float(vector @ vector), rel=1e-5)
        total = sum((w * v for w, v in zip(weights, vectors, strict=True)), torch.zeros_like(vectors[0]))
        assert sum(part.total for part in found) == pytest.approx(float(total @ total), rel=1e-5)
        if last is None or measures == "norms":
            assert [part.difference for part in found] == [None] * 3
        else:
            expected = float((total - last) @ (total - last))
            assert sum(part.difference for part in found) == pytest.approx(expected, rel=1e-5 if dtype != torch.bfloat16 else 1e-2)
        last = total


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_scale_is_of_one_step_only(momentum: float) -> None:
    """With momentum the velocity stays what it is, and the step made of it is scaled."""
    model = make_model("SGD")
    job = Job(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    for seed, scale in enumerate((1.0, 4.0, 0.5, 1.0)):
        gradients = random_gradients(model, seed)
        job.fold([(job.flat(model, gradients), 1.0)], scale=scale)
        optimizer.param_groups[0]["lr"] = 0.1 * scale
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        job.check(model)


def test_gathered_gradients_are_summed_with_their_weights() -> None:
    model = make_model("SGD")
    job = Job(model, torch.optim.SGD(model.parameters()), 3)
    total = bytearray(job.layout.nbytes)
    gradients = [random_gradients(model, seed) for seed in range(3)]
    for gradient, weight in zip(gradients, (8.0, 4.0, 1.0), strict=True):
        memory = memoryview(job.flat(model, gradient))
        for shard, s in zip(job.shards, job.spans, strict=True):
            into = memoryview(total)[s.start : s.stop]
            shard.gather(into, memory[s.start : s.stop], weight, None if weight == 8.0 else into)
    by_name = dict(zip((name for name, _ in model.named_parameters()), zip(*gradients, strict=True), strict=True))
    for spec in job.layout.tensors:
        a, b, c = by_name[spec.name]
        torch.testing.assert_close(view(memoryview(total), spec), 8 * a + 4 * b + c)


def test_several_threads_give_the_same() -> None:
    models = [make_model("Adam") for _ in range(2)]
    optimizers = [make_optimizer("Adam", {}, model) for model in models]
    jobs = [Job(models[0], optimizers[0], 1), Job(models[1], optimizers[1], 1, threads=3)]
    before = torch.get_num_threads()
    for seed in range(5):
        for job, model, optimizer in zip(jobs, models, optimizers, strict=True):
            step_both(job, model, optimizer, seed)
    assert jobs[0].memory == jobs[1].memory
    states_match(jobs[1].state_dict(), jobs[0].state_dict())
    assert torch.get_num_threads() == before


def test_an_empty_span_folds_to_nothing() -> None:
    model = nn.Linear(2, 1, bias=False)
    job = Job(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), 3)
    assert [s.nbytes for s in job.spans].count(0) == 2
    job.fold([(job.flat(model, random_gradients(model, 0)), 1.0)], measures="norms")
    assert len(job.state_dict()["state"]) == 1


class TestRefusals:
    def test_wrong_sizes(self) -> None:
        model = make_model("SGD")
        job = Job(model, torch.optim.SGD(model.parameters()), 1)
        with pytest.raises(ProtocolError, match=f"a gradient of 64 bytes for a span of {job.layout.nbytes} bytes"):
            job.shards[0].fold([(memoryview(bytearray(64)), 1.0)])
        with pytest.raises(ConfigurationError, match="64 bytes of memory"):
            Shard(job.layout, job.spans[0], job.spec, memoryview(bytearray(64)))

    def test_a_cut_tensor_where_whole_ones_are_needed(self) -> None:
        model = make_model("Adafactor")
        optimizer = torch.optim.Adafactor(model.parameters())
        with pytest.raises(ConfigurationError, match="splittable=False"):
            Shard(Layout.of(model, optimizer), Span(0, 64), spec_of(optimizer), memoryview(bytearray(64)))

    @pytest.mark.parametrize("groups", [[{"lr": "x"}], [{"lr": -1.0}], [{}, {}], [{"step": 3}], 7])
    def test_settings_leave_everything_as_it_was(self, groups: Any) -> None:
        model = make_model("SGD")
        job = Job(model, torch.optim.SGD(model.parameters(), lr=0.5), 1)
        gradient = job.flat(model, random_gradients(model, 0))
        before = bytes(job.memory)
        with pytest.raises(ProtocolError):
            job.fold([(gradient, 1.0)], hyperparameters=groups)
        assert bytes(job.memory) == before

    @pytest.mark.parametrize(
        "headers",
        [
            None,
            [3],
            [[0, "exp_avg", 0, 2, None]],
            [[99, "exp_avg", 0, 2, None, "float32"]],
            [[0, "exp_avg", 0, 2, None, "object"]],
            [[0, "exp_avg", 5, 3, None, "float32"]],
            [[0, "exp_avg", 0, 10**6, None, "float32"]],
            [[0, "exp_avg", 0, 2, None, "float32"]],
            [[0, "exp_avg", 0, 2, [2], "float32"]],
            [[0, 1, 0, 2, None, "float32"]],
            [[True, "exp_avg", 0, 2, None, "float32"]],
        ],
    )
    def test_state_that_does_not_fit(self, headers: Any) -> None:
        model = make_model("Adam")
        job = Job(model, make_optimizer("Adam", {}, model), 1)
        with pytest.raises(ProtocolError):
            job.shards[0].read_state(headers, bytes(8))

    def test_a_checkpoint_of_another_model(self) -> None:
        model = make_model("Adam")
        optimizer = make_optimizer("Adam", {}, model)
        job = Job(model, optimizer, 2)
        step_both(job, model, optimizer, 0)
        state = optimizer.state_dict()
        state["state"][0]["exp_avg"] = torch.zeros(99)
        with pytest.raises(ConfigurationError, match=r"saved exp_avg of 0\.bias has shape \(99,\), the parameter has \(5,\)"):
            job.load(state)
        with pytest.raises(ConfigurationError, match="load it where it was saved from"):
            job.load(torch.optim.Adam(model.parameters()).state_dict())

    def test_a_missing_shard_is_noticed(self) -> None:
        model = make_model("Adam")
        optimizer = make_optimizer("Adam", {}, model)
        job = Job(model, optimizer, 2)
        step_both(job, model, optimizer, 0)
        headers, data = job.shards[0].state()
        with pytest.raises(ProtocolError, match="a shard's are missing"):
            assemble_state_dict(job.layout, job.spec, [(headers, b"".join(data))], optimizer.state_dict()["param_groups"])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_fold_reports_how_far_it_has_come(threads: int) -> None:
    """What it has reported is what it will be in the end, and the result is that of a fold which reports nothing."""
    model = make_model("Adam")
    optimizer = make_optimizer("Adam", {}, model)
    layout = Layout.of(model, optimizer)
    span = layout.spans(1, True)[0]
    gradient = torch.randn(layout.nbytes // 4).view(torch.uint8)
    memories = [torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(2)]
    shards = [Shard(layout, span, spec_of(optimizer), memory, threads=threads) for memory in memories]
    norms = shards[0].fold([(gradient, 0.5)], measures="norms")
    seen: list[tuple[int, torch.Tensor]] = []
    measured = shards[1].fold([(gradient, 0.5)], measures="norms", ready=lambda nbytes: seen.append((nbytes, memories[1][:nbytes].clone())))
    assert norms is not None and measured is not None
    assert measured.total == pytest.approx(norms.total)
    assert torch.equal(*memories)
    assert len(seen) >= 2
    assert [nbytes for nbytes, _ in seen] == sorted({nbytes for nbytes, _ in seen})
    assert all(torch.equal(values, memories[1][:nbytes]) for nbytes, values in seen)
    assert layout.nbytes - seen[-1][0] < ALIGNMENT, "only padding may be left"
