"""The examples of Lightning and of transformers as jobs: a worker is slow, one is killed, and the checkpoint is loaded without offbeat."""

from __future__ import annotations

import doctest
import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.job import Ended, Job, Start
from torch import nn

pytestmark = pytest.mark.whole_torch
EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 120.0

needs_lightning = pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed: pip install 'offbeat[lightning]'")
needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="transformers is not installed: pip install 'offbeat[transformers]'",
)


def survived(job: Job, victim: int) -> Ended:
    """Wait for the job's end: the victim was killed, came back and contributed, and each index was used once in each epoch."""
    ended = job.ended(DEADLINE_S)
    assert ended.status == 0, ended.err
    assert ended.tally().problems() == []
    exits = [r["detail"] for r in ended.records if r["kind"] == "process" and r["what"] == "exited" and r["number"] == victim]
    assert exits[0] == "killed by SIGKILL"
    folded = [r for r in ended.records if r["kind"] == "settle" and r["fate"] == "folded"]
    assert any(r["worker"] == victim and r["incarnation"] == 2 for r in folded), "the victim has not trained again"
    reports = ended.reports()
    assert reports and all(report["folded"] == report["indices"] for report in reports), reports
    return ended


@needs_lightning
def test_lightning_survives_a_death_and_its_checkpoint_is_a_plain_one(start: Start, tmp_path: Path) -> None:
    options = ("--workers", "2", "--preload", "lightning.pytorch", "--preload", "sklearn.datasets", "--slow", "0=0.02", "--kill", "1@30")
    own = ("--sync", "ssp(staleness=3)", "--epochs", "4", "--checkpoints", str(tmp_path))
    ended = survived(start(*options, str(EXAMPLES / "lightning_digits.py"), *own), victim=1)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model.load_state_dict({name.removeprefix("layers."): value for name, value in checkpoint["state_dict"].items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.1)
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    assert optimizer.param_groups[0]["lr"] == 0.05, "the scheduler has halved it once"
    assert len(optimizer.state) == 4
    place = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]
    assert place["epoch"] == 4 and place["rest"] is None, "it was saved before the end of the last epoch"
    assert float(ended.out.rsplit("test accuracy ", 1)[1].split()[0]) > 90


@needs_transformers
def test_transformers_survives_the_chiefs_death_and_its_model_is_a_plain_one(start: Start, tmp_path: Path) -> None:
    options = ("--workers", "2", "--preload", "transformers.trainer", "--slow", "1=0.05", "--kill", "0@15")
    odd = ("--batch-size", "17", "--accumulation", "2")  # 83 batches: in each epoch somebody has half a group
    own = ("--sync", "ssp(staleness=3)", "--epochs", "2", *odd, "--output", str(tmp_path / "gpt2"))
    ended = survived(start(*options, str(EXAMPLES / "gpt2.py"), *own), victim=0)
    assert [r for r in ended.records if r["kind"] == "warning"] == [], "Trainer divides by the batches that a group has"
    assert "begins its script after" not in ended.err, "the schedule follows the data, and nobody counts"
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2")
    text = torch.tensor([[ord(character) for character in "        parser.add_argument('--foo', help='the foo')\n"]])
    assert float(model(text, labels=text).loss) < 3.5, "a model that knows nothing has 4.85"
    (saved,) = (tmp_path / "gpt2").glob("checkpoint-*")
    optimizer = torch.load(saved / "optimizer.pt", weights_only=True)
    assert len(optimizer["state"]) == len(list(model.parameters()))
    assert optimizer["param_groups"][0]["lr"] < 1e-4, "the schedule ends with the data"
    assert json.loads((saved / "offbeat.json").read_text())["epoch"] == 2


def examples_of(module: str) -> None:
    """Run the examples in the docstrings of an integration, which ``pytest`` leaves out."""
    failed, run = doctest.testmod(importlib.import_module(f"offbeat.integrations.{module}"), optionflags=doctest.ELLIPSIS)
    assert run and not failed


@needs_lightning
def test_lightning_trains_where_its_accelerator_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator

    from offbeat.integrations.lightning import OffbeatStrategy

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    places = [OffbeatStrategy().root_device, OffbeatStrategy(accelerator=CUDAAccelerator()).root_device]
    places += [OffbeatStrategy(accelerator=CPUAccelerator(), device=device).root_device for device in (None, "cuda:1")]
    assert places == [torch.device(name) for name in ("cuda:0", "cuda:0", "cpu", "cuda:1")]


@needs_lightning
def test_lightning_in_one_process(tmp_path: Path) -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from offbeat.integrations.lightning import OffbeatStrategy

    examples_of("lightning")
    examples_of("pytorch_lightning")
    data = torch.utils.data.TensorDataset(torch.randn(40, 3, generator=torch.Generator().manual_seed(0)))

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.seen: list[float] = []

        def training_step(self, batch: Any) -> Any:
            self.seen += batch[0][:, 0].tolist()
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    def fit(strategy: Any, epochs: int, checkpoint: Path | None = None, **options: Any) -> Module:
        torch.manual_seed(0)
        module = Module()
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(strategy=strategy, max_epochs=epochs, accelerator="cpu", **quiet, **options)
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=checkpoint)
        return module

    plain = fit("auto", 3, enable_checkpointing=False)
    ours = fit(OffbeatStrategy(), 3, callbacks=[ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=15, save_top_k=-1)])
    assert torch.equal(ours.layer.weight, plain.layer.weight) and ours.seen == plain.seen
    resumed = fit(OffbeatStrategy(), 3, tmp_path / "step=15.ckpt", enable_checkpointing=False)
    assert resumed.seen == ours.seen[60:], "from the middle of the second epoch"
    assert torch.equal(resumed.layer.weight, ours.layer.weight)


@needs_transformers
def test_transformers_in_one_process(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    import offbeat
    from offbeat.integrations.transformers import OffbeatTrainer

    examples_of("transformers")
    pieces = torch.randint(9, (22, 8), generator=torch.Generator().manual_seed(0))
    data: Any = [{"input_ids": piece, "labels": piece} for piece in pieces]
    config = GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=9, n_positions=8)

    def arguments(name: str, **more: Any) -> TrainingArguments:
        own = {"num_train_epochs": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "save_steps": 2, **more}
        return TrainingArguments(str(tmp_path / name), report_to=[], disable_tqdm=True, dataloader_pin_memory=False, **own)

    def trained(kind: Any, name: str, resume: Path | None = None, **more: Any) -> Any:
        torch.manual_seed(0)
        trainer = kind(GPT2LMHeadModel(config), arguments(name, train_sampling_strategy="sequential", **more), train_dataset=data)
        trainer.train(resume_from_checkpoint=str(resume) if resume is not None else None)
        return trainer

    def differences(one: Any, other: Any) -> float:
        return max(float((a - b).detach().abs().max()) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))

    plain, ours = trained(Trainer, "plain"), trained(OffbeatTrainer, "ours")
    assert ours.state.global_step == plain.state.global_step == 12
    assert differences(plain, ours) < 1e-6
    resumed = trained(OffbeatTrainer, "resumed", tmp_path / "ours" / "checkpoint-8")
    assert resumed.state.global_step == 12 and differences(resumed, ours) < 1e-6
    assert len(resumed._ours.reports) == 1, "only the rest of the second epoch"
    resumed = trained(OffbeatTrainer, "after the first", tmp_path / "ours" / "checkpoint-6")
    assert differences(resumed, ours) < 1e-6, "it draws the numbers for dropout as if it had not been interrupted"
    with pytest.raises(offbeat.ConfigurationError, match="auto_find_batch_size"):
        OffbeatTrainer(GPT2LMHeadModel(config), arguments("refused", auto_find_batch_size=True), train_dataset=data)
    with pytest.raises(offbeat.ConfigurationError, match="one job for each trial"):
        ours.hyperparameter_search()
