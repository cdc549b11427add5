"""Check messages of peers: each kind of message has one description of its fields, and a message that does not fit ends its connection.

The checks are a table of small functions, without a library: they must refuse infinite numbers and wrong sizes, and name the peer and the
field without repeating the peer's bytes; checking a push takes 4 to 5 µs. Fields that a description does not name are ignored, since a
newer peer may send more. Everything is checked before anything is done, so a refused message changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, TypeAlias

from offbeat.errors import ProtocolError

Check: TypeAlias = Callable[[Any], None]
"""Returns if a value fits; raises `Unfit` if it does not."""

LARGEST: Final = 1 << 62
"""Greatest whole number: for versions, counters, sizes in bytes."""
NAME_MAX: Final = 200
"""Most characters of the name of a field in a map of any fields."""
_SHOWN: Final = 40


class Unfit(Exception):
    """A value does not fit its description."""

    def __init__(self, expected: str, seen: str) -> None:
        super().__init__(expected, seen)
        self.expected, self.seen = expected, seen
        self.path: list[str] = []
        """Names of fields and indices, outermost first."""


def shown(value: Any) -> str:
    """Return a description of a value for an error message: numbers and None themselves, other values by type and size.

    >>> shown(-3), shown("secret"), shown({"a": 1})
    ('-3', 'a str of length 6', 'a dict of length 1')
    """
    if value is None or isinstance(value, bool | float):
        return str(value)
    if isinstance(value, int):
        return str(value) if abs(value) <= 1 << 64 else f"an integer of {value.bit_length()} bits"
    kind = type(value).__name__
    return f"a {kind} of length {len(value)}" if isinstance(value, str | bytes | list | tuple | dict) else f"a {kind}"


REASON_MAX: Final = 1024


def readable(text: str) -> str:
    """Return what a peer has written, for people: at most `REASON_MAX` characters, and none that moves the cursor of a terminal.

    >>> readable("no\\x1b[2J room")
    'no?[2J room'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text[:REASON_MAX])


def whole(low: int = 0, high: int = LARGEST) -> Check:
    """Accept an integer from ``low`` to ``high``, both included; no bool."""
    expected = f"an integer from {low} to {high if high < LARGEST else '2**62'}"

    def check(value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            raise Unfit(expected, shown(value))

    return check


def number(low: float = -math.inf, high: float = math.inf) -> Check:
    """Accept a finite number from ``low`` to ``high``, both included; no bool."""
    expected = "a finite number" if low == -math.inf else f"a finite number from {low:g} to {high:g}"

    def check(value: Any) -> None:
        if type(value) not in (float, int) or not low <= value <= high or value - value != 0:
            raise Unfit(expected, shown(value))

    return check


def any_number(value: Any) -> None:
    """Accept any number, NaN and infinity included; no bool."""
    if type(value) not in (float, int):
        raise Unfit("a number", shown(value))


def flag(value: Any) -> None:
    """Accept True or False."""
    if type(value) is not bool:
        raise Unfit("true or false", shown(value))


def anything(value: Any) -> None:
    """Accept any value: the receiver checks it further."""


def text(most: int = 1000) -> Check:
    """Accept a text of at most ``most`` characters."""
    expected = f"a text of at most {most} characters"

    def check(value: Any) -> None:
        if type(value) is not str or len(value) > most:
            raise Unfit(expected, shown(value))

    return check


def one_of(*words: str) -> Check:
    """Accept one of these texts."""
    expected = f"one of {', '.join(words)}"

    def check(value: Any) -> None:
        if type(value) is not str or value not in words:
            raise Unfit(expected, shown(value))

    return check


def maybe(check_value: Check) -> Check:
    """Accept None, or what another check accepts."""

    def check(value: Any) -> None:
        if value is not None:
            check_value(value)

    return check


def many(check_item: Check, most: int = 1 << 20, *, least: int = 0) -> Check:
    """Accept a list of ``least`` to ``most`` items that each pass a check."""
    return _items(f"a list of {least} to {most} items", least, most, repeat(check_item))


def row(*checks: Check) -> Check:
    """Accept a list with one item for each of these checks."""
    return _items(f"a list of {len(checks)} items", len(checks), len(checks), checks)


def _items(expected: str, least: int, most: int, checks: Iterable[Check]) -> Check:
    def check(value: Any) -> None:
        if not isinstance(value, list | tuple) or not least <= len(value) <= most:
            raise Unfit(expected, shown(value))
        for index, (check_item, item) in enumerate(zip(checks, value, strict=False)):
            try:
                check_item(item)
            except Unfit as unfit:
                raise _at(str(index), unfit) from None

    return check


def mapping(check_value: Check, most: int = 1000) -> Check:
    """Accept a map of at most ``most`` fields, from texts of at most `NAME_MAX` characters to values that each pass a check."""

    def check(value: Any) -> None:
        if type(value) is not dict or len(value) > most:
            raise Unfit(f"a map of at most {most} fields", shown(value))
        for index, (name, item) in enumerate(value.items()):
            try:
                if type(name) is not str or len(name) > NAME_MAX:
                    raise Unfit(f"a text of at most {NAME_MAX} characters", shown(name))
                check_value(item)
            except Unfit as unfit:
                raise _at(str(index), unfit) from None

    return check


def variant(key: str, checks: Mapping[str, Check]) -> Check:
    """Accept a map whose field ``key`` names one of these checks, and that passes it."""
    names = one_of(*checks)

    def check(value: Any) -> None:
        if type(value) is not dict:
            raise Unfit("a map", shown(value))
        try:
            names(value.get(key))
        except Unfit as unfit:
            raise _at(key, unfit) from None
        checks[value[key]](value)

    return check


def plain(depth: int = 12) -> Check:
    """Accept lists and maps of numbers, texts and None, nested at most ``depth`` deep: data that the receiver checks further."""

    def check(value: Any, left: int = depth) -> None:
        if isinstance(value, list | tuple | dict):
            if left == 0:
                raise Unfit(f"lists and maps nested at most {depth} deep", "more")
            for item in value:
                check(item, left - 1)
            for item in value.values() if isinstance(value, dict) else ():
                check(item, left - 1)
        elif value is not None and not isinstance(value, bool | int | float | str):
            raise Unfit("numbers, texts, lists and maps", shown(value))

    return check


def fields(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Accept a map that has all ``required`` fields, may have the ``optional`` ones, and any others, which are ignored."""
    needed, others = tuple(required.items()), tuple((optional or {}).items())

    def check(value: Any) -> None:
        if type(value) is not dict:
            raise Unfit("a map", shown(value))
        name = ""
        try:
            for name, check_value in needed:
                check_value(value[name])
            for name, check_value in others:
                if name in value:
                    check_value(value[name])
        except KeyError:
            raise _at(name, Unfit("it to be there", "nothing")) from None
        except Unfit as unfit:
            raise _at(name, unfit) from None

    return check


def _at(name: str, unfit: Unfit) -> Unfit:
    unfit.path.insert(0, name)
    return unfit


NO_FIELDS: Final = fields({})


@dataclass(frozen=True)
class MessageSchema:
    """Describe one kind of message: its fields beside the kind, payload and memory."""

    check: Check = NO_FIELDS
    payload: bool = False
    """True if bytes may come with it."""
    memory: int = 0
    """Most blocks of memory that may come with it."""


class Kinds:
    """Describe all kinds of messages that one process accepts from another.

    Args:
        kinds: by name.
        key: the field that names the kind.

    >>> kinds = Kinds({"push": MessageSchema(fields({"version": whole()}))})
    >>> kinds.check({"kind": "push", "version": 3}, "worker 1")
    'push'
    >>> kinds.check({"kind": "push", "version": -1}, "worker 1")
    Traceback (most recent call last):
    ...
    offbeat.errors.ProtocolError: worker 1 sent 'push' with version = -1 (expected an integer from 0 to 2**62)
    """

    def __init__(self, kinds: Mapping[str, MessageSchema], *, key: str = "kind") -> None:
        self.kinds, self.key = dict(kinds), key

    def check(self, header: Mapping[str, Any], peer: str, payload_nbytes: int = 0, blocks: int = 0) -> str:
        """Check a message, and return its kind.

        Args:
            header: of the message.
            peer: the sender, in words.
            payload_nbytes: bytes that came with it.
            blocks: number of blocks of memory that came with it.

        Raises:
            ProtocolError: there is no such kind, or a field, the payload or the memory does not fit.
        """
        name = header.get(self.key)
        kind = self.kinds.get(name) if type(name) is str else None
        if kind is None:
            raise ProtocolError(f"{peer} sent a message of unknown kind {named(name)} (expected {among(self.kinds)})")
        try:
            kind.check(header)
        except Unfit as unfit:
            raise ProtocolError(f"{peer} sent {name!r} with {'.'.join(unfit.path)} = {unfit.seen} (expected {unfit.expected})") from None
        if payload_nbytes and not kind.payload:
            raise ProtocolError(f"{peer} sent {name!r} with a payload of {payload_nbytes} bytes (expected none)")
        if blocks > kind.memory:
            raise ProtocolError(f"{peer} sent {name!r} with {blocks} blocks of memory (expected at most {kind.memory})")
        assert isinstance(name, str)
        return name


def named(kind: Any) -> str:
    """Return, for an error message, the kind that a peer has named, if it is a short word; else its type and size."""
    return repr(kind) if isinstance(kind, str) and len(kind) <= _SHOWN and kind.isidentifier() else shown(kind)


def among(kinds: Collection[str]) -> str:
    """Return the known kinds, in words."""
    return "one of " + ", ".join(sorted(kinds))
