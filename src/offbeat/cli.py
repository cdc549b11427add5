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
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from offbeat import __version__
from offbeat.commands import chaos, simulate
from offbeat.commands.compare import compare
from offbeat.commands.doctor import doctor
from offbeat.commands.optional_value import WithDashboard
from offbeat.commands.report import report
from offbeat.commands.rules import rules
from offbeat.commands.top import top
from offbeat.commands.view import view
from offbeat.errors import FAILED, MISTAKE, ConfigurationError, JobError, OffbeatError
from offbeat.files import why, write_result
from offbeat.guarded import expect_job, fail, guarded, only_show, say
from offbeat.launch import checkpointing
from offbeat.launch.agent import Duties
from offbeat.launch.cluster import SUPERVISES, Cluster, pass_on, supervise, take_part, tls_of
from offbeat.launch.engine import Engine
from offbeat.launch.group import grouped
from offbeat.launch.leadership import store_client
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
    AutoResume,
    Batch,
    CheckpointDir,
    Dashboard,
    Every,
    Grace,
    JournalFile,
    Keep,
    Kill,
    LateReplies,
    Leaders,
    LogDir,
    LogTo,
    MaxRestarts,
    Metrics,
    Module,
    NoPhases,
    NoPreload,
    NoticeLine,
    NoTorchrunEnv,
    Procs,
    ProgressTimeout,
    Quiet,
    Replicas,
    Resume,
    Script,
    Seed,
    Slow,
    StartTimeout,
    SummaryFile,
    Sync,
    Timeout,
    TlsCa,
    TlsCert,
    TlsKey,
    UseTls,
    Wire,
    check,
    followers_of,
    ray_options,
)
from offbeat.policies import RULES
from offbeat.report.figures import short
from offbeat.report.live import LiveProgress
from offbeat.report.quiet import QuietProgress
from offbeat.report.table import console, job_tables
from offbeat.runtime.job.settings import JobSettings, take_token

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Data-parallel training for PyTorch that keeps going when workers are slow, dead or new.",
)

_PASSED_ON = {"allow_extra_args": True, "allow_interspersed_args": False, "ignore_unknown_options": False}
"""Options after the script, or after ``--``, are those of another command."""


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
    context_settings=_PASSED_ON,
    epilog=f"Rules: {', '.join(sorted(RULES))}.",
)
def run(
    context: typer.Context,
    script: Script,
    module: Module = False,
    workers: Annotated[int, typer.Option(help="Processes that compute gradients.")] = 2,
    servers: Annotated[int, typer.Option(help="Processes that hold the parameters, a shard each.")] = 1,
    replicas: Replicas = 0,
    leaders: Leaders = None,
    sync: Sync = None,
    wire: Wire = None,
    batch: Batch = None,
    max_restarts: MaxRestarts = 3,
    slow: Slow = None,
    kill: Kill = None,
    late: LateReplies = None,
    preload: Annotated[
        list[str] | None, typer.Option(help="MODULE to import once, beside PyTorch; workers are forks of that process.")
    ] = None,
    no_preload: NoPreload = False,
    journal: JournalFile = None,
    summary: SummaryFile = None,
    log_dir: LogDir = None,
    log_to: LogTo = None,
    dashboard: Dashboard = None,
    quiet: Quiet = False,
    metrics: Metrics = None,
    checkpoint: CheckpointDir = None,
    every: Every = None,
    keep: Keep = None,
    resume: Resume = None,
    auto_resume: AutoResume = False,
    seed: Seed = 0,
    timeout: Timeout = 10.0,
    progress_timeout: ProgressTimeout = 1800.0,
    grace: Grace = 30.0,
    notice_command: NoticeLine = None,
    port: Annotated[int, typer.Option(help="The port on which server 0 listens, with --on ray the supervisor; 0: any free port.")] = 0,
    procs_per_worker: Procs = 1,
    no_torchrun_env: NoTorchrunEnv = False,
    no_phases: NoPhases = False,
    on: Annotated[str, typer.Option(help="local: all processes on this machine; ray: on a Ray cluster, with the options below.")] = "local",
    ray_address: Annotated[
        str | None, typer.Option(help="The Ray cluster.  [default: RAY_ADDRESS, else one of this machine, else a new one here]")
    ] = None,
    cpus_per_worker: Annotated[float | None, typer.Option(help="CPUs that Ray sets aside for each worker.  [default: 1]")] = None,
    gpus_per_worker: Annotated[
        float | None, typer.Option(help="GPUs that Ray sets aside for each worker, or a part of one.  [default: 0]")
    ] = None,
    servers_on: Annotated[
        str | None,
        typer.Option(help="driver: servers run beside this command; nodes: the nodes start them in turn.  [default: driver]"),
    ] = None,
    start_timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait for room on the cluster, at the start and if all nodes are lost.  [default: 600]")
    ] = None,
    tls: UseTls = None,
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_ca: TlsCa = "",
) -> None:
    """Train SCRIPT in one process per worker, on this machine or on a Ray cluster."""
    program = Program(script, tuple(context.args), module=module)
    ray = ray_options(
        on=on,
        ray_address=ray_address,
        cpus_per_worker=cpus_per_worker,
        gpus_per_worker=gpus_per_worker,
        servers_on=servers_on,
        start_timeout=start_timeout,
        tls=tls,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_ca=tls_ca,
    )
    followers = followers_of(log_to or [], metrics, dashboard)
    saved = checkpointing.found(resume, auto=auto_resume, checkpoint=checkpoint)
    workers, servers, sync, wire, batch, seed = checkpointing.taken_over(
        saved, _given(context), workers=workers, servers=servers, sync=sync, wire=wire, batch=batch, seed=seed
    )
    settings = check(
        program=program,
        workers=workers,
        servers=servers,
        sync=sync,
        wire=wire,
        batch=batch,
        max_restarts=max_restarts,
        slow=slow or [],
        kill=kill or [],
        late=late or [],
        journal=journal,
        summary=summary,
        log_dir=log_dir,
        followers=followers,
        seed=seed,
        timeout_s=timeout,
        progress_timeout_s=progress_timeout,
        grace_s=grace,
        notice_command=notice_command,
        port=port,
        procs_per_worker=procs_per_worker,
        no_torchrun_env=no_torchrun_env,
        no_phases=no_phases,
        checkpoint=checkpointing.order_of(checkpoint, every, keep, saved),
        resume=saved,
        replicas=replicas,
        on_driver=ray is not None and not ray.spread_servers,
    )
    imported = chosen(preload or [], program, none=no_preload)
    program = grouped(program, procs_per_worker)
    token = secrets.token_hex(16)
    _say(checkpointing.begin(journal, saved, settings.checkpoint), quiet=quiet)
    engine: Engine
    if ray is None:
        engine = LocalEngine(program, port=port, preload=imported)
    else:
        existing = connect(ray.address)
        pass_on(tls_of(tls, several=existing, certificate=tls_cert, key=tls_key, authority=tls_ca))
        engine = RayEngine(program, workers, ray, token=token, existing=existing, preload=imported, grace_s=grace, port=port)
    screen = console()
    progress = QuietProgress(screen) if quiet else LiveProgress(screen)
    expect_job()
    _announce(settings, progress)
    try:
        supervisor = Supervisor(
            settings,
            engine,
            token=token,
            max_restarts=max_restarts,
            return_s=0.0 if ray is None else ray.start_s,
            grace_s=grace,
            notice=None if notice_command is None else NoticeCommand(notice_command),
            log_dir=log_dir,
            followers=followers,
            store=store_client(leaders, None),
            display=progress,
        )
        outcome = supervisor.run()
    finally:
        only_show("the end of the job", progress.close)
    raise typer.Exit(finish(screen, outcome, summary, progress))


@app.command(
    cls=WithDashboard,
    context_settings=_PASSED_ON,
    epilog="Started by torchrun, srun, mpirun or Kubernetes, or by hand on each machine. See docs/clusters.md.",
)
def agent(
    context: typer.Context,
    script: Script,
    module: Module = False,
    nproc_per_node: Annotated[
        int, typer.Option(help="Workers of each agent. Engines that start an agent for each worker leave it at 1.")
    ] = 1,
    nnodes: Annotated[str | None, typer.Option(help="N or MIN:MAX: machines. The job begins with MIN and takes in others later.")] = None,
    node_rank: Annotated[int | None, typer.Option(help="The number of this machine, where no engine gives it one.")] = None,
    rdzv_endpoint: Annotated[str | None, typer.Option(help=r"HOST\[:PORT] of the first machine, where the engine does not say it.")] = None,
    servers: Annotated[int, typer.Option(help="Processes that hold the parameters, a shard each; the machines start them in turn.")] = 1,
    replicas: Replicas = 0,
    leaders: Leaders = None,
    sync: Sync = None,
    wire: Wire = None,
    batch: Batch = None,
    max_restarts: MaxRestarts = 3,
    slow: Slow = None,
    kill: Kill = None,
    late: LateReplies = None,
    preload: Annotated[
        list[str] | None, typer.Option(help="MODULE to import once, beside PyTorch; workers are forks of that process.")
    ] = None,
    no_preload: NoPreload = False,
    journal: JournalFile = None,
    summary: SummaryFile = None,
    log_dir: LogDir = None,
    log_to: LogTo = None,
    dashboard: Dashboard = None,
    quiet: Quiet = False,
    metrics: Metrics = None,
    checkpoint: CheckpointDir = None,
    every: Every = None,
    keep: Keep = None,
    resume: Resume = None,
    auto_resume: AutoResume = False,
    seed: Seed = 0,
    timeout: Timeout = 10.0,
    progress_timeout: ProgressTimeout = 1800.0,
    start_timeout: StartTimeout = 600.0,
    grace: Grace = 30.0,
    notice_command: NoticeLine = None,
    listen: Annotated[str, typer.Option(help="The address at which the supervisor listens.  [default: that of the first machine]")] = "",
    advertise: Annotated[str, typer.Option(help="The address at which others reach this machine.  [default: found]")] = "",
    port: Annotated[int, typer.Option(help="The supervisor's port; server n has PORT+1+n. 0: any free port, or the engine's.")] = 0,
    token_file: Annotated[Path | None, typer.Option(help="A file with the job's secret, the same on all machines.")] = None,
    tls: UseTls = None,
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_ca: TlsCa = "",
    procs_per_worker: Procs = 1,
    no_torchrun_env: NoTorchrunEnv = False,
    no_phases: NoPhases = False,
) -> None:
    """Train SCRIPT on several machines: start workers here, and find the others through the engine that started this command."""
    task = task_of(nnodes=nnodes, node_rank=node_rank, endpoint=rdzv_endpoint, port=port)
    if nproc_per_node < 1:
        raise ConfigurationError(f"--nproc-per-node {nproc_per_node}: must be at least 1")
    if not 0.0 < start_timeout < float("inf"):
        raise ConfigurationError(f"--start-timeout {start_timeout:g}: must be a number of seconds above 0")
    program = Program(script, tuple(context.args), module=module)
    followers = followers_of(log_to or [], metrics, dashboard)
    report_to = os.environ.pop(SUPERVISES, None)
    saved, order = None, None
    if report_to is None:  # an agent that comes back finds checkpoints of this job in the folder: its supervisor alone looks there
        checkpointing.check_folders(resume, auto=auto_resume, checkpoint=checkpoint)
        checkpointing.check_spelling(every, keep, any_folder=checkpoint is not None or resume is not None)
    else:
        saved = checkpointing.found(resume, auto=auto_resume, checkpoint=checkpoint)
        order = checkpointing.order_of(checkpoint, every, keep, saved)
    servers, sync, wire, batch, seed = checkpointing.taken_over(
        saved, _given(context), servers=servers, sync=sync, wire=wire, batch=batch, seed=seed
    )
    settings = check(
        program=program,
        workers=task.size * nproc_per_node,
        servers=servers,
        sync=sync,
        wire=wire,
        batch=batch,
        max_restarts=max_restarts,
        slow=slow or [],
        kill=kill or [],
        late=late or [],
        journal=journal,
        summary=summary,
        log_dir=log_dir,
        followers=followers,
        seed=seed,
        timeout_s=timeout,
        progress_timeout_s=progress_timeout,
        grace_s=grace,
        notice_command=notice_command,
        port=port,
        procs_per_worker=procs_per_worker,
        no_torchrun_env=no_torchrun_env,
        no_phases=no_phases,
        checkpoint=order,
        resume=saved,
        replicas=replicas,
    )
    imported = chosen(preload or [], program, none=no_preload)
    program = grouped(program, procs_per_worker)
    pass_on(tls_of(tls, several=not task.alone, certificate=tls_cert, key=tls_key, authority=tls_ca))
    cluster = Cluster(task=task, workers=nproc_per_node, start_s=start_timeout, listen=checked_host(listen, "--listen"), port=port)
    if report_to is None:
        expect_job()
        if imported.note is not None and task.rank == 0:
            _say([imported.note], quiet=quiet)
        duties = Duties(
            program=program,
            workers=nproc_per_node,
            seat=task.rank,
            local_size=task.local_size,
            advertise=checked_host(advertise, "--advertise"),
            preload=imported,
            start_s=start_timeout,
            grace_s=grace,
            notice=None if notice_command is None else NoticeCommand(notice_command),
        )
        raise typer.Exit(take_part(cluster, duties, given_token(token_file), sys.argv[2:]))
    _say(checkpointing.begin(journal, saved, settings.checkpoint), quiet=quiet)
    screen = console()
    progress = QuietProgress(screen) if quiet else LiveProgress(screen)
    expect_job()
    _announce(settings, progress)
    try:
        outcome = supervise(
            cluster,
            settings,
            take_token(),
            progress,
            max_restarts=max_restarts,
            grace_s=grace,
            log_dir=log_dir,
            followers=followers,
            leaders=leaders,
            report_to=int(report_to),
        )
    finally:
        only_show("the end of the job", progress.close)
    raise typer.Exit(finish(screen, outcome, summary, progress))


def _announce(settings: JobSettings, display: Display) -> None:
    """Say at once what begins: processes and their imports take seconds until there is more to say."""
    count = f"{settings.workers} worker{'s' * (settings.workers != 1)}"
    rule = "" if settings.sync is None else f" under {short(settings.sync)}"
    only_show("what begins", lambda: display.note(f"starting {count} of {settings.script}{rule}"))


def _given(context: typer.Context) -> Callable[[str], bool]:
    """Return a function that tells whether the command line gives an option."""
    return lambda name: getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"


app.command(epilog=simulate.EPILOG)(simulate.simulate)
app.command(context_settings=_PASSED_ON, epilog=chaos.EPILOG)(chaos.chaos)
app.command()(doctor)
app.command()(rules)
app.command()(view)
app.command()(report)
app.command()(compare)
app.command()(top)


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
