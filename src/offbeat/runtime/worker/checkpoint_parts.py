"""Fetch, for the worker that writes a checkpoint, the parts that other workers have handed in."""

from __future__ import annotations

import time
from typing import Any, Final

from offbeat.errors import warn
from offbeat.runtime.job.packing import unpack
from offbeat.runtime.worker.connection import WorkerConnection
from offbeat.types import Seconds, Version, WorkerId

PARTS_S: Final[Seconds] = 5.0
"""Longest wait for the parts of other workers, in seconds."""
LOOK_S: Final[Seconds] = 0.005
"""The interval between two requests, in seconds."""


def parts_of_others(link: WorkerConnection, version: Version, nth: int) -> dict[WorkerId, dict[str, Any]]:
    """Return the parts of this checkpoint that other workers have handed in, by worker.

    Under lockstep rules, workers that may still reach the same `offbeat.save` are awaited, for `PARTS_S`. A warning names the missing.

    Args:
        link: connections of the worker that writes.
        version, nth: the version of the checkpoint, and the number of earlier saves at that version.
    """
    until = time.monotonic() + PARTS_S
    while True:
        last = time.monotonic() > until
        link.coordinator.send({"kind": "parts", "version": version, "nth": nth, "last": last})
        answer = link.receive("parts")
        awaited = answer.header["awaited"]
        if not awaited or last:
            break
        time.sleep(LOOK_S)
    if awaited:
        workers = ", ".join(str(worker) for worker in awaited)
        warn(
            f"offbeat.save: worker {workers} has not called it within {PARTS_S:.0f} s, so the checkpoint lacks its random generators: "
            "call offbeat.save on every worker"
        )
    parts, at = {}, 0
    for worker, plain, nbytes in answer.header["parts"]:
        parts[worker] = unpack(plain, answer.payload[at : at + nbytes])
        at += nbytes
    return parts
