"""Python imports this by itself where its folder is on PYTHONPATH: it lets a server's process kill itself in a phase that a test orders.

An order is a file in the folder OFFBEAT_DEATHS, with the number of the server and the phase as its name. Each is carried out once. Only
processes of servers, and the one that they are forked from, are changed. The folder ``quick`` is on PYTHONPATH, too.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nothing_compiled  # type: ignore[import-not-found]  # noqa: F401
import one_gpu  # type: ignore[import-not-found]  # noqa: F401
import soon_written  # type: ignore[import-not-found]  # noqa: F401

PHASES = ("greeted", "initial", "before", "during", "after", "release", "epoch", "told", "streamed", "donated")
"""A worker's message has come; version 0 is taken over; before a fold; a block has been stepped, and the fold has not ended; after a fold;
some workers are released; an epoch has ended; a message was written down, and not handled; its record went to the standby; a rank's replica
has come for one that joins."""
OF_CHECKPOINTS = ("files", "filed", "whole")
"""Some files are written; server 1 has written its file; the checkpoint has its name, and the server does not know it yet."""


def die(server: int, phase: str) -> None:
    """Die if that is ordered, or stop the process whose number the order has. A standby does what its leader has done: the order is for the
    leader. Workers are forked from here too."""
    if os.environ.get("OFFBEAT_ROLE") == "standby" or "OFFBEAT_WORKER" in os.environ:
        return
    order = Path(os.environ["OFFBEAT_DEATHS"]) / f"{server}-{phase}"
    if order.exists():
        other = order.read_text()
        order.unlink()
        os.kill(int(other or os.getpid()), signal.SIGSTOP if other else signal.SIGKILL)


def number() -> int:
    return int(os.environ.get("OFFBEAT_SERVER", "0"))


def around(owner: Any, name: str, before: str | None = None, after: str | None = None) -> None:
    """Let the process die before, or after, this method of a class."""
    plain: Callable[..., Any] = getattr(owner, name)

    def changed(self: Any, *arguments: Any, **named: Any) -> Any:
        if before is not None:
            die(number(), before)
        result = plain(self, *arguments, **named)
        if after is not None:
            die(number(), after)
        return result

    setattr(owner, name, changed)


def deafen(owner: Any) -> None:
    """Let a standby hear nothing more of its leader once that is ordered, and write down the version that it has then.

    The order may have the numbers of workers in it: then it waits until they are those whose pushes have come and are in no version.
    """
    plain: Callable[..., Any] = owner._from_leader
    deaf: set[int] = set()

    def wanted(server: Any, workers: list[str]) -> bool:
        return not workers or [str(worker) for worker in server.service.state.job.first.driver.core.ledger.unsettled] == workers

    def changed(self: Any, item: Any) -> None:
        order = Path(os.environ["OFFBEAT_DEATHS"]) / f"{number()}-deaf"
        if order.exists() and not self._queue and wanted(self, order.read_text().split()):
            deaf.add(os.getpid())
            written = order.with_suffix(".new")
            written.write_text(str(self.service.state.job.first.driver.version))
            written.rename(order.with_suffix(".version"))
            order.unlink()
        if os.getpid() not in deaf or not hasattr(item, "header"):
            plain(self, item)

    owner._from_leader = changed


if "OFFBEAT_DEATHS" in os.environ and ("OFFBEAT_SERVER" in os.environ or "offbeat.launch.forkserver" in sys.orig_argv):
    from offbeat.runtime.coordination import checkpoint_content, shard_files
    from offbeat.runtime.coordination.notifier import Notifier
    from offbeat.runtime.job.checkpoint_folder import CheckpointFolder
    from offbeat.runtime.parameter_server.shard import LiveShard
    from offbeat.runtime.ranks.state_transfer import Joiners
    from offbeat.runtime.recovery.recorder import Recorder
    from offbeat.runtime.recovery.replica import StreamRecorder
    from offbeat.runtime.serving import Service
    from offbeat.runtime.standby_server import StandbyServer
    from offbeat.tensors.shard import _Lane

    around(LiveShard, "_take_over", before="initial")
    around(LiveShard, "_fold", before="before", after="after")
    around(_Lane, "_step", after="during")
    around(LiveShard, "_release", after="release")
    around(Notifier, "_epoch_ended", before="epoch")
    around(Recorder, "message", after="told")
    around(Joiners, "on_donation", before="donated")
    around(checkpoint_content, "_write_model", after="files")
    around(shard_files, "write_copy", after="filed")
    around(CheckpointFolder, "finish", after="whole")
    around(Service, "_on_message", before="greeted")
    around(StreamRecorder, "message", after="told")
    around(StreamRecorder, "flush", after="streamed")
    deafen(StandbyServer)
