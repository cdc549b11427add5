"""Decide what is imported once, in a process that workers are forked from (``forkserver.py``).

PyTorch, and the installed packages that the script imports, unless it may matter to the script when they are loaded: a script that sets
variables of its environment may mean one that a library reads when it is loaded, and after a change of ``sys.path`` a name may mean another
module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from offbeat.errors import ConfigurationError
from offbeat.launch.forkserver import OPTIMIZERS, POSSIBLE
from offbeat.launch.program import Program, module_spec
from offbeat.launch.script_imports import imports_of


class Preload(NamedTuple):
    """What a forkserver imports."""

    modules: tuple[str, ...] = ()
    """(): each worker is a new process."""
    found: tuple[str, ...] = ()
    """What the script imports beside them, as in `ScriptImports.modules`: imported if that does no harm."""
    note: str | None = None
    """Why nothing is imported, or less than the script imports, for the user; None: there is nothing to say."""


NOTHING = Preload()


def chosen(named: Sequence[str], program: Program, *, none: bool) -> Preload:
    """Return the modules that are imported once: those that the user names, PyTorch with what its optimizers load, and the script's own.

    Args:
        named: the modules of ``--preload``.
        program: what the workers run; it is read, not run.
        none: True if each worker is to be a new process (``--no-preload``).

    Raises:
        ConfigurationError: a module was named, and the program could not import it.
    """
    if none:
        return NOTHING
    for name in named:
        top = name.split(".", maxsplit=1)[0]
        if module_spec(top, program.folder) is None:
            raise ConfigurationError(f"--preload {name}: there is no module {top!r} that {program.name} could import")
    if not POSSIBLE:
        return Preload(note="--preload works on Linux only: here every worker imports for itself" if named else None)
    script = imports_of(program)
    if script.sets is not None and not named:
        note = (
            f"{script.sets}, which libraries may read when they are loaded: every worker imports PyTorch for itself. "
            f"If it makes no difference, --preload {OPTIMIZERS} starts workers sooner"
        )
        return Preload(note=note)
    modules = (*named, *(() if OPTIMIZERS in named else (OPTIMIZERS,)))
    if script.sets is not None:
        return Preload(modules)
    if script.searches is not None and script.modules:
        return Preload(modules, note=None if named else f"{script.searches}: {_alone(script.modules)}; --preload MODULE names more")
    return Preload(modules, script.modules)


def _alone(found: Sequence[str]) -> str:
    tops = dict.fromkeys(item.partition(":")[0].partition(".")[0] for item in found)
    others = [top for top in tops if top not in ("torch", "offbeat")]
    return f"each worker imports {', '.join(others)} for itself" if others else "PyTorch alone is imported once for all workers"
