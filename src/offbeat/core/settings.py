"""Check the settings of rules, latency models and clusters: numbers, words, times. A message names the owner, the setting and its value."""

from __future__ import annotations

from typing import Any

from offbeat.errors import ConfigurationError


def whole_number(owner: str, name: str, value: Any, *, least: int) -> None:
    """Check that a setting is a whole number, at least ``least``.

    Raises:
        ConfigurationError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{owner}({name}={value!r}): {name} must be a whole number, at least {least}")


def number(owner: str, name: str, value: Any, *, above: float | None = None, least: float | None = None, most: float | None = None) -> None:
    """Check that a setting is a finite number greater than ``above``, at least ``least``, at most ``most``.

    Raises:
        ConfigurationError: it is not.
    """
    bounds = (("above", above), ("at least", least), ("at most", most))
    limits = " and ".join(f"{words} {limit:g}" for words, limit in bounds if limit is not None)
    right = is_number(value) and abs(value) < float("inf")
    right = right and (above is None or value > above) and (least is None or value >= least) and (most is None or value <= most)
    if not right:
        raise ConfigurationError(f"{owner}({name}={value!r}): {name} must be a number, {limits}")


def seconds(owner: str, name: str, value: Any) -> None:
    """Check that a setting is a time in seconds, at least 0, or the word ``auto``, or None.

    Raises:
        ConfigurationError: it is not.
    """
    if value is not None and value != "auto" and not (is_number(value) and 0.0 <= value < float("inf")):
        raise ConfigurationError(f"{owner}({name}={value!r}): {name} must be a time in seconds, at least 0, or auto")


def is_number(value: Any) -> bool:
    """Return whether a setting is a number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def yes_or_no(owner: str, name: str, value: Any) -> None:
    """Check that a setting is True or False.

    Raises:
        ConfigurationError: it is not.
    """
    if not isinstance(value, bool):
        raise ConfigurationError(f"{owner}({name}={value!r}): {name} must be True or False")


def one_of(owner: str, name: str, value: Any, known: tuple[str, ...]) -> None:
    """Check that a setting is one of the words ``known``.

    Raises:
        ConfigurationError: it is not.
    """
    if value not in known:
        raise ConfigurationError(f"{owner}({name}={value!r}): {name} must be one of {', '.join(known)}")
