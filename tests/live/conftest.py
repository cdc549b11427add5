"""What every module of live tests is checked for: that its jobs left no thread, no file descriptor and no shared memory behind."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    late = [thread for thread in threading.enumerate() if thread.name.startswith("offbeat-")]
    for thread in late:
        thread.join(5.0)
    assert not any(thread.is_alive() for thread in late), late
    assert len(os.listdir("/proc/self/fd")) <= before, "a socket or a block of shared memory is left"
