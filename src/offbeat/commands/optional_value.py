"""An option of a command whose value may be left out: ``--dashboard``, or ``--dashboard 7860``."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

from offbeat.view.listening import VALUE

DASHBOARD = "--dashboard"


class WithDashboard(TyperCommand):
    """A command with ``--dashboard [PORT]``: what follows the option is its value if it looks like one, and else the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with ``--dashboard=`` in place of ``--dashboard`` where no value follows."""
        single = {name for one in self.params for name in (*one.opts, *one.secondary_opts) if getattr(one, "is_flag", False)}
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--":  # what comes after the script is its own
            if args[at] == DASHBOARD and not (at + 1 < len(args) and re.fullmatch(VALUE, args[at + 1])):
                args = [*args[:at], f"{DASHBOARD}=", *args[at + 1 :]]
            at += 1 if "=" in args[at] or args[at] in single else 2
        return super().parse_args(ctx, args)
