"""``offbeat chaos``: its options."""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.chaos import command as chaos_command
from offbeat.chaos.clock import RealClock
from offbeat.chaos.schedule import GROUPS, KINDS, TARGETS
from offbeat.errors import FAILED
from offbeat.guarded import fail
from offbeat.report.table import console

EPILOG = "offbeat chaos OPTIONS -- offbeat run train.py. See docs/chaos.md."


def chaos(
    context: typer.Context,
    faults: Annotated[str, typer.Option(help=f"Kinds of faults: {', '.join(KINDS)}.")] = chaos_command.DEFAULT_FAULTS,
    targets: Annotated[str, typer.Option(help=f"Processes that may be hit: {', '.join(TARGETS)}.")] = chaos_command.DEFAULT_TARGETS,
    mix: Annotated[
        list[str] | None,
        typer.Option(help=f"GROUP=SHARE of all faults.  \\[default: {','.join(f'{name}={share:g}' for name, share in GROUPS.items())}]"),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(help="KIND:TARGET=NUMBER,...: exactly these faults, in an order and at times that are drawn; with --mtbf and --seed."),
    ] = None,
    mtbf: Annotated[float, typer.Option(help="Mean seconds between two faults.")] = 10.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the schedule of faults.  \\[default: a new one, which is printed]")] = None,
    time: Annotated[
        float | None,
        typer.Option(help="End the job by SIGTERM this many seconds after the first pushes.  \\[default: it ends by itself]"),
    ] = None,
    count: Annotated[int | None, typer.Option(help="Most faults.  \\[default: no limit]")] = None,
    patience: Annotated[float, typer.Option(help="Seconds without a record in the journal after which the job counts as hanging.")] = 120.0,
    no_baseline: Annotated[bool, typer.Option("--no-baseline", help="Do not run the undisturbed job first.")] = False,
    baseline: Annotated[Path | None, typer.Option(help="Compare with this JOURNAL of an undisturbed job, and run none.")] = None,
    journal: Annotated[Path | None, typer.Option(help="FILE with the journal of the command, where its words do not name it.")] = None,
    timeout: Annotated[float | None, typer.Option(help="The job's --timeout, where the command does not say it.  \\[default: 10]")] = None,
    result: Annotated[Path | None, typer.Option("--json", help="Write the result to this file, as JSON.")] = None,
) -> None:
    """Inject faults into the job that the command after -- runs, and check its journal. Status 0: every check held."""
    chosen = secrets.randbelow(1 << 16) if seed is None else seed
    options = chaos_command.check(
        words=context.args,
        parse=partial(_options_of, context),
        faults=faults,
        targets=targets,
        mix=mix or [],
        plan=plan,
        mtbf_s=mtbf,
        seed=chosen,
        time_s=time,
        count=count,
        patience_s=patience,
        no_baseline=no_baseline,
        compare=baseline,
        journal=journal,
        timeout_s=timeout,
        result=result,
    )
    verdict = chaos_command.run(options, RealClock(), console())
    if not verdict.ok:
        fail(f"a check did not hold: {', '.join(check.name for check in verdict.checks if check.held is False)}")
        raise typer.Exit(FAILED)


def _options_of(context: typer.Context, name: str, words: list[str]) -> dict[str, Any]:
    """Return the options that these words of a command give it, by name."""
    assert context.parent is not None
    commands: dict[str, Any] = context.parent.command.commands  # type: ignore[attr-defined]
    return dict(commands[name].make_context(name, words).params)
