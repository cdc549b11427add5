"""Define the messages between the leader of a server and its standby."""

from __future__ import annotations

from typing import Final

from offbeat.transport.schema import Kinds, MessageSchema, fields, row, text, whole

FROM_STANDBY: Final = Kinds(
    {
        "follow": MessageSchema(fields({"number": whole(0, 1 << 16), "key": text(100)})),
        "acknowledged": MessageSchema(fields({"at": whole()})),
    }
)
"""From a standby to its leader: the first message, and how many records it has."""

FROM_LEADER: Final = Kinds(
    {
        "record": MessageSchema(fields({"at": whole(1), "done": row(whole(), whole())}), payload=True),
        "bytes": MessageSchema(fields({"start": whole(), "nbytes": whole()}), payload=True),
    }
)
"""From a leader to its standby: what the leader was told and has done, as msgpack; and before it, the bytes that this has changed."""
