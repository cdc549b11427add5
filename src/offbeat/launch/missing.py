"""Collect what the user asked for and does not get although training goes on. It is part of a job's outcome.

A full disk under ``--journal``, ``--checkpoint``, ``--summary`` or ``--log-dir`` does not end the job. Each part of a job reports such a
lack here. It is in the job's last line, in the summary's ``missing``, and makes the exit status nonzero. A lack of something that only
observes the job, such as ``--log-to``, is in the summary's ``missing`` and leaves the exit status as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from offbeat.errors import FAILED


class Missing:
    """Collect sentences, each with its reason.

    >>> missing = Missing()
    >>> missing.report("the log of worker 1 is not complete", "No space left on device")
    >>> missing.outcome(0, "every worker's script has ended")
    (1, "every worker's script has ended; but the log of worker 1 is not complete: No space left on device")
    >>> missing.report("--metrics 9090 ended early", "Address already in use", fails=False)
    >>> len(list(missing)), missing.outcome(0, "every worker's script has ended")
    (2, (1, "every worker's script has ended; but the log of worker 1 is not complete: No space left on device"))
    """

    def __init__(self) -> None:
        self._why: dict[str, str] = {}
        self._harmless: set[str] = set()

    def report(self, what: str, why: str = "", *, fails: bool = True) -> None:
        """Note that something is missing, with the newest reason; ``fails``: False if the exit status does not depend on it."""
        self._why[what] = why
        if not fails:
            self._harmless.add(what)

    def __contains__(self, what: str) -> bool:
        return what in self._why

    def __iter__(self) -> Iterator[str]:
        return self._sentences(self._why)

    def _sentences(self, whats: Iterable[str]) -> Iterator[str]:
        return (f"{what}: {self._why[what]}" if self._why[what] else what for what in whats)

    def outcome(self, status: int, reason: str) -> tuple[int, str]:
        """Return a job's exit status and reason, both adjusted for what is missing."""
        sentences = list(self._sentences(what for what in self._why if what not in self._harmless))
        return (status or FAILED, "; but ".join([reason, "; ".join(sentences)])) if sentences else (status, reason)
