"""What every module of live tests is checked for: that its jobs left no thread, no file descriptor and no shared memory behind."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest
import tests.device  # CUDA opens files of its own, once  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    gc.collect()
    before = _descriptors()
    yield
    late = [thread for thread in threading.enumerate() if thread.name.startswith("offbeat-")]
    for thread in late:
        thread.join(5.0)
    assert not any(thread.is_alive() for thread in late), late
    gc.collect()  # only now: what a heartbeat's thread holds may be in cycles
    assert sorted((_descriptors() - before).elements()) == [], "a socket or a block of shared memory is left"


def _descriptors() -> Counter[str]:
    """The kinds of open files that jobs use; names of memory, mappings included, tell which."""
    names: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{entry}")
            key = name if name.startswith("/memfd:") else name.split(":")[0]
            names[key] += name.startswith(("socket:", "anon_inode:", "/memfd:"))
    return +names
