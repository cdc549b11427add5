"""Describe the synchronization rules for people, from the rules' classes: their docstrings, their fields and what they state in ``about``.

There is no second list of rules. A new rule shows up here by its class.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from offbeat.core.about import About, Row
from offbeat.core.policy import Policy, ServerRule
from offbeat.errors import ConfigurationError
from offbeat.policies import RULES

_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", type(None): "None"}
_FORMULAS = (r"Update rule[^`]*``(.+?)``", r"``([^`]*(?:<-|\[\w+\+1\] = )[^`]*)``", r"``([^`]* (?:=|<=) [^`]*)``")
"""Where a docstring has the rule's formula, in the order of preference."""


class Setting(NamedTuple):
    """One setting of a rule."""

    name: str
    kind: str
    """Its type, in words."""
    default: str
    """As a user writes it; "required": there is none."""
    meaning: str
    """With its bounds."""


def overview(width: int) -> list[str]:
    """Return the list of all rules, with what each does: those with servers first, then those without, as docs/rules.md has them.

    >>> print(*overview(80)[:3], sep="\\n")
    Rules with servers:
      adacomm     Let each worker make T local optimizer steps, then average all
                  workers' parameters; T falls with the loss.
    """
    room = max(map(len, RULES)) + 2
    lines: list[str] = []
    for heading, served in (("Rules with servers:", True), ("Rules without servers:", False)):
        lines += [*([""] if lines else []), heading]
        for name, kind in RULES.items():
            if issubclass(kind, ServerRule) == served:
                lines += _hanging(f"  {name:{room}}", _first_sentence(kind), width)
    return [*lines, "", *_hanging("", "The settings of one, its formula and its paper: offbeat rules NAME", width)]


def details(name: str, width: int) -> list[str]:
    """Return what a user must know of one rule: what it does, when to choose it, its formula, its paper and its settings.

    Args:
        name: of the rule, or a whole spec such as ``ssp(staleness=3)``.
        width: characters that a line has.

    Raises:
        ConfigurationError: there is no such rule; the message names the nearest ones.
    """
    word = name.partition("(")[0].strip().lower()
    kind = RULES.get(word) or next((kind for kind in RULES.values() if kind.__name__.lower() == word), None)
    if kind is None:
        near = difflib.get_close_matches(word, RULES, n=3, cutoff=0.5)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise ConfigurationError(f"there is no synchronization rule {name!r}{hint}: offbeat rules lists them all")
    row = row_of(kind)
    facts = {
        "fold": kind.about.row.fold if kind.about.row else "",
        "admit": kind.about.row.admit if kind.about.row else "",
        "made for": row.made_for if row else "",
        "formula": formula_of(kind),
        "paper": paper_of(kind),
    }
    where = "with servers" if issubclass(kind, ServerRule) else "without servers"
    lines = [f"{kind.called()}, in a script offbeat.{kind.__name__}: a rule {where}", ""]
    lines += [*textwrap.wrap(_first_sentence(kind), width), ""]
    for title, text in facts.items():
        if text:
            lines += _hanging(f"  {title:8}  ", plain(text), width)
    settings = settings_of(kind)
    lines += ["", "Settings:" if settings else "It has no settings."]
    for setting in settings:
        lines += _hanging(f"  {setting.name}  ", f"{setting.kind}; {setting.default}", width)
        lines += _hanging("      ", setting.meaning, width)
    lines += ["", f"For instance: --sync '{kind.about.examples[0]}'. All about it is where docs/rules.md lists {kind.called()}."]
    return lines


def row_of(kind: type[Policy]) -> Row | None:
    """Return the rule's line of docs/choosing.md; without one, that of another rule in its module, which describes this rule, too."""
    alike = (other.about.row for other in RULES.values() if other.__module__ == kind.__module__)
    return kind.about.row or next((row for row in alike if row is not None), None)


def formula_of(kind: type[Policy]) -> str:
    """Return the formula in a rule's docstring, in a line; "": it has none.

    >>> formula_of(RULES["ssp"])
    't_p - min(t) <= staleness'
    """
    text = " ".join((inspect.getdoc(kind) or "").split())
    return next((found[1] for pattern in _FORMULAS if (found := re.search(pattern, text))), "")


def paper_of(kind: type[Policy]) -> str:
    """Return the source that a rule's docstring names, without the departures from it.

    >>> paper_of(RULES["dpsgd"])
    'Lian et al. 2017, "Can decentralized algorithms outperform centralized algorithms?", algorithm 1.'
    """
    source = next((part for part in (inspect.getdoc(kind) or "").split("\n\n") if part.startswith("Source: ")), "")
    return re.split(r" Departures?[:,]", " ".join(source.removeprefix("Source: ").split()))[0]


def settings_of(kind: type[Policy]) -> list[Setting]:
    """Return the settings of a rule, in the order of its fields.

    >>> settings_of(RULES["ssp"])[0][:3]
    ('staleness', 'a whole number', 'required')
    """
    meanings = dict(_meanings(kind))
    hints = typing.get_type_hints(kind, localns={"About": About})  # the bases import it for type checkers only
    return [
        Setting(field.name, _words(hints.get(field.name, field.type)), _default(field), plain(meanings.get(field.name, "")))
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.repr
    ]


def _meanings(kind: type[Policy]) -> Iterator[tuple[str, str]]:
    """Yield the sentence under each field of a class and of its bases, the class's own last; nothing where there is no source file.

    "See `Class`." in place of a sentence's beginning stands for what a base, or another rule, says of the same field.
    """
    said: dict[str, str] = {}
    named = {one.__name__: one for one in (*kind.__mro__, *RULES.values())}
    for one in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(one):
            continue
        try:
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        except (OSError, TypeError):
            continue
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = " ".join(after.value.value.split()) if _is_text(after) else ""  # type: ignore[attr-defined]
                if (see := re.match(r"See `(\w+)`\.", text)) is not None:
                    text = dict(_meanings(named[see[1]])).get(field.target.id, "") + text[see.end() :]
                said[field.target.id] = text
    yield from said.items()


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _words(kind: Any) -> str:
    """Return a type in words.

    >>> _words(int | None), _words(Literal["a", "b"]), _words(tuple[float, ...])
    ('a whole number or None', 'a or b', 'numbers, such as (0.5, 1.0)')
    """
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(map(_words, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return "numbers, such as (0.5, 1.0)"
    return _WORDS.get(kind, str(getattr(kind, "__name__", kind)))


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    return f"default {field.default}"


def _first_sentence(kind: type[Policy]) -> str:
    """Return what a rule does, without the marks of a docstring."""
    return plain((inspect.getdoc(kind) or "").partition("\n\n")[0])


def plain(text: str) -> str:
    """Return a text without backquotes and line ends."""
    return " ".join(text.replace("`", "").split())


def _hanging(label: str, text: str, width: int) -> list[str]:
    """Return a text in lines, the first after a label, the others below its beginning."""
    indent = " " * len(label)
    return textwrap.wrap(text, max(width, len(label) + 20), initial_indent=label, subsequent_indent=indent, break_on_hyphens=False) or [
        label.rstrip()
    ]
