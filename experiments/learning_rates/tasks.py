"""The two tasks: scikit-learn's digits with momentum, and the characters of this project's own documents with AdamW."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from offbeat.errors import ConfigurationError

CHECKOUT: Final = Path(__file__).parents[2]
CONTEXT: Final = 16
"""Characters that a prediction may look at."""


class Task(NamedTuple):
    """What is trained, with the settings that are best in a single process."""

    name: str
    measure: str
    """What `evaluate` returns, in words."""
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    data: tuple[Tensor, Tensor]
    evaluate: Callable[[nn.Module], float]
    """Loss over data that is not trained on."""
    lr: float
    """The best of a single process, among powers of two times this."""
    batch: int
    epochs: int


def digits() -> Task:
    """An MLP of 4,810 parameters on 1,437 images of 8x8 pixels; tested on 360.

    Raises:
        ConfigurationError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigurationError(f'the digits come with scikit-learn ({error}); pip install "offbeat[examples]"') from error
    found = load_digits()
    order = torch.randperm(len(found.data), generator=torch.Generator().manual_seed(0))
    x = torch.as_tensor(found.data, dtype=torch.float32)[order] / 16
    y = torch.as_tensor(found.target, dtype=torch.int64)[order]
    test_x, test_y = x[1437:], y[1437:]
    return Task(
        name="digits",
        measure="test loss",
        model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        optimizer=lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        loss=nn.functional.cross_entropy,
        data=(x[:1437], y[:1437]),
        evaluate=lambda model: float(nn.functional.cross_entropy(model(test_x), test_y)),
        lr=0.1,
        batch=16,
        epochs=10,
    )


class Characters(nn.Module):
    """A transformer of one layer that predicts the next character, as nanoGPT does with more of them.

    Args:
        vocabulary: how many characters there are.
        width: of an embedding.
    """

    def __init__(self, vocabulary: int, width: int = 32) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each next character, (batch, context, vocabulary)."""
        hidden = self.token(x) + self.place
        query, key, value = self.query_key_value(self.norms[0](hidden)).chunk(3, dim=-1)
        hidden = hidden + self.project(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        hidden = hidden + self.narrow(torch.relu(self.widen(self.norms[1](hidden))))
        logits: Tensor = self.out(self.norms[2](hidden))
        return logits


@cache
def text() -> str:
    """Return the documents of this project, in ASCII: there on every machine that has the experiments."""
    paths = [
        CHECKOUT / "LICENSE",
        *sorted(CHECKOUT.glob("*.md")),
        *sorted(CHECKOUT.glob("docs/*.md")),
        *sorted(CHECKOUT.glob("experiments/*/README.md")),
    ]
    return "".join(path.read_text(encoding="utf-8") for path in paths).encode("ascii", "ignore").decode()


def characters() -> Task:
    """One layer of width 32 and context 16, on the project's documents, of which the last of every ten windows is for testing."""
    letters = {letter: code for code, letter in enumerate(sorted(set(text())))}
    codes = torch.tensor([letters[letter] for letter in text()])
    windows = codes[: len(codes) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    held_out = torch.arange(len(windows)) % 10 == 9
    train, test = windows[~held_out], windows[held_out]

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())

    return Task(
        name="characters",
        measure="test loss",
        model=lambda: Characters(len(letters)),
        optimizer=lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, betas=(0.9, 0.95)),
        loss=loss,
        data=(train[:, :-1], train[:, 1:]),
        evaluate=lambda model: float(loss(model(test[:, :-1]), test[:, 1:])),
        lr=0.016,
        batch=8,
        epochs=1,
    )


TASKS: Final[dict[str, Callable[[], Task]]] = {"digits": digits, "characters": characters}
