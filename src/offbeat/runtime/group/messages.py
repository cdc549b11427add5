"""Define the messages between the processes of one worker: calls to the group's leader, and its answers."""

from __future__ import annotations

from typing import Any, Final

import msgpack  # type: ignore[import-untyped]

from offbeat.errors import ProtocolError
from offbeat.transport.schema import Check, Unfit, fields, flag, many, mapping, maybe, number, plain, row, text, whole

NBYTES_MAX: Final = 64 << 20
"""Most bytes of one message."""
_pieces: Final = many(row(text(), whole(-1, 1 << 16), many(whole(), 64), text(20), whole()))
_grant: Final = row(whole(), whole(), whole(), whole(), many(row(whole(), whole())), maybe(whole()))

_amounts: Final = mapping(number(), 32)
_account: Final = row(maybe(row(_amounts, _amounts)), maybe(_amounts))
_values: Final = {"pieces": _pieces, "samples": maybe(whole()), "nonfinite": many(whole()), "state": plain(), "account": _account}

CALL: Final = row(text(100), fields({}, _values))
"""From a follower to the leader: the name of the call, and its values. If it has ``state``, the descriptor of its memory follows.
``account`` is in a step's values, if phases are measured.
"""

PIECES: Final = fields({"pieces": _pieces})
"""The leader's first answer. Two descriptors follow: of the memory for gradients, and of that for parameters."""
RESULT: Final = fields(
    {
        "grant": maybe(_grant),
        "moved": flag,
        "loads": flag,
        "version": whole(),
        "batch": maybe(whole()),
        "overlap": maybe(number()),
        "resumes": flag,
        "barrier": maybe(row(whole(), whole(), many(whole()), flag, flag)),
        "before": whole(),
        "restarted": flag,
        "over": maybe(text(1000)),
        "ended": flag,
        "order": maybe(row(text(100), number())),
        "reports": many(plain()),
        "held": many(row(whole(), whole())),
    }
)
"""The leader's answer to a call. If ``moved``, the descriptor of the memory that now has the parameters follows."""
STATE: Final = fields({"state": plain()})
"""After the result of ``state_dict``: the receiver's part of the state. The descriptor of its memory follows."""
FAILED: Final = fields({"error": text(1 << 20)})


def unpacked(packed: bytes, sender: str, check: Check) -> Any:
    """Unpack a message and check it.

    Args:
        packed: the message in msgpack.
        sender: the sender's name in messages.
        check: the check of its fields. A map with ``error`` is checked as `FAILED` instead.

    Raises:
        ProtocolError: the message is not msgpack, or fails the check.
    """
    try:
        message = msgpack.unpackb(packed, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"{sender} sent {len(packed)} bytes that are not msgpack: {type(error).__name__}") from None
    try:
        (FAILED if isinstance(message, dict) and "error" in message else check)(message)
    except Unfit as unfit:
        at = ".".join(unfit.path) or "a message"
        raise ProtocolError(f"{sender} sent {at} = {unfit.seen} (expected {unfit.expected})") from None
    return message
