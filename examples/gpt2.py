"""A tiny GPT-2 on the source of Python's argparse module, character by character, with transformers. Changed: the Trainer's class.

    python examples/gpt2.py                                # one process, without a launcher
    offbeat run --workers 2 examples/gpt2.py               # two workers
    offbeat run --workers 2 --slow 1=0.05 examples/gpt2.py --sync "ssp(staleness=3)"

The model has random weights, so nothing is downloaded. Needs: pip install 'offbeat[transformers]'
"""

from __future__ import annotations

import argparse
import inspect

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from offbeat.integrations.transformers import OffbeatTrainer  # offbeat

LENGTH = 64


class Characters(Dataset[dict[str, Tensor]]):
    """Pieces of a text, each character a number below 128."""

    def __init__(self, text: str) -> None:
        self.text = torch.tensor([min(ord(character), 127) for character in text])

    def __len__(self) -> int:
        return len(self.text) // LENGTH

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        piece = self.text[LENGTH * number : LENGTH * (number + 1)]
        return {"input_ids": piece, "labels": piece}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a tiny GPT-2 with transformers.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per worker and step (default: 16)")
    parser.add_argument("--accumulation", type=int, default=1, help="batches of a step (default: 1)")
    parser.add_argument("--sync", default="bsp", help="synchronization rule, for instance 'ssp(staleness=3)' (default: bsp)")
    parser.add_argument("--output", default="gpt2", help="folder for checkpoints and the model (default: gpt2)")
    return parser.parse_args()


def main() -> None:
    args = options()
    set_seed(0)
    text = inspect.getsource(argparse)
    train_set, test_set = Characters(text[:90_000]), Characters(text[90_000:])
    arguments = TrainingArguments(
        output_dir=args.output,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulation,
        learning_rate=3e-3,
        warmup_steps=5,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_strategy="epoch",
        dataloader_pin_memory=False,
        report_to=[],
        disable_tqdm=True,
    )
    config = GPT2Config(vocab_size=128, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    trainer = OffbeatTrainer(  # offbeat: instead of transformers.Trainer
        GPT2LMHeadModel(config), arguments, train_dataset=train_set, eval_dataset=test_set, sync=args.sync
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
