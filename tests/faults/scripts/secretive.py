"""A worker's script that starts processes of its own, and keeps them until the test has looked at all processes.

It trains until the file ``--until`` is there, and then fails if it is worker ``--fails``. For the test only, it writes the job's token to a
file, by whose contents the test searches what the job leaves behind.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import torch

import offbeat
from offbeat.runtime.job.settings import WorkerSettings, known_token


def started() -> list[int]:
    """Start a process, and a fork of this one; both end with this process, or are killed by it."""
    fork = os.fork()
    if fork == 0:
        signal.pause()
        os._exit(0)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    return [fork, child.pid]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--fails", type=int)
    args = parser.parse_args()
    pids = started()
    settings = WorkerSettings.from_environment()
    assert settings is not None
    print(f"the settings are {settings!r}, the environment {dict(os.environ)}", flush=True)
    model = torch.nn.Linear(4, 1)
    optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    print(f"the optimizer is {optimizer!r}, the session {vars(optimizer)}", flush=True)
    token = args.folder / f"token-{optimizer.worker}"
    token.write_text(str(known_token()))
    hidden = args.folder / f".pids-{optimizer.worker}"
    hidden.write_text(" ".join(map(str, pids)))
    hidden.rename(args.folder / f"pids-{optimizer.worker}")
    while not args.until.exists():
        optimizer.zero_grad()
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        threading.Event().wait(0.005)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    if optimizer.worker == args.fails:
        raise RuntimeError("failed on purpose, with the settings in a local variable")


if __name__ == "__main__":
    main()
