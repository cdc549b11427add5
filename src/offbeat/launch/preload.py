"""Choose what is imported once, in the process that workers are forked from (``forkserver.py``).

This is PyTorch and the installed packages that the script imports, unless the script may depend on when they are loaded: if it sets an
environment variable, a library may read the variable when it is loaded, and if it changes ``sys.path``, a name may mean another module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from offbeat.errors import ConfigurationError
from offbeat.launch.forkserver import OPTIMIZERS
from offbeat.launch.program import Program, module_spec
from offbeat.launch.script_imports import imports_of


class Preload(NamedTuple):
    """The modules that a forkserver imports."""

    modules: tuple[str, ...] = ()
    """Modules that must be imported; empty: each worker is a new process."""
    found: tuple[str, ...] = ()
    """Further modules that the script imports, as in `ScriptImports.modules`: imported unless that does harm."""
    note: str | None = None
    """A line for the user: why nothing, or less than the script imports, is imported once; None: no line."""


NOTHING = Preload()


def chosen(named: Sequence[str], program: Program, *, none: bool) -> Preload:
    """Return the modules to import once: those that the user names, PyTorch with what its optimizers load, and the script's own.

    Args:
        named: the modules of ``--preload``.
        program: the program of the workers, which is read but not run.
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
