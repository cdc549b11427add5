"""``examples/ray_digits.py`` for tests, which trains for whole epochs until a file is there: ``python -m tests.cluster.ray_train FILE``."""

from __future__ import annotations

import sys
from itertools import count, takewhile
from pathlib import Path

from examples import ray_digits

UNTIL = Path(sys.argv.pop(1)) if __name__ == "__main__" else Path()


def train(config: dict[str, int]) -> None:
    """Train in a worker of Ray Train: there the example's own function is called, for which ``range`` goes on."""
    vars(ray_digits)["range"] = lambda _: takewhile(lambda _: not UNTIL.exists(), count())
    ray_digits.train(config)


if __name__ == "__main__":
    ray_digits.train = train  # Ray Train takes along this function itself, and of the example only its name
    ray_digits.main()
