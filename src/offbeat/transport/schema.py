"""Checks of what a peer sends: each kind of message has one description of its fields, and a message that does not fit ends its connection.

A table of small checks of our own, and no library: what matters here is finite numbers, sizes, and an error that names the peer and the
field without repeating the peer's bytes; a push takes 4 to 5 µs. Fields that a description does not name are ignored: a newer peer may
send more. Everything is checked before anything is done, so a message that is refused has changed nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, TypeAlias

from offbeat.errors import ProtocolError

Check: TypeAlias = Callable[[Any], None]
"""Returns if a value fits, and raises `Unfit` if it does not."""

LARGEST: Final = 1 << 62
"""Of whole numbers: versions, counters, sizes in bytes."""
_SHOWN: Final = 40


class Unfit(Exception):
    """A value is not what its description asks for."""

    def __init__(self, expected: str, seen: str) -> None:
        super().__init__(expected, seen)
        self.expected, self.seen = expected, seen
        self.path: list[str] = []
        """Names of fields and indices, the outermost first."""


def shown(value: Any) -> str:
    """What a value is, for an error message: numbers and None themselves, everything else by type and size.

    >>> shown(-3), shown("secret"), shown({"a": 1})
    ('-3', 'a str of length 6', 'a dict of length 1')
    """
    if value is None or isinstance(value, bool | float):
        return str(value)
    if isinstance(value, int):
        return str(value) if abs(value) <= 1 << 64 else f"an integer of {value.bit_length()} bits"
    kind = type(value).__name__
    return f"a {kind} of length {len(value)}" if isinstance(value, str | bytes | list | tuple | dict) else f"a {kind}"


def whole(low: int = 0, high: int = LARGEST) -> Check:
    """An integer from ``low`` to ``high``, both included; a bool is none."""
    expected = f"an integer from {low} to {high if high < LARGEST else '2**62'}"

    def check(value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            raise Unfit(expected, shown(value))

    return check


def number(low: float = -math.inf, high: float = math.inf) -> Check:
    """A finite number from ``low`` to ``high``, both included; a bool is none."""
    expected = "a finite number" if low == -math.inf else f"a finite number from {low:g} to {high:g}"

    def check(value: Any) -> None:
        if type(value) not in (float, int) or not low <= value <= high or value - value != 0:
            raise Unfit(expected, shown(value))

    return check


def any_number(value: Any) -> None:
    """Any number, NaN and infinity included; a bool is none."""
    if type(value) not in (float, int):
        raise Unfit("a number", shown(value))


def flag(value: Any) -> None:
    """True or False."""
    if type(value) is not bool:
        raise Unfit("true or false", shown(value))


def anything(value: Any) -> None:
    """Whatever it is: somebody else checks it, who says more about it."""


def text(most: int = 1000) -> Check:
    """A text of at most so many characters."""
    expected = f"a text of at most {most} characters"

    def check(value: Any) -> None:
        if type(value) is not str or len(value) > most:
            raise Unfit(expected, shown(value))

    return check


def one_of(*words: str) -> Check:
    """One of these texts."""
    expected = f"one of {', '.join(words)}"

    def check(value: Any) -> None:
        if type(value) is not str or value not in words:
            raise Unfit(expected, shown(value))

    return check


def maybe(check_value: Check) -> Check:
    """None, or what another check lets pass."""

    def check(value: Any) -> None:
        if value is not None:
            check_value(value)

    return check


def many(check_item: Check, most: int = 1 << 20, *, least: int = 0) -> Check:
    """A list of ``least`` to ``most`` items that each pass a check."""
    expected = f"a list of {least} to {most} items"

    def check(value: Any) -> None:
        if not isinstance(value, list | tuple) or not least <= len(value) <= most:
            raise Unfit(expected, shown(value))
        _each(repeat(check_item), value)

    return check


def row(*checks: Check) -> Check:
    """A list with one item for each of these checks."""
    expected = f"a list of {len(checks)} items"

    def check(value: Any) -> None:
        if not isinstance(value, list | tuple) or len(value) != len(checks):
            raise Unfit(expected, shown(value))
        _each(checks, value)

    return check


def _each(checks: Iterable[Check], items: Sequence[Any]) -> None:
    """Check each item with its check; what does not fit is named by its position."""
    for index, (check_item, item) in enumerate(zip(checks, items, strict=False)):
        try:
            check_item(item)
        except Unfit as unfit:
            unfit.path.insert(0, str(index))
            raise


def mapping(check_value: Check, most: int = 1000) -> Check:
    """A map from texts of at most 200 characters to values that each pass a check; at most so many."""
    check_name = text(200)

    def check(value: Any) -> None:
        if type(value) is not dict or len(value) > most:
            raise Unfit(f"a map of at most {most} fields", shown(value))
        for index, (name, item) in enumerate(value.items()):
            try:
                check_name(name)
                check_value(item)
            except Unfit as unfit:
                unfit.path.insert(0, str(index))
                raise

    return check


def plain(depth: int = 12) -> Check:
    """Nested lists and maps of numbers, texts and None, not deeper than this: data that somebody else takes apart."""

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
    """A map that has all of the first fields, may have the second, and others, which are ignored."""
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
    """What a message of one kind has beside its kind."""

    check: Check = NO_FIELDS
    payload: bool = False
    """Whether bytes may come with it."""
    memory: int = 0
    """How many blocks of memory may come with it."""


class Kinds:
    """All kinds of messages that one process takes from another.

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
        self.kinds, self._key = dict(kinds), key

    def __contains__(self, kind: object) -> bool:
        return isinstance(kind, str) and kind in self.kinds

    def check(self, header: Mapping[str, Any], peer: str, payload_nbytes: int = 0, blocks: int = 0) -> str:
        """The kind of a message, once all of it fits.

        Args:
            header: of the message.
            peer: the sender, in words.
            payload_nbytes: how many bytes came with it.
            blocks: how many blocks of memory came with it.

        Raises:
            ProtocolError: there is no such kind, or it has other fields.
        """
        name = header.get(self._key)
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
    """The kind that a peer has given its message, if it is a short word, for an error message."""
    return repr(kind) if isinstance(kind, str) and len(kind) <= _SHOWN and kind.isidentifier() else shown(kind)


def among(kinds: Collection[str]) -> str:
    """The kinds that there are, in words."""
    return "one of " + ", ".join(sorted(kinds))
