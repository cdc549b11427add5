"""Lightning on scikit-learn's digits. Changed: one import, and the Trainer's strategy.

    python examples/lightning_digits.py                                # one process, without a launcher
    offbeat run --workers 2 examples/lightning_digits.py               # two workers
    offbeat run --workers 2 --slow 1=0.05 examples/lightning_digits.py --sync "ssp(staleness=3)"

Needs: pip install 'offbeat[lightning,examples]'
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.integrations.lightning import OffbeatStrategy  # offbeat


class Digits(lightning.LightningModule):
    """A network of two layers for images of 8 x 8 pixels."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.layers(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        self.log("accuracy", (self.layers(x).argmax(dim=1) == y).float().mean())

    def configure_optimizers(self):  # type: ignore[no-untyped-def] # Lightning has a type of its own for it
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on scikit-learn's digits with Lightning.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per worker and step (default: 16)")
    parser.add_argument("--sync", default="bsp", help="synchronization rule, for instance 'ssp(staleness=3)' (default: bsp)")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="folder for last.ckpt (default: checkpoints)")
    return parser.parse_args()


def main() -> None:
    args = options()
    lightning.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train_set, test_set = torch.utils.data.random_split(data, [1437, 360])
    last = args.checkpoints / "last.ckpt"
    trainer = lightning.Trainer(
        strategy=OffbeatStrategy(sync=args.sync),  # offbeat
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(args.checkpoints, filename="last", enable_version_counter=False)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Digits(),
        DataLoader(train_set, args.batch_size, shuffle=True),
        DataLoader(test_set, batch_size=360),
        ckpt_path=last if last.exists() else None,
    )
    if offbeat.chief():  # offbeat
        accuracy = trainer.callback_metrics.get("accuracy")  # none if the checkpoint had all epochs already
        print("nothing left to train" if accuracy is None else f"test accuracy {100 * float(accuracy):.1f} %", flush=True)


if __name__ == "__main__":
    main()
