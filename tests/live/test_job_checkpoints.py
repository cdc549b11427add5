"""Checkpoints of a whole job: from each of them, a job goes on as the uninterrupted one did, and its script says nothing about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.live.harness import Job, Worker, seeded
from tests.live.samples import audited
from tests.support.same_state import same
from tests.tiers import NIGHT, marked
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.errors import OffbeatWarning
from offbeat.place import _steps
from offbeat.runtime.coordination.checkpoints import IDLE_FOLDS
from offbeat.runtime.job.checkpoint_folder import Checkpoint, CheckpointFolder, manifest_of
from offbeat.runtime.job.settings import CheckpointOrder

torch.optim.AdamW([torch.zeros(1)])  # the first one of a process imports torch._dynamo: outside of any job's deadline

SIZE, BATCH, EPOCHS = 80, 10, 3


class Script:
    """A user's script, which is started from its top each time. With one worker each batch has random numbers of its own."""

    def __init__(self, worker: Worker, sync: str, *, counts: bool = False) -> None:
        job, alone = worker.job, worker.job.settings.workers == 1
        awaits = sync in ("bsp", "full") and job.settings.checkpoint is not None and job.settings.checkpoint.every_versions == 1
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(SIZE, 6, generator=generator)
        data = TensorDataset(x, x.sum(1, keepdim=True).sin(), torch.arange(SIZE))
        self.model = network(0.2 if alone else 0.0)
        with torch.no_grad():
            for p in filter(lambda one: one.requires_grad, self.model.parameters()):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
        self.optimizer = worker.distribute(torch.optim.AdamW(self.model.parameters(), lr=0.01), self.model, sync)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 7, 8], 0.5)
        self.used: list[list[int]] = []
        loader = DataLoader(data, batch_sampler=self.optimizer.batch_sampler(data, batch_size=BATCH))
        self.epochs: list[int] = []
        for epoch in offbeat.epochs(EPOCHS, loader) if counts else range(EPOCHS):
            self.epochs.append(epoch)
            self.used.append([])
            for x, y, index in loader:
                if awaits and self.optimizer.version > 0:
                    job.await_checkpoint(self.optimizer.version)
                self.optimizer.zero_grad()
                nn.functional.mse_loss(self.model(x), y).backward()
                self.optimizer.step()
                self.schedule.step()
                self.used[-1] += index.tolist()
            torch.rand(3)  # an evaluation, say
        self.state = self.optimizer.state_dict()
        self.optimizer.pull()


def network(dropout: float = 0.0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
    model.register_buffer("rotations", torch.polar(torch.ones(4), torch.arange(4.0)))  # as many transformers have
    model.register_parameter("quantized", nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False))
    return model


def run(sync: str, *, workers: int = 2, counts: bool = False, **job: Any) -> list[Script]:
    with Job(workers, **job) as running:
        scripts = running.run(lambda worker: Script(worker, sync, counts=counts))
    assert not [told for told in running.checkpoints if told["failed"] or told["missing"]]
    return scripts


EXACT = [("bsp", 1, 1), ("bsp", 2, 1), ("bsp", 2, 2), ("full", 2, 1)]


@pytest.mark.parametrize(("sync", "workers", "servers"), EXACT)
def test_from_each_checkpoint_rules_in_step_go_on_bit_for_bit(tmp_path: Path, sync: str, workers: int, servers: int) -> None:
    """With random numbers, too, where a batch cannot go to another worker; buffers of several workers differ with the batches."""
    order = CheckpointOrder(folder=str(tmp_path / "job"), every_versions=1, keep=100)
    steps = EPOCHS * SIZE // BATCH // workers
    whole = run(sync, workers=workers, servers=servers, checkpoint=order)
    for version in range(1, steps, 1 if NIGHT else 2):
        rest = run(sync, workers=workers, servers=servers, resume=str(tmp_path / "job" / f"version-{version:08d}"))
        for before, after in zip(whole, rest, strict=True):
            assert same(dict(before.model.named_parameters()), dict(after.model.named_parameters())), version
            assert same(before.state, after.state), version
            assert same(before.schedule.state_dict(), after.schedule.state_dict()), version
            assert after.optimizer.version == (steps if sync == "bsp" else steps - version), "ranks count their rounds anew"
            assert workers > 1 or same(before.model.state_dict(), after.model.state_dict())
        assert sum(len(epoch) for script in rest for epoch in script.used) == (steps - version) * workers * BATCH


def test_the_model_of_a_checkpoint_is_loaded_by_plain_torch(tmp_path: Path) -> None:
    run("bsp", checkpoint=CheckpointOrder(folder=str(tmp_path), every_versions=4))
    newest = CheckpointFolder(tmp_path).newest()
    assert newest is not None
    model = network()
    assert str(model.load_state_dict(torch.load(newest.path / "model.pt", weights_only=True))) == "<All keys matched successfully>"
    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(torch.load(newest.path / "optimizer.pt", weights_only=True))
    assert float(plain.state[model.get_parameter("0.weight")]["step"]) == newest.version


class Quantized(torch.Tensor):
    """A tensor made of others, as those of torchao are: it knows the few operations that its model needs."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Quantized:
        made: Quantized = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"Quantized does not know {func}")


def test_a_model_with_quantized_weights_is_trained_and_saved_without_them(tmp_path: Path) -> None:
    def script(worker: Worker) -> None:
        model = network()
        model.register_parameter("base", nn.Parameter(Quantized(torch.ones(4, dtype=torch.int8), torch.ones(1)), requires_grad=False))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = worker.distribute(torch.optim.SGD(trained, lr=0.01), model, "bsp")
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step(samples=4)
        worker.job.await_checkpoint(1)

    order = CheckpointOrder(folder=str(tmp_path), every_versions=1)
    with pytest.warns(OffbeatWarning, match=r"checkpoints lack base \(\w+\), which are no plain tensors"), Job(2, checkpoint=order) as job:
        job.run(script)
    newest = CheckpointFolder(tmp_path).newest()
    assert newest is not None
    assert torch.load(newest.path / "model.pt", weights_only=True).keys() == network().state_dict().keys()


RULES = (
    *(
        "bsp",
        "backup(b=1)",
        "dbw",
        "b_dbw",
        "asp",
        "ssp(staleness=2)",
        "dssp(lower=1, upper=3)",
        "rennala(batch=3)",
        "ringmaster(threshold=4)",
    ),
    *("psp(c=2, b=0.5)", "elastic", "elastic(mode=local)", "ensemble", "adacomm"),
)
RANKS = ("majority", "solo", "first_of(m=2)", "quorum(q=2)", "full", "dpsgd", "sgp", "adpsgd")
"""Without servers."""
SPLITS = ("elastic(mode=local)", "ensemble")
"""Workers may have splits of their own; with other workers the epoch begins anew."""


def made(sync: str, folder: Path) -> Checkpoint:
    """A checkpoint of the middle of a job; of another job if the first one ends before a checkpoint is whole: on a busy machine it may."""
    for attempt in range(10):
        order = CheckpointOrder(folder=str(folder / str(attempt)), every_versions=1, keep=100)
        run(sync, checkpoint=order)
        if any((folder / str(attempt)).glob("version-*")):
            return middle(folder / str(attempt))
    raise AssertionError(f"ten jobs under {sync} have made no checkpoint")


def middle(folder: Path) -> Checkpoint:
    """A checkpoint of the job's middle: of the second epoch, if there is one; else of another that is not over."""
    found = [Checkpoint(path, manifest) for path in sorted(folder.glob("version-*")) if (manifest := manifest_of(path)) is not None]
    epochs = {one.version: dict(one.manifest["optimizers"][0]["places"])[0]["epoch"] for one in found}
    for wanted in ({1}, set(range(EPOCHS)), {EPOCHS}):
        if inside := [one for one in found if epochs[one.version] in wanted]:
            return inside[len(inside) // 2]
    raise AssertionError(f"no checkpoint in {folder}")


@pytest.mark.parametrize(("sync", "workers"), [("bsp", 1), ("full", 2)])
def test_a_script_that_counts_its_epochs_begins_with_that_of_the_checkpoint(tmp_path: Path, sync: str, workers: int) -> None:
    """And goes on bit for bit as well: random generators are set when its first batch is dealt out, not before."""
    order = CheckpointOrder(folder=str(tmp_path / "job"), every_versions=1, keep=100)
    steps = SIZE // BATCH // workers
    whole = run(sync, workers=workers, checkpoint=order)
    for version, first in ((steps - 1, 0), (steps, 1), (steps + 2, 1), (2 * steps + 1, 2), (3 * steps, 3)):
        rest = run(sync, workers=workers, counts=True, resume=str(tmp_path / "job" / f"version-{version:08d}"))
        for before, after in zip(whole, rest, strict=True):
            assert after.epochs == list(range(first, EPOCHS))
            assert same(dict(before.model.named_parameters()), dict(after.model.named_parameters())), version


@pytest.mark.parametrize("sync", ["bsp", "full"])
def test_a_script_that_counts_its_steps_goes_on_after_those_of_the_checkpoint(tmp_path: Path, sync: str) -> None:
    def script(worker: Worker) -> list[int]:
        model = nn.Linear(3, 1)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model, sync)
        made = []
        for step in _steps(optimizer._session, 40, 1):
            model(torch.randn(5, 3)).square().mean().backward()
            optimizer.step(samples=5)
            made.append(step)
        return made

    with Job(2, checkpoint=CheckpointOrder(folder=str(tmp_path), every_versions=4, keep=9)) as job:
        assert job.run(script) == [list(range(40))] * 2
        job.until(lambda: bool(job.checkpoints), "a checkpoint")
    for taken in folder_of_each(tmp_path):
        with Job(2, resume=str(taken.path)) as job:
            assert job.run(script) == [list(range(taken.version, 40))] * 2


@pytest.mark.parametrize("sync", marked(RULES + RANKS, "bsp", "majority"))
@pytest.mark.parametrize(
    ("workers", "servers"), [pytest.param(2, 1, marks=pytest.mark.night, id="as before"), pytest.param(3, 2, id="others")]
)
def test_under_every_rule_each_index_is_accounted_for(tmp_path: Path, sync: str, workers: int, servers: int) -> None:
    servers = 1 if sync in RANKS else servers
    taken = made(sync, tmp_path / "job")
    place = dict(taken.manifest["optimizers"][0]["places"])[0]
    scripts = run(sync, workers=workers, servers=servers, resume=str(taken.path), journal=str(tmp_path / "journal.jsonl"))
    records = audited(tmp_path / "journal.jsonl")
    reports = {record["epoch"]: record["report"] for record in records if record["kind"] == "epoch_ended"}
    assert sorted(reports) == list(range(place["epoch"], EPOCHS))
    for epoch, report in reports.items():
        assert report["folded"] + report["dropped"] + report["rejected"] + report["unused"] == report["indices"], (epoch, report)
        assert sync in SPLITS or report["indices"] == SIZE, (epoch, report)
        assert epoch == place["epoch"] or sync not in {"bsp", "asp"} or report["folded"] == SIZE
    used = sum(len(epoch) for script in scripts for epoch in script.used[place["epoch"] : place["epoch"] + 1])
    rest = [(0, SIZE)] if place["rest"] is None and place["epoch"] < EPOCHS else place["rest"] or []
    left = sum(stop - start for start, stop in rest)
    assert used >= left or sync in SPLITS, "what the lost versions used, and what nobody used, is used now"
    assert sync in RANKS or left == 0 or all(script.optimizer.version > taken.version for script in scripts)


@pytest.mark.filterwarnings("error:Detected call of")
def test_what_a_resumed_script_loads_by_itself_is_overwritten(tmp_path: Path) -> None:
    """Also where the workers read the parameters in the job's own memory. A scheduler's step after an empty epoch is not too early."""
    run("bsp", checkpoint=CheckpointOrder(folder=str(tmp_path / "job"), every_versions=1, keep=100))
    taken = middle(tmp_path / "job")
    saved = torch.load(taken.path / "model.pt", weights_only=True)
    seen: list[dict[str, torch.Tensor]] = []

    def script(worker: Worker) -> None:
        model = network()
        optimizer = worker.distribute(torch.optim.AdamW(model.parameters(), lr=0.01), model, "bsp")
        assert optimizer.version == taken.version
        assert all(torch.equal(value, saved[name]) for name, value in model.named_parameters()), "at once"
        with torch.no_grad():
            for parameter in filter(lambda one: one.requires_grad, model.parameters()):
                parameter.fill_(float(worker.number))
        sampler = optimizer.batch_sampler(range(SIZE), batch_size=BATCH)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        for _ in range(EPOCHS):
            for _ in sampler:
                seen.append({name: value.detach().clone() for name, value in model.named_parameters()})
                return
            schedule.step()

    with Job(2, resume=str(taken.path)) as job:
        job.run(script)
    assert len(seen) == 2
    assert all(same(one, {name: saved[name] for name in one}) for one in seen)


def test_two_optimizers_of_a_script_resume_together(tmp_path: Path) -> None:
    """Each is of the version that it had after the same batch, bit for bit, and the second one has files of its own."""

    def script(worker: Worker) -> tuple[list[int], list[torch.Tensor], list[torch.Tensor]]:
        with seeded(0):
            models = [nn.Linear(3, 2), nn.Linear(2, 1)]
        optimizers = [worker.distribute(torch.optim.AdamW(model.parameters(), lr=0.01), model) for model in models]
        schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
        sampler = optimizers[0].batch_sampler(range(SIZE), batch_size=BATCH)
        begun = [optimizer.version for optimizer in optimizers]

        def parameters() -> list[torch.Tensor]:
            return [parameter.detach().clone() for model in models for parameter in model.parameters()]

        first = parameters()
        for _ in range(2):
            for batch in sampler:
                x = torch.tensor(batch, dtype=torch.float32)[:, None].expand(-1, 3)
                for optimizer, schedule in zip(optimizers, schedules, strict=True):
                    optimizer.zero_grad()
                    models[1](models[0](x)).square().mean().backward()
                    optimizer.step()
                    schedule.step()
        return begun, first, parameters()

    with Job(2, checkpoint=CheckpointOrder(folder=str(tmp_path), every_versions=3, keep=9)) as job:
        whole = job.run(script)
    taken = CheckpointFolder(tmp_path).newest()
    assert taken is not None
    with Job(2, resume=str(taken.path)) as job:
        results = job.run(script)
    assert [one["version"] for one in taken.manifest["optimizers"]] == [taken.version] * 2
    saved = [torch.load(taken.path / name, weights_only=True) for name in ("model.pt", "model-1.pt")]
    for (begun, first, last), (_, _, end) in zip(results, whole, strict=True):
        assert begun == [taken.version] * 2
        assert same(first, [value for model in saved for value in model.values()])
        assert same(last, end), "bit for bit"


TRAININGS = 3
EPOCHS_EACH = 2
EACH = EPOCHS_EACH * SIZE // BATCH // 2


def one_after_the_other(
    worker: Worker, sync: str, epochs: int = EPOCHS_EACH, *, closes: bool = False
) -> list[tuple[int, list[torch.Tensor]]]:
    """Train three models, with an optimizer each; the version at the beginning of each training, and the parameters at its end."""
    trained = []
    for number in range(TRAININGS):
        with seeded(number):
            model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer = worker.distribute(torch.optim.AdamW(model.parameters(), lr=0.01), model, sync)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        begun, awaits = optimizer.version, worker.job.settings.checkpoint is not None and epochs == EPOCHS_EACH
        unsure = (1 if closes else IDLE_FOLDS) if number else 0
        sampler = optimizer.batch_sampler(range(SIZE), batch_size=BATCH)
        for _ in range(epochs):
            for batch in sampler:
                if awaits and optimizer.version > unsure:  # else a job is over before it has saved much
                    known = closes or optimizer.version != unsure + 1  # else it is known from now on that the training before is over
                    saved = number * EACH + (optimizer.version if known or not number else 0)
                    while not worker.job.has_saved(saved):
                        worker.sessions[-1].look()  # a rank's replica of a model before is asked for, too
                optimizer.zero_grad()
                model(torch.tensor(batch, dtype=torch.float32)[:, None].expand(-1, 3)).square().mean().backward()
                optimizer.step()
                schedule.step()
        optimizer.pull()
        trained.append((begun, [parameter.detach().clone() for parameter in model.parameters()]))
        if closes:
            optimizer.close()
            while awaits and not worker.job.has_saved((number + 1) * EACH):
                pass
    return trained


@pytest.mark.parametrize(
    ("sync", "servers", "closes"), [("bsp", 1, False), ("bsp", 2, False), ("full", 1, False), ("bsp", 1, True), ("full", 1, True)]
)
@pytest.mark.parametrize("training", range(TRAININGS))
def test_a_job_resumes_in_the_training_in_which_it_was_saved(
    tmp_path: Path, sync: str, servers: int, closes: bool, training: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Trainings that were over stay so, and those that had yet to begin begin."""

    def script(worker: Worker) -> list[tuple[int, list[torch.Tensor]]]:
        return one_after_the_other(worker, sync, closes=closes)

    with Job(2, servers=servers, checkpoint=CheckpointOrder(folder=str(tmp_path), every_versions=1, keep=99)) as job:
        whole = job.run(script)
        job.until(lambda: bool(job.checkpoints), "a checkpoint")
    assert all(told["failed"] is None and not told["missing"] for told in job.checkpoints)
    versions = [version for version, _ in CheckpointFolder(tmp_path).versions()]
    assert versions == sorted(versions, reverse=True)
    taken = next((one for one in folder_of_each(tmp_path) if len(one.manifest["optimizers"]) == training + 1), None)
    assert taken is not None
    assert taken.version == sum(one["version"] for one in taken.manifest["optimizers"])
    with Job(2, servers=servers, resume=str(taken.path)) as job:
        results = job.run(script)
    assert sum("is not in the checkpoint" in record.message for record in caplog.records) == TRAININGS - 1 - training
    for trained, before in zip(results, whole, strict=True):
        if sync == "bsp":
            assert [begun for begun, _ in trained] == [EACH] * training + [taken.version - training * EACH] + [0] * (
                TRAININGS - 1 - training
            )
        assert all(same(now, then) for (_, now), (_, then) in zip(trained, before, strict=True)), "bit for bit"


def folder_of_each(folder: Path) -> list[Checkpoint]:
    """The checkpoints of a folder, newest first."""
    return [Checkpoint(path, manifest) for _, path in CheckpointFolder(folder).versions() if (manifest := manifest_of(path)) is not None]


def test_the_end_is_saved_where_the_first_training_s_end_has_been(tmp_path: Path) -> None:
    last = SIZE // BATCH // 2
    with Job(2, checkpoint=CheckpointOrder(folder=str(tmp_path), every_versions=last)) as job:
        job.run(lambda worker: one_after_the_other(worker, "full", epochs=1))
        job.until(lambda: bool(job.checkpoints), "the checkpoint of the first training's end")
        job.ask_for_last_checkpoint()
    newest = CheckpointFolder(tmp_path).newest()
    assert newest is not None and [one["version"] for one in newest.manifest["optimizers"]] == [last] * TRAININGS


@pytest.mark.parametrize("number", [1, 2])
def test_the_checkpoint_of_the_last_version_has_each_workers_part(tmp_path: Path, number: int) -> None:
    """The script asks for no batch and makes no step after it, of either optimizer."""

    def script(worker: Worker) -> None:
        models = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(number)]
        optimizers = [worker.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model) for model in models]
        for _, model, optimizer in ((step, *both) for step in range(4) for both in zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            model(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()

    with Job(2, checkpoint=CheckpointOrder(folder=str(tmp_path), every_versions=4, keep=9)) as job:
        job.run(script)
        job.until(lambda: bool(job.checkpoints), "the checkpoint")
    assert job.checkpoints[0]["missing"] == []


def test_frozen_and_tied_parameters_are_in_the_model_of_each_checkpoint(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
            self.other.weight = self.one.weight
            self.frozen = nn.Parameter(torch.full((2,), 7.0), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.other(self.one(x)))

    def script(worker: Worker, saves: bool = True) -> None:
        model = Tied()
        optimizer = worker.distribute(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9), model)
        for batch in optimizer.batch_sampler(range(SIZE), batch_size=BATCH):
            if optimizer.version and saves:
                worker.job.await_checkpoint(optimizer.version)
            optimizer.zero_grad()
            model(torch.tensor(batch, dtype=torch.float32)[:, None].expand(-1, 3) / SIZE).square().mean().backward()
            optimizer.step()

    with Job(1, checkpoint=CheckpointOrder(folder=str(tmp_path), every_versions=1)) as job:
        job.run(script)
    taken = CheckpointFolder(tmp_path).newest()
    assert taken is not None and taken.version > 1
    model = Tied()
    model.frozen.data.zero_()
    assert str(model.load_state_dict(torch.load(taken.path / "model.pt", weights_only=True))) == "<All keys matched successfully>"
    assert model.frozen.tolist() == [7.0, 7.0]
    with Job(1, resume=str(taken.path)) as job:
        job.run(lambda worker: script(worker, saves=False))


def test_an_average_that_the_model_has_is_in_each_checkpoint_as_it_is_then(tmp_path: Path) -> None:
    """As BYOL's target encoder: parameters that are not trained, and that the script changes after each step."""

    class WithTarget(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = nn.Linear(3, 1), nn.Linear(3, 1).requires_grad_(False)

    def script(worker: Worker) -> dict[int, list[torch.Tensor]]:
        with seeded(0):
            model = WithTarget()
        optimizer = worker.distribute(torch.optim.SGD(model.online.parameters(), lr=0.01), model)
        averages = {}
        for batch in optimizer.batch_sampler(range(SIZE), batch_size=BATCH):
            optimizer.zero_grad()
            model.online(torch.tensor(batch, dtype=torch.float32)[:, None].expand(-1, 3) / SIZE).square().mean().backward()
            optimizer.step()
            for average, one in zip(model.target.parameters(), model.online.parameters(), strict=True):
                average.data.lerp_(one.data, 0.5)
            averages[optimizer.version] = [average.detach().clone() for average in model.target.parameters()]
        return averages

    with Job(1, checkpoint=CheckpointOrder(folder=str(tmp_path), every_versions=3, keep=9)) as job:
        [averages] = job.run(script)
        job.ask_for_last_checkpoint()
    versions = CheckpointFolder(tmp_path).versions()
    assert len(versions) > 1
    for version, path in versions:
        model = torch.load(path / "model.pt", weights_only=True)
        assert same([model["target.weight"], model["target.bias"]], averages[version]), version
    oldest, path = min(versions)
    with Job(1, resume=str(path)) as job:
        [resumed] = job.run(script)
    assert list(resumed) == [version for version in averages if version > oldest] != []
    assert all(same(resumed[version], averages[version]) for version in resumed), "the script has made it anew, and it was set"
