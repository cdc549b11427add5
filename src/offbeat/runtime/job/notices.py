"""Name the signals that tell a process to leave in order: the notice of a cluster that a machine or an allocation will be taken away."""

from __future__ import annotations

import signal

NOTICES: tuple[signal.Signals, ...] = tuple(
    number for name in ("SIGTERM", "SIGUSR1") if (number := getattr(signal, name, None)) is not None
)
"""SIGTERM, and SIGUSR1, which Slurm sends if asked to (``--signal=USR1@120``)."""
