"""Define the messages between the two ends of a measurement; all of them are checked as those of a job are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from offbeat.transport.schema import Kinds, MessageSchema, fields, many, number, one_of, row, text, whole

SECONDS_MAX: Final = 10.0
_seconds: Final = number(0.0, SECONDS_MAX)
_finding: Final = fields({"name": text(100), "state": one_of("good", "note", "problem"), "seen": text(4000), "remedy": text(4000)})
_visit: Final = fields({"versions": many(text(200), 10), "findings": many(_finding, 100)})
_flow: Final = fields(
    {
        "way": text(100),
        "there_bytes_per_s": number(0.0),
        "back_bytes_per_s": number(0.0),
        "round_trip_s": number(0.0),
        "clock_s": number(),
        "clock_error_s": number(0.0),
        "interface": text(200),
        "failure": text(4000),
    }
)

TO_PEER: Final = Kinds(
    {
        "visit": MessageSchema(),
        "ping": MessageSchema(),
        "block": MessageSchema(memory=1),
        "data": MessageSchema(payload=True),
        "give": MessageSchema(),
        "measure": MessageSchema(fields({"address": row(text(300), whole(1, 65535)), "seconds": _seconds})),
    }
)
"""From the process that measures: each is a question that the other end answers with one message, and forgets."""

FROM_PEER: Final = Kinds(
    {
        "welcome": MessageSchema(_visit),
        "pong": MessageSchema(fields({"clock_s": number()})),
        "ready": MessageSchema(),
        "data": MessageSchema(payload=True),
        "took": MessageSchema(),
        "measured": MessageSchema(_flow),
    }
)
"""From the process that answers."""


class Visit(NamedTuple):
    """What a machine says of itself to one that measures the way to it."""

    versions: tuple[str, ...] = ()
    """Of the software that all machines of a job must have alike."""
    findings: tuple[Mapping[str, Any], ...] = ()
    """What it has found about itself."""

    def to_plain(self) -> dict[str, Any]:
        """Return the fields of the message."""
        shown = ("name", "state", "seen", "remedy")
        findings = [{key: str(finding[key])[: 100 if key == "name" else 4000] for key in shown} for finding in self.findings[:100]]
        return {"versions": list(self.versions), "findings": findings}
