"""``offbeat chaos``: its options are those of `offbeat.chaos.command.Options`."""

from __future__ import annotations

from typing import Any

import typer

from offbeat.chaos import command
from offbeat.commands import PASSED_ON
from offbeat.errors import FAILED
from offbeat.guarded import fail
from offbeat.options import takes
from offbeat.report.table import console

SETTINGS = {"context_settings": PASSED_ON, "epilog": "offbeat chaos OPTIONS -- offbeat run train.py. See docs/chaos.md."}


@takes(command.Options)
def chaos(context: typer.Context, *, options: command.Options) -> None:
    """Inject faults into the job that the command after -- runs, and check its journal. Status 0: every check held."""

    def options_of(name: str, words: list[str]) -> dict[str, Any]:
        """Return the options that these words of a command give it, by name."""
        assert context.parent is not None
        commands: dict[str, Any] = context.parent.command.commands  # type: ignore[attr-defined]
        return dict(commands[name].make_context(name, words).params)

    verdict = command.run(options, context.args, options_of, console())
    if not verdict.ok:
        fail(f"a check did not hold: {', '.join(check.name for check in verdict.checks if check.held is False)}")
        raise typer.Exit(FAILED)
