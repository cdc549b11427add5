"""Decide what is imported once, in a process that workers are forked from (``forkserver.py``).

PyTorch, unless it may matter to the script when that is loaded: a script that sets variables of its environment may mean one that a library
reads when it is loaded.
"""

from __future__ import annotations

import ast
import contextlib
import tokenize
from collections.abc import Sequence
from typing import NamedTuple

from offbeat.errors import ConfigurationError
from offbeat.launch.forkserver import OPTIMIZERS, POSSIBLE
from offbeat.launch.program import Program, module_spec

_CHANGING = frozenset({"setdefault", "update", "pop", "clear"})
"""Methods of a dict that change it."""


class Preload(NamedTuple):
    """What a forkserver imports."""

    modules: tuple[str, ...] = ()
    """(): each worker is a new process."""
    note: str | None = None
    """Why nothing is imported, for the user; None: there is nothing to say."""


def chosen(named: Sequence[str], program: Program, *, none: bool) -> Preload:
    """Return the modules that are imported once: those that the user names, and PyTorch with what its optimizers load.

    Args:
        named: the modules of ``--preload``.
        program: what the workers run; it is read, not run.
        none: True if each worker is to be a new process (``--no-preload``).

    Raises:
        ConfigurationError: a module was named, and the program could not import it.
    """
    if none:
        return Preload()
    for name in named:
        top = name.split(".", maxsplit=1)[0]
        if module_spec(top, program.folder) is None:
            raise ConfigurationError(f"--preload {name}: there is no module {top!r} that {program.name} could import")
    if not POSSIBLE:
        return Preload((), "--preload works on Linux only: here every worker imports for itself" if named else None)
    if not named and (line := sets_variables(program)) is not None:
        return Preload(
            (),
            f"{program.name} sets a variable of its environment (line {line}), which libraries may read when they are loaded: every worker "
            f"imports PyTorch for itself. If it makes no difference, --preload {OPTIMIZERS} starts workers sooner",
        )
    return Preload((*named, *(() if OPTIMIZERS in named else (OPTIMIZERS,))))


def sets_variables(program: Program) -> int | None:
    """Return the line on which a program's own file sets a variable of its environment; None: it sets none, or cannot be read.

    What it imports is not looked at.
    """
    with contextlib.suppress(OSError, SyntaxError, ValueError, UnicodeError):
        if (path := program.path) is not None:
            with tokenize.open(path) as file:
                return _line(ast.parse(file.read()))
    return None


def _line(tree: ast.AST) -> int | None:
    lines = []
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()) if _is_environ(value):
                lines.append(node.lineno)
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in _CHANGING and _is_environ(value):
                lines.append(node.lineno)
            case ast.Call(func=ast.Attribute(attr="putenv") | ast.Name(id="putenv")):
                lines.append(node.lineno)
    return min(lines, default=None)


def _is_environ(value: ast.expr) -> bool:
    """Return True if an expression is ``os.environ``, or a name of its."""
    return (isinstance(value, ast.Attribute) and value.attr == "environ") or (isinstance(value, ast.Name) and value.id == "environ")
