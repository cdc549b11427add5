"""The command line: the commands, each of which has its options checked (``options.py``) and calls the package that does the work."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import platform
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console

from offbeat import __version__
from offbeat.commands import PASSED_ON, Commands
from offbeat.commands.optional_value import WithDashboard
from offbeat.errors import FAILED, MISTAKE, ConfigurationError, JobError, OffbeatError
from offbeat.files import why, write_result
from offbeat.guarded import expect_job, fail, guarded, only_show, say
from offbeat.launch import checkpointing
from offbeat.launch.agent import Duties
from offbeat.launch.cluster import SUPERVISES, engine_of, pass_on, take_part, tls_of
from offbeat.launch.engine import Engine
from offbeat.launch.group import grouped
from offbeat.launch.leadership import TorchrunStore, store_client
from offbeat.launch.local import LocalEngine
from offbeat.launch.notice import NoticeCommand
from offbeat.launch.outcome import Display, Outcome
from offbeat.launch.preload import chosen
from offbeat.launch.program import Program
from offbeat.launch.ray_engine import RayEngine, connect
from offbeat.launch.supervisor import Supervisor
from offbeat.launch.tasks import checked_host, task_of
from offbeat.launch.token import given_token
from offbeat.logs import begin_command
from offbeat.options import (
    AgentOptions,
    JobOptions,
    Module,
    RunOptions,
    RunScript,
    Script,
    check,
    followers_of,
    ray_options,
    span_of,
    takes,
)
from offbeat.policies import RULES
from offbeat.report.figures import short
from offbeat.report.live import LiveProgress
from offbeat.report.quiet import QuietProgress
from offbeat.report.table import console, job_tables
from offbeat.runtime.job.checkpoint_folder import Checkpoint
from offbeat.runtime.job.settings import JobSettings, take_token

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Data-parallel training for PyTorch that keeps going when workers are slow, dead or new.",
)

T = TypeVar("T", bound=JobOptions)
OF_JOB = ("servers", "sync", "wire", "batch", "seed")
"""Options that a job which resumes takes from its checkpoint, if the command line does not give them."""


def _show_version(wanted: bool) -> None:
    if wanted:
        versions = f"offbeat {__version__}, torch {importlib.metadata.version('torch')}, Python {platform.python_version()}"
        console().print(versions, highlight=False, soft_wrap=True)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """Keep ``run`` a subcommand."""


@app.command(
    cls=WithDashboard,
    context_settings=PASSED_ON,
    epilog=f"Rules: {', '.join(sorted(RULES))}.",
)
@takes(RunOptions)
def run(context: typer.Context, script: RunScript = None, module: Module = False, *, options: RunOptions) -> None:
    """Train SCRIPT in one process per worker, on this machine or on a Ray cluster."""
    if options.join is not None:
        given = [name for name in context.params if name not in ("join", "workers", "script") and _given(context)(name)]
        raise typer.Exit(import_module("offbeat.commands.join").join(options, script, given, given_workers=_given(context)("workers")))
    if script is None:
        context.fail("Missing argument 'SCRIPT'.")
    program = Program(script, tuple(context.args), module=module)
    ray = ray_options(options)
    followers = followers_of(options)
    options, saved = _resumed(context, options, "workers", *OF_JOB)
    least, most = span_of(options.workers)
    settings = check(
        options,
        program,
        most,
        least=least,
        followers=followers,
        checkpoint=checkpointing.order_of(options.checkpoint, options.every, options.keep, saved),
        resume=saved,
        on_driver=ray is not None and not ray.spread_servers,
    )
    imported = chosen(options.preload or [], program, none=options.no_preload)
    program = grouped(program, options.procs_per_worker)
    _say(checkpointing.begin(options.journal, saved, settings.checkpoint), quiet=options.quiet)
    engine: Engine
    if ray is None:
        engine = LocalEngine(program, port=options.port, preload=imported)
    else:
        existing = connect(ray.address)
        pass_on(tls_of(options.tls, several=existing, **options.tls_files))
        engine = RayEngine(
            program,
            most,
            ray,
            existing=existing,
            preload=imported,
            grace_s=options.grace,
            port=options.port,
        )
    _supervise(
        settings,
        engine,
        options,
        token=secrets.token_hex(16),
        return_s=0.0 if ray is None else ray.start_s,
        notice=_notice(options),
        followers=followers,
        store=store_client(options.leaders, None),
    )


@app.command(
    cls=WithDashboard,
    context_settings=PASSED_ON,
    epilog="Started by torchrun, srun, mpirun or Kubernetes, or by hand on each machine. See docs/clusters.md.",
)
@takes(AgentOptions)
def agent(context: typer.Context, script: Script, module: Module = False, *, options: AgentOptions) -> None:
    """Train SCRIPT on several machines: start workers here, and find the others through the engine that started this command."""
    workers, start_s, port = options.nproc_per_node, options.start_timeout, options.port
    task = task_of(nnodes=options.nnodes, node_rank=options.node_rank, endpoint=options.rdzv_endpoint, port=port)
    if workers < 1:
        raise ConfigurationError(f"--nproc-per-node {workers}: must be at least 1")
    if not 0.0 < start_s < float("inf"):
        raise ConfigurationError(f"--start-timeout {start_s:g}: must be a number of seconds above 0")
    program = Program(script, tuple(context.args), module=module)
    followers = followers_of(options)
    report_to = os.environ.pop(SUPERVISES, None)
    saved, order = None, None
    if report_to is None:  # an agent that comes back finds checkpoints of this job in the folder: its supervisor alone looks there
        checkpointing.check_folders(options.resume, auto=options.auto_resume, checkpoint=options.checkpoint)
        checkpointing.check_spelling(options.every, options.keep, any_folder=options.checkpoint is not None or options.resume is not None)
    else:
        options, saved = _resumed(context, options, *OF_JOB)
        order = checkpointing.order_of(options.checkpoint, options.every, options.keep, saved)
    settings = check(options, program, task.size * workers, least=task.least * workers, followers=followers, checkpoint=order, resume=saved)
    imported = chosen(options.preload or [], program, none=options.no_preload)
    program = grouped(program, options.procs_per_worker)
    pass_on(tls_of(options.tls, several=not task.alone, **options.tls_files))
    listen = checked_host(options.listen, "--listen")
    if report_to is None:
        expect_job()
        if imported.note is not None and task.rank == 0:
            _say([imported.note], quiet=options.quiet)
        duties = Duties(
            program=program,
            workers=workers,
            seat=task.rank,
            local_size=task.local_size,
            advertise=checked_host(options.advertise, "--advertise"),
            preload=imported,
            start_s=start_s,
            grace_s=options.grace,
            notice=_notice(options),
        )
        raise typer.Exit(take_part(task, listen, duties, given_token(options.token_file), sys.argv[2:]))
    _say(checkpointing.begin(options.journal, saved, settings.checkpoint), quiet=options.quiet)
    engine = engine_of(task, workers=workers, start_s=start_s, listen=listen, port=port, report_to=int(report_to))
    of_torchrun = None if task.store is None or not settings.replicas else (TorchrunStore(*task.store), task.run)
    _supervise(
        settings,
        engine,
        options,
        token=take_token(),
        return_s=start_s,
        followers=followers,
        store=store_client(options.leaders, of_torchrun),
    )


def _supervise(settings: JobSettings, engine: Engine, options: JobOptions, **more: Any) -> NoReturn:
    """Run a job, show it, and end this command with the job's exit status; ``more``: of `Supervisor`."""
    screen = console()
    progress = QuietProgress(screen) if options.quiet else LiveProgress(screen)
    expect_job()
    begins = "" if settings.begins == settings.workers else f"{settings.begins} of at most "
    count = f"{begins}{settings.workers} worker{'s' * (settings.workers != 1)}"
    rule = "" if settings.sync is None else f" under {short(settings.sync)}"
    # Said at once: processes and their imports take seconds until there is more to say.
    only_show("what begins", lambda: progress.note(f"starting {count} of {settings.script}{rule}"))
    try:
        supervisor = Supervisor(
            settings,
            engine,
            max_restarts=options.max_restarts,
            grace_s=options.grace,
            log_dir=options.log_dir,
            display=progress,
            **more,
        )
        outcome = supervisor.run()
    finally:
        only_show("the end of the job", progress.close)
    raise typer.Exit(finish(screen, outcome, options.summary, progress))


def _resumed(context: typer.Context, options: T, *names: str) -> tuple[T, Checkpoint | None]:
    """Return the options, those of these names as the job had them whose checkpoint is to be resumed, and this checkpoint."""
    saved = checkpointing.found(options.resume, auto=options.auto_resume, checkpoint=options.checkpoint)
    return replace(options, **checkpointing.taken_over(saved, _given(context), names, seed=options.seed)), saved


def _notice(options: JobOptions) -> NoticeCommand | None:
    return None if options.notice_command is None else NoticeCommand(options.notice_command)


def _given(context: typer.Context) -> Callable[[str], bool]:
    """Return a function that tells whether the command line gives an option."""
    return lambda name: getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"


def finish(screen: Console, outcome: Outcome, summary: Path | None, display: Display | None = None) -> int:
    """Write the summary of a finished job, then print its table, or its last line if the display is quiet, and its failure, if any.

    Returns the exit status.
    """
    status, reason = outcome.status, outcome.reason
    figures: dict[str, Any] = outcome.summary or {}
    if summary is not None:
        content = {**figures, "ok": status == 0, "reason": reason, "missing": list(outcome.missing)}
        try:
            write_result(summary, json.dumps(content, indent=1) + "\n")
        except JobError as error:
            status, reason = status or FAILED, f"{reason}; but the summary {error}"
    if figures and figures["pushes"] and isinstance(display, QuietProgress):
        only_show("the last line", partial(display.finish, figures))
    elif figures and figures["pushes"]:
        only_show("the table", lambda: screen.print(*job_tables(figures, screen.width), sep="\n", highlight=False))
    if status != 0:
        fail(reason)
    return status


def _say(lines: Sequence[str], *, quiet: bool) -> None:
    """Print lines to stderr before the job begins, unless ``quiet``."""
    for line in lines if not quiet else ():
        say(line)


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors of a file that do not name it, and need no traceback: a picture or a trace could not be written, for instance."""


def _check_current_folder() -> None:
    try:
        Path.cwd()
    except OSError as error:
        raise ConfigurationError(f"the current folder is gone ({error.strerror}): change to one that exists, and start again") from error


def main() -> None:
    """Run the command line: its exit status is in the table of docs/settings.md, "Exit statuses"."""
    with guarded() as streams:
        try:
            begin_command()
            _check_current_folder()
            app()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else FAILED if end.code else 0
        except ConfigurationError as error:
            fail(str(error))
            status = MISTAKE
        except OffbeatError as error:
            fail(str(error))
            status = FAILED
        except OSError as error:
            if error.filename is None and error.errno not in _DISK:
                raise
            fail(why(error))
            status = FAILED
        status = streams.status(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
