"""Count the files that one step walks through: a push under ``bsp`` on one host, at the worker and at server 0.

A tiny job runs once with `sys.setprofile` in every process. Counted are the functions of ``src/offbeat`` that are called in the main
thread: at the worker during one call of ``optimizer.step()``, at server 0 while it handles the push with which a version is folded. A move
leads from a function of one file to one of another; it goes back if that file was left before.

    python -m benchmarks.walks
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE = Path(__file__).parents[1] / "src" / "offbeat"
WALKS = "OFFBEAT_WALKS"
"""The folder for what was seen, in the processes of the job."""
STEP = 5
"""The step that is watched: everything has been made by then."""

SCRIPT = """
import sys, torch, offbeat
from benchmarks.walks import Walk

model = torch.nn.Linear(4, 1)
optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for step in range(10):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    walk = Walk(f"worker {optimizer.worker}") if step == %d else None
    optimizer.step()
    if walk is not None:
        walk.end()
"""


class Walk:
    """The calls of this thread from now until `end`, as the files of their functions."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._files: list[str] = []
        sys.setprofile(self._on)

    def _on(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (file := frame.f_code.co_filename).startswith(str(SOURCE)):
            self._files.append(os.path.relpath(file, SOURCE))

    def end(self) -> None:
        """Write what was seen, once for each name."""
        sys.setprofile(None)
        path = Path(os.environ[WALKS], self._name)
        if not path.exists():
            path.write_text(json.dumps(self._files))


def watch_server() -> None:
    """Watch each message of a push in this process, if it is a server's, and keep the longest walk: the one that folds."""
    from offbeat.runtime.lasting_server import Server

    plain = Server._arrived
    pushes, longest = [0], [0]

    def arrived(server: Any, connection: Any, item: Any) -> None:
        watched = getattr(item, "header", {}).get("kind") == "push" and pushes[0] > STEP
        pushes[0] += getattr(item, "header", {}).get("kind") == "push"
        walk = Walk("server") if watched else None
        plain(server, connection, item)
        if walk is not None:
            if len(walk._files) > longest[0]:
                longest[0] = len(walk._files)
                Path(os.environ[WALKS], "server").unlink(missing_ok=True)
            walk.end()

    Server._arrived = arrived  # type: ignore[method-assign, assignment]


def report(name: str, files: list[str]) -> None:
    """Print one walk."""
    moves = [(a, b) for a, b in pairwise(files) if a != b]
    left: set[str] = set()
    back = 0
    for a, b in moves:
        left.add(a)
        back += b in left
    lines = sum(len((SOURCE / file).read_text().splitlines()) for file in set(files))
    print(f"{name:24} {len(set(files)):4} files {lines:7,} lines {len(files):6,} calls {len(moves):5} moves {back:5} back")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "walked.py").write_text(SCRIPT % STEP)
        # A server is a fork of a process that has imported everything, so that process is to watch already.
        start = "import sys\nif any(word.startswith('offbeat.') for word in sys.orig_argv):\n"
        start += "    from benchmarks.walks import watch_server\n    watch_server()\n"
        (folder / "sitecustomize.py").write_text(start)
        paths = os.pathsep.join([str(folder), str(SOURCE.parents[1])])
        environment = {**os.environ, "PYTHONPATH": paths, WALKS: str(folder)}
        words = [sys.executable, "-m", "offbeat", "run", "--workers", "2", "--sync", "bsp", "--no-preload", "--quiet"]
        words.append(str(folder / "walked.py"))
        subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL)
        worker, server = (json.loads((folder / name).read_text()) for name in ("worker 0", "server"))
    report("a step of a worker", worker)
    report("a push that folds", server)
    report("both", [*worker, *server])


if __name__ == "__main__":
    main()
