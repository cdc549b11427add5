"""Parse specs such as ``ssp(staleness=3)``, from a script or the command line, with Python's own parser; no code is executed."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from offbeat.errors import ConfigurationError

T = TypeVar("T")

_ASYNC = re.compile(r"(?<==)(\s*)async(?=\s*[,)])")
"""The value ``async``, which is a keyword of Python: the parser gets ``Async`` instead, which has the same length."""


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Split a spec into its name and keyword arguments; values are Python literals or bare words.

    >>> parse_call("ssp(staleness=3)")
    ('ssp', {'staleness': 3})
    >>> parse_call("bsp")
    ('bsp', {})
    >>> parse_call("elastic(R=30, mode=async)")
    ('elastic', {'R': 30, 'mode': 'async'})

    Raises:
        ConfigurationError: the text does not parse; the message names the position and what was expected.
    """
    try:
        tree = _parsed(_ASYNC.sub(r"\1Async", text.strip()))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply for Python's parser
        position = getattr(error, "offset", None) or 1
        raise ConfigurationError(f"{text!r}: cannot read it at character {position}; write name or name(key=value, ...)") from None
    if isinstance(tree, ast.Name):
        return tree.id, {}
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise ConfigurationError(f"{text!r}: write name or name(key=value, ...), for instance ssp(staleness=3)")
    if tree.args:
        position = tree.args[0].col_offset + 1
        raise ConfigurationError(f"{text!r}: the argument at character {position} has no name; write {tree.func.id}(key=value, ...)")
    arguments: dict[str, Any] = {}
    for keyword in tree.keywords:
        if keyword.arg is None:
            raise ConfigurationError(f"{text!r}: write key=value at character {keyword.col_offset + 1}, not **")
        if keyword.arg in arguments:
            raise ConfigurationError(f"{text!r}: {keyword.arg} is given a second time at character {keyword.col_offset + 1}")
        arguments[keyword.arg] = _literal(text, keyword.value)
    return tree.func.id, arguments


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SystemError:
        # Python 3.11 counts a tree's depth once for all threads, and fails if another thread parses at the same time (gh-106905).
        return _parsed(text)


def _literal(text: str, node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return {"inf": float("inf"), "Async": "async"}.get(node.id, node.id)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise ConfigurationError(
            f"{text!r}: the value at character {node.col_offset + 1} is neither a number, a word, nor a quoted string"
        ) from None


def build(text: str, kinds: Mapping[str, type[T]], what: str) -> T:
    """Make the object that ``text`` describes.

    Args:
        text: the spec.
        kinds: the dataclasses to choose from, by name.
        what: their common noun, for messages.

    Raises:
        ConfigurationError: the name or a setting is unknown, or the object refuses a value.
    """
    name, arguments = parse_call(text)
    kind = kinds.get(name.lower())
    if kind is None:
        raise ConfigurationError(f"there is no {what} {name!r}{hint(name, kinds)}; the known ones are {', '.join(sorted(kinds))}")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    for key in arguments:
        if key not in known:
            settings = f"its settings are {', '.join(known)}" if known else "it has no settings"
            raise ConfigurationError(f"{text!r}: {name} has no setting {key!r}{hint(key, known)}; {settings}")
    needed = [key for key, f in known.items() if f.default is MISSING and f.default_factory is MISSING and key not in arguments]
    if needed:
        about: Any = getattr(kind, "about", None)
        such = f", for instance {about.examples[0]}" if about is not None else ""
        raise ConfigurationError(f"{text!r}: {name} needs {' and '.join(needed)}{such}; its settings are {', '.join(known)}")
    return kind(**arguments)


def hint(word: str, known: Iterable[str]) -> str:
    """Return the known word that a wrong one is meant to be, as an addition to an error message; empty if none is like it."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
