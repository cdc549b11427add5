"""With which signal a launcher orders a process to leave."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from offbeat.runtime.job.notices import LEAVE, ordered


@contextmanager
def no_descriptor() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_order_is_one_without_a_free_descriptor_too() -> None:
    """This process has no handler for orders. For a worker SIGTERM is a notice, after which it trains on until it is killed."""
    me = os.getpid()
    assert ordered(me, signal.SIGTERM) == signal.SIGTERM
    with no_descriptor():
        with pytest.raises(OSError, match="Too many open files"):
            Path("/proc/self/status").read_text()
        assert ordered(me, signal.SIGTERM) == LEAVE
