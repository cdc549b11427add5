"""Keep what the user asked for and does not get although training goes on: it is part of the outcome of a job.

A full disk under ``--journal``, ``--checkpoint``, ``--summary`` or ``--log-dir`` ends nothing. Whatever part of a job notices such a lack
reports it here. The last line, the summary's ``missing`` and the exit status say so.
"""

from __future__ import annotations

from collections.abc import Iterator

from offbeat.errors import FAILED


class Missing:
    """A list of sentences, each with its reason.

    >>> missing = Missing()
    >>> missing.report("the log of worker 1 is not complete", "No space left on device")
    >>> missing.outcome(0, "every worker's script has ended")
    (1, "every worker's script has ended; but the log of worker 1 is not complete: No space left on device")
    """

    def __init__(self) -> None:
        self._why: dict[str, str] = {}

    def report(self, what: str, why: str = "") -> None:
        """Note what is missing, and the newest reason."""
        self._why[what] = why

    def __contains__(self, what: str) -> bool:
        return what in self._why

    def __iter__(self) -> Iterator[str]:
        return (f"{what}: {why}" if why else what for what, why in self._why.items())

    def outcome(self, status: int, reason: str) -> tuple[int, str]:
        """Return the exit status and the reason of a job, with what is missing."""
        sentences = list(self)
        return (status or FAILED, "; but ".join([reason, "; ".join(sentences)])) if sentences else (status, reason)
