"""Define the messages between a server's leader and its standby."""

from __future__ import annotations

from typing import Final

from offbeat.transport.schema import Kinds, MessageSchema, fields, many, number, plain, row, text, whole

FROM_STANDBY: Final = Kinds(
    {
        "follow": MessageSchema(fields({"number": whole(0, 1 << 16), "key": text(100), "address": text(1000)})),
        "acknowledged": MessageSchema(fields({"at": whole()})),
        "serves": MessageSchema(fields({"session": text(100)})),
    }
)
"""From a standby to its leader. ``follow``: the first message, with the standby's address; ``acknowledged``: the newest record that it has;
``serves``: a worker is on its machine, to which it can send parameters."""

_FOLD: Final = fields({"hyper": plain(), "scale": number(-1e38, 1e38), "released": many(whole(), 1 << 20)})
FROM_LEADER: Final = Kinds(
    {
        "record": MessageSchema(fields({"at": whole(1), "done": row(whole(), whole())}), payload=True),
        "bytes": MessageSchema(fields({"start": whole(), "nbytes": whole()}, {"fold": _FOLD}), payload=True),
        "state": MessageSchema(fields({"at": whole(), "now": number(0.0), "done": row(whole(), whole()), "blocks": whole(1)})),
    }
)
"""From a leader to its standby. ``record``: what the leader has handled and done, as msgpack. ``bytes``, before their record: memory that
it changes; with the first bytes of a sum also the fold that uses it. ``state``, to a standby that comes later, before the first record: the
server's whole state, whose bytes have come before."""
