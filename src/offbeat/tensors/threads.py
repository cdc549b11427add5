"""Keep torch from using several threads for work on flat memory.

On a host that is full of workers the cores are oversubscribed, and the barrier at the end of each of torch's parallel operations then waits
for whole time slices: folds measured over a hundred times slower with two threads than with one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def single_threaded() -> Iterator[None]:
    """Make torch use one thread inside the ``with`` block. The setting is the calling thread's; changing it costs under a microsecond."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
