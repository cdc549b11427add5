"""Show how far simulations are, and how long the rest takes, while a command computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar() -> Iterator[Callable[[float, int], None]]:
    """Show a bar if stderr is a terminal, and yield the function that moves it: it takes the numbers of ended and of all simulations."""
    to = Console(stderr=True)
    columns = TextColumn("simulating"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=to, transient=True, disable=not to.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda ended, of: bar.update(task, completed=ended, total=of)
