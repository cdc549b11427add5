"""Ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable


def together(count: int, what: Callable[[int], object]) -> None:
    """Run it in a thread for each rank; if some fail, the first failure is raised when all have ended."""
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            what(rank)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60.0)
        assert not thread.is_alive(), "a rank waits for ever"
    if failures:
        raise failures[0]
