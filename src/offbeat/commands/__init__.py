"""The commands of the command line, a file each: their options, and the call of the package that does the work."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperGroup

PASSED_ON: Final = {"allow_extra_args": True, "allow_interspersed_args": False, "ignore_unknown_options": False}
"""Settings of a command after whose argument, or ``--``, the options of another command follow."""
OTHERS: Final = ("simulate", "advise", "chaos", "doctor", "rules", "view", "report", "compare", "top")
"""Commands that start no job. The module of each has its function, and in ``SETTINGS`` what typer must know beside it, if anything."""


class Commands(TyperGroup):
    """The commands, of which `OTHERS` are imported when they are needed: a job begins without them."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:  # if no command has the name, all are imported, one of which may be meant
            for name in (cmd_name,) if cmd_name in OTHERS else OTHERS:
                self.commands[name] = _imported(name)
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.commands, *(name for name in OTHERS if name not in self.commands)]


def _imported(name: str) -> Any:
    module = import_module(f"{__name__}.{name}")
    alone = typer.Typer(add_completion=False)
    alone.command(name, **getattr(module, "SETTINGS", {}))(getattr(module, name))
    return typer.main.get_command(alone)
