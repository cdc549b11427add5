"""Describe what the processes of one worker send each other: calls to the leader, and its answers."""

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
"""From another process to the leader: the name of the call, and its values. With ``state`` a descriptor follows, of its memory. ``account``
goes with a step, if phases are measured.
"""

PIECES: Final = fields({"pieces": _pieces})
"""Two descriptors follow, of the memory for gradients and for parameters."""
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
        "reports": many(plain()),
        "held": many(row(whole(), whole())),
    }
)
"""If ``moved``, a descriptor follows, of the memory that now has the parameters."""
STATE: Final = fields({"state": plain()})
"""After the result of ``state_dict``: the receiver's part. A descriptor follows."""
FAILED: Final = fields({"error": text(1 << 20)})


def unpacked(packed: bytes, sender: str, check: Check) -> Any:
    """Return a message after its check.

    Args:
        packed: as msgpack.
        sender: in words.
        check: of its fields. A map with ``error`` is checked as `FAILED` in its place.

    Raises:
        ProtocolError: it does not fit.
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
