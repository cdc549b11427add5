"""A follower for tests: it writes down what it gets, and fails in the way that its arguments say."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offbeat.errors import ConfigurationError
from offbeat.view.follow import Sink, follow


class WritesDown(Sink):
    """Appends a line for each thing that it gets to a file when it is flushed.

    Args:
        path: the file.
        how: ``well``; ``lacks``: cannot begin; ``killed``: dies at the first record of the first process; ``raises``: at every record;
            ``hangs``: at the first record, for ever; ``stalls``: so does the first process.
    """

    def __init__(self, path: Path, how: str) -> None:
        self._path, self._how = path, how
        self._lines: list[str] = []
        if how == "lacks":
            raise ConfigurationError("the package nosuch is not installed: pip install nosuch")
        self._first = not path.exists()
        with path.open("a") as file:
            file.write("begins\n")

    def record(self, record: dict[str, Any]) -> None:
        if self._how == "killed" and self._first:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._how == "raises":
            raise RuntimeError("this sink is broken")
        if self._how == "hangs" or (self._how == "stalls" and self._first):
            signal.pause()
        self._lines.append(json.dumps(record))

    def status(self, snapshot: Mapping[str, Any]) -> None:
        self._lines.append(f"status {snapshot['version']}")

    def missed(self, records: int) -> None:
        self._lines.append(f"missed {records}")

    def flush(self) -> None:
        with self._path.open("a") as file:
            file.write("".join(f"{line}\n" for line in self._lines))
        self._lines = []

    def close(self) -> None:
        with self._path.open("a") as file:
            file.write("closed\n")


def main(path: str, how: str) -> int:
    def make(note: Callable[[str], None]) -> WritesDown:
        print("chatter of a library")  # stdout is not the supervisor's any more
        note("is there")
        return WritesDown(Path(path), how)

    return follow(make)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
