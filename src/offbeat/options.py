"""The options of a job on the command line, and their checks, which come before any process is started.

Each option is a field of a dataclass: `JobOptions` has those of ``run`` and ``agent``, and each command has its own beside them. Its type,
its default, its help and the group in which the help shows it stand there and nowhere else; `takes` makes the command from the fields.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from offbeat.core.batch_sizes import BatchOrder
from offbeat.core.policy import Policy, ServerRule
from offbeat.errors import ConfigurationError
from offbeat.files import make_folder
from offbeat.journal.compression import packer
from offbeat.launch import checkpointing
from offbeat.launch.cluster import tls_of
from offbeat.launch.faults import parse_kill, parse_late, parse_slow
from offbeat.launch.followers import FollowerSpec, kinds_of
from offbeat.launch.leadership import store_of
from offbeat.launch.notice import NoticeCommand
from offbeat.launch.program import Program
from offbeat.launch.ray_engine import RayOptions
from offbeat.policies import RULES, rule
from offbeat.runtime.job.checkpoint_folder import Checkpoint
from offbeat.runtime.job.settings import CheckpointOrder, JobSettings
from offbeat.runtime.job.wire_choice import check_plane, check_replicas, check_rule, plane_choice, wire_format
from offbeat.view import curves, dashboard, job_view, log_to, metrics

Script = Annotated[str, typer.Argument(help="The training script; arguments after it are its own.", show_default=False)]
RunScript = Annotated[str | None, typer.Argument(help="The training script; arguments after it are its own.", show_default=False)]
Module = Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module's name, as after python -m.")]

START, RULE, SURVIVAL = "Processes", "Rule", "Deaths and silence"
RECORDS, FAULTS, MACHINES, TLS = "Records", "Faults, to try it out", "Machines", "Encryption"
CHECKPOINTS, RAY = "Checkpoints", "Ray, with --on ray"
"""The groups of the help."""
T = TypeVar("T")


def option(group: str, *names: str, **more: Any) -> Any:
    """Return an option of this group; for the rest see `typer.Option`."""
    return typer.Option(*names, rich_help_panel=group, **more)


def takes(kind: type[T]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command have an option for each field of a dataclass, and get them as one argument, ``options``."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [one for one in inspect.signature(function).parameters.values() if one.name != "options"]
        hints = {**get_type_hints(function, include_extras=True), **get_type_hints(kind, include_extras=True)}
        names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [one.replace(kind=keyword, annotation=hints[one.name]) for one in own]
        parameters += [inspect.Parameter(n, keyword, default=getattr(kind, n), annotation=hints[n]) for n in names]

        def command(**given: Any) -> None:
            function(**{one.name: given.pop(one.name) for one in own}, options=kind(**given))

        command.__doc__, command.__name__ = function.__doc__, function.__name__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


def rule_names(incomplete: str) -> list[str]:
    """Return the rules whose names begin so, for the shell's completion.

    >>> rule_names("ss"), rule_names("'ss")
    (['ssp'], ['ssp'])
    """
    return sorted(name for name in RULES if name.startswith(incomplete.lstrip("'\"").lower()))


def _known_store(text: str | None) -> str | None:
    """Return the value of ``--leaders``. Raises `ConfigurationError` if it names no store."""
    if text not in (None, "none"):
        store_of(text)
    return text


UseTls = Annotated[bool | None, option(TLS, "--tls/--no-tls", help="Encrypt what crosses machines.  \\[default: if several]")]
TlsCert = Annotated[str, option(TLS, help="PEM file with this machine's certificate, in place of one made for the job.")]
TlsKey = Annotated[str, option(TLS, help="PEM file with its key.")]
TlsCa = Annotated[str, option(TLS, help="PEM file with the authority that has signed the certificates of all machines.")]


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options of each command with which a job is started. Of two, each command has its own help."""

    servers: int = 1
    port: int = 0
    procs_per_worker: Annotated[
        int, option(START, help="Processes of each worker, the ranks of a torch.distributed group of its own, for DDP or FSDP2.")
    ] = 1
    preload: Annotated[
        list[str] | None, option(START, help="MODULE to import once, beside PyTorch; workers are forks of that process.")
    ] = None
    no_preload: Annotated[bool, option(START, "--no-preload", help="Start each worker as a new process, with its own imports.")] = False
    no_torchrun_env: Annotated[bool, option(START, "--no-torchrun-env", help="Do not set RANK, WORLD_SIZE and so on in the workers.")] = (
        False
    )
    sync: Annotated[
        str | None,
        option(RULE, help="Synchronization rule, for instance 'ssp(staleness=3)'; overrides the script's.", autocompletion=rule_names),
    ] = None
    wire: Annotated[
        str | None, option(RULE, help="How gradients and parameters travel between hosts: float32, bf16 or int8; overrides the script's.")
    ] = None
    plane: Annotated[
        str,
        option(
            RULE,
            help="Where gradients are exchanged: in the memory of the host, of the GPU where the model is (device), or of the GPU where "
            "that can be (auto).",
        ),
    ] = "host"
    batch: Annotated[
        str | None,
        option(
            RULE, help="Samples of a worker's batch, in place of the script's: N, WORKER=N,... or auto\\[:N\\[:MOST]], by measured speed."
        ),
    ] = None
    seed: Annotated[int, option(RULE, help="Seed of sample orders and of injected slowness.")] = 0
    replicas: Annotated[
        int, option(SURVIVAL, help="1: every server has a standby, on another machine if there are several, which takes over.")
    ] = 0
    leaders: Annotated[
        str | None,
        option(
            SURVIVAL,
            callback=_known_store,
            help="etcd://HOST\\[:PORT]/JOB: the store that decides who leads; or none.  \\[default: with --replicas, torchrun's own]",
        ),
    ] = None
    max_restarts: Annotated[int, option(SURVIVAL, help="How often each worker is restarted when its process dies.")] = 3
    timeout: Annotated[float, option(SURVIVAL, help="Seconds of silence after which a worker counts as dead.")] = 10.0
    progress_timeout: Annotated[
        float,
        option(SURVIVAL, help="Seconds without a call of offbeat after which a worker's script counts as stuck and is killed; 0: never."),
    ] = 1800.0
    grace: Annotated[float, option(SURVIVAL, help="Seconds for scripts to end after Ctrl-C (KeyboardInterrupt) or SIGTERM.")] = 30.0
    notice_command: Annotated[
        str | None,
        option(SURVIVAL, help="COMMAND to run every few seconds; its status 0 is the notice that this machine will be taken away."),
    ] = None
    checkpoint: Annotated[
        Path | None, option(CHECKPOINTS, "--checkpoint", help="Write checkpoints of the whole job into this folder (docs/checkpoints.md).")
    ] = None
    every: Annotated[
        str | None,
        option(CHECKPOINTS, help="SECONDS between two checkpoints, or VERSIONSv, such as 500v.  \\[default: 600, with --checkpoint]"),
    ] = None
    keep: Annotated[
        int | None, option(CHECKPOINTS, help="How many of the newest checkpoints are kept.  \\[default: 2, with --checkpoint]")
    ] = None
    resume: Annotated[
        Path | None,
        option(
            CHECKPOINTS,
            help="Go on from the newest checkpoint in this folder. --workers, --servers, --sync, --wire, --batch and --seed that are not "
            "given are those of the job before.",
        ),
    ] = None
    auto_resume: Annotated[
        bool,
        option(CHECKPOINTS, "--auto-resume", help="Go on from the newest checkpoint in the folder of --checkpoint; if it has none, begin."),
    ] = False
    journal: Annotated[
        Path | None, option(RECORDS, help="Write every event to this file, compressed if it ends in .zst or .gz (docs/journal.md).")
    ] = None
    summary: Annotated[Path | None, option(RECORDS, help="Write the final figures to this file, as JSON.")] = None
    log_dir: Annotated[Path | None, option(RECORDS, help="Append each worker's and server's whole output to files in this folder.")] = None
    log_to: Annotated[
        list[str] | None,
        option(
            RECORDS,
            "--log-to",
            help="tensorboard:DIR, wandb\\[:PROJECT] or mlflow\\[:URI]: write what scripts log there, and the job's figures.",
        ),
    ] = None
    dashboard: Annotated[
        str | None,
        option(
            RECORDS,
            metavar="[PORT]",
            help="Serve a page that shows the job, at PORT of this machine.  \\[default port: 7860, or a free one]",
        ),
    ] = None
    metrics: Annotated[
        str | None, option(RECORDS, help="PORT, or HOST:PORT where others may see it: serve the job's figures to Prometheus, at /metrics.")
    ] = None
    quiet: Annotated[
        bool, option(RECORDS, "--quiet", "-q", help="Print what the scripts print, warnings, errors, and one line at the end.")
    ] = False
    no_phases: Annotated[bool, option(RECORDS, "--no-phases", help="Do not measure where the workers' time goes.")] = False
    slow: Annotated[
        list[str] | None,
        option(
            FAULTS,
            help="WORKER=SECONDS\\[@FROM-TO] or any=SECONDS: make a straggler (FROM-TO: versions); trace=FILE: replay measured times.",
        ),
    ] = None
    kill: Annotated[list[str] | None, option(FAULTS, help="WORKER@VERSION: kill a worker by SIGKILL at this version.")] = None
    late: Annotated[list[str] | None, option(FAULTS, help="SERVER=SECONDS\\[@PERCENT%] or any=SECONDS...: delay blocks, under psp.")] = None
    tls: UseTls = None
    tls_cert: TlsCert = ""
    tls_key: TlsKey = ""
    tls_ca: TlsCa = ""

    @property
    def tls_files(self) -> dict[str, str]:
        """Return the arguments of `launch.cluster.tls_of` that name files."""
        return {"certificate": self.tls_cert, "key": self.tls_key, "authority": self.tls_ca}


@dataclass(frozen=True, kw_only=True)
class RunOptions(JobOptions):
    """The options of ``run``."""

    workers: Annotated[
        str,
        option(START, help="N processes that compute gradients, or MIN..MAX: begin with MIN, and take in others later (docs/growing.md)."),
    ] = "2"
    join: Annotated[
        str | None,
        option(START, metavar="JOB", help="PID or SCRIPT of a job of yours on this machine: bring it --workers, without a SCRIPT here."),
    ] = None
    servers: Annotated[int, option(START, help="Processes that hold the parameters, a shard each.")] = 1
    port: Annotated[int, option(START, help="The port on which server 0 listens, with --on ray the supervisor; 0: any free port.")] = 0
    on: Annotated[str, option(START, help="local: all processes on this machine; ray: on a Ray cluster, with the options below.")] = "local"
    ray_address: Annotated[
        str | None, option(RAY, help="The Ray cluster.  \\[default: RAY_ADDRESS, else one of this machine, else a new one here]")
    ] = None
    cpus_per_worker: Annotated[float | None, option(RAY, help="CPUs that Ray sets aside for each worker.  \\[default: 1]")] = None
    gpus_per_worker: Annotated[
        float | None, option(RAY, help="GPUs that Ray sets aside for each worker, or a part of one.  \\[default: 0]")
    ] = None
    servers_on: Annotated[
        str | None, option(RAY, help="driver: servers run beside this command; nodes: the nodes start them in turn.  \\[default: driver]")
    ] = None
    start_timeout: Annotated[
        float | None, option(RAY, help="Seconds to wait for room on the cluster, at the start and if all nodes are lost.  \\[default: 600]")
    ] = None


@dataclass(frozen=True, kw_only=True)
class AgentOptions(JobOptions):
    """The options of ``agent``."""

    nproc_per_node: Annotated[
        int, option(MACHINES, help="Workers of each agent. Engines that start an agent for each worker leave it at 1.")
    ] = 1
    nnodes: Annotated[str | None, option(MACHINES, help="N or MIN:MAX: machines. The job begins with MIN and takes in others later.")] = (
        None
    )
    node_rank: Annotated[int | None, option(MACHINES, help="The number of this machine, where no engine gives it one.")] = None
    rdzv_endpoint: Annotated[str | None, option(MACHINES, help=r"HOST\[:PORT] of the first machine, where the engine does not say it.")] = (
        None
    )
    servers: Annotated[int, option(START, help="Processes that hold the parameters, a shard each; the machines start them in turn.")] = 1
    start_timeout: Annotated[float, option(MACHINES, help="Seconds to wait for other machines, at the start and if all are lost.")] = 600.0
    listen: Annotated[
        str, option(MACHINES, help="The address at which the supervisor listens.  \\[default: that of the first machine]")
    ] = ""
    advertise: Annotated[str, option(MACHINES, help="The address at which others reach this machine.  \\[default: found]")] = ""
    port: Annotated[int, option(MACHINES, help="The supervisor's port; server n has PORT+1+n. 0: any free port, or the engine's.")] = 0
    token_file: Annotated[Path | None, option(MACHINES, help="A file with the job's secret, the same on all machines.")] = None


def check(
    options: JobOptions,
    program: Program,
    workers: int,
    *,
    least: int | None = None,
    followers: Sequence[FollowerSpec] = (),
    checkpoint: CheckpointOrder | None = None,
    resume: Checkpoint | None = None,
    on_driver: bool = False,
) -> JobSettings:
    """Check the options of a job and return its settings. No process is started.

    Args:
        options: of the command.
        program: the script.
        workers: the highest number of workers.
        least: with how many the job begins; None: with all.
        followers: what follows the job, from `followers_of`.
        checkpoint: what ``--checkpoint``, ``--every`` and ``--keep`` come to.
        resume: the checkpoint from which the job goes on.
        on_driver: True if the servers run beside this command, and end with it.

    Raises:
        ConfigurationError: an option is wrong, or two options contradict each other.
    """
    _check_numbers(options, workers)
    groups, plane = options.procs_per_worker, plane_choice(options.plane)
    if groups > 1 and (checkpoint is not None or resume is not None):
        raise ConfigurationError(
            f"--procs-per-worker {groups}: checkpoints of the whole job do not have the state of a worker's other processes yet; "
            "leave --checkpoint and --resume out, and save in the script (docs/groups.md)"
        )
    if options.notice_command is not None:
        NoticeCommand(options.notice_command)
    program.check()
    for name, given, instead in (("procs-per-worker", groups, 1), ("replicas", options.replicas, 0)):
        if plane == "device" and given != instead:
            raise ConfigurationError(f"--plane device: with --{name} {given} gradients are in the host's memory; leave one of the two out")
    wire = None if options.wire is None else wire_format(options.wire)
    chosen = None if options.sync is None else rule(options.sync)
    if chosen is not None:
        chosen.check(workers)
        if least is not None and least < workers:
            _check_least(chosen, least, workers)
        check_plane(chosen, plane)
        if wire is not None:
            check_rule(chosen, wire)
        _check_beside_rule(options, chosen)
    if options.batch is not None:
        BatchOrder.of(options.batch, workers)
    if options.replicas:
        _check_replicas(options.replicas, sync=options.sync, on_driver=on_driver)
    spelling = None if chosen is None else chosen.spelling
    checkpointing.check_rule(resume, spelling)
    check_files(options.journal, options.summary)
    if options.log_dir is not None:
        _check_folder(options.log_dir)
    return JobSettings(
        workers=workers,
        least=least or workers,
        servers=options.servers,
        sync=spelling,
        wire=wire,
        plane=plane,
        seed=options.seed,
        timeout_s=options.timeout,
        progress_timeout_s=options.progress_timeout,
        torchrun_env=not options.no_torchrun_env,
        phases=not options.no_phases,
        script=program.name,
        journal=None if options.journal is None else str(options.journal.absolute()),
        follow=kinds_of(followers),
        slow=tuple(parse_slow(text, workers) for text in options.slow or ()),
        kill=tuple(parse_kill(text, workers) for text in options.kill or ()),
        late=tuple(parse_late(text, options.servers) for text in options.late or ()),
        checkpoint=checkpoint,
        resume=None if resume is None else str(resume.path),
        replicas=options.replicas,
        batch=options.batch,
    )


def _check_numbers(options: JobOptions, workers: int) -> None:
    progress, grace = options.progress_timeout, options.grace
    for name, given, fits, must in (
        ("workers", workers, workers >= 1, "at least 1"),
        ("servers", options.servers, options.servers >= 1, "at least 1"),
        ("max-restarts", options.max_restarts, options.max_restarts >= 0, "at least 0"),
        ("port", options.port, options.port >= 0, "at least 0"),
        ("port", options.port, options.port <= 65535, "at most 65535; 0 chooses a free port"),
        ("procs-per-worker", options.procs_per_worker, options.procs_per_worker >= 1, "at least 1"),
        ("timeout", f"{options.timeout:g}", 0.1 <= options.timeout < inf, "a number of seconds of at least 0.1"),
        ("progress-timeout", f"{progress:g}", progress == 0.0 or 0.1 <= progress < inf, "at least 0.1 seconds, or 0 for no limit"),
        ("grace", f"{grace:g}", 0.0 <= grace < inf, "a number of seconds of at least 0"),
    ):
        if not fits:
            raise ConfigurationError(f"--{name} {given}: must be {must}")


def _check_beside_rule(options: JobOptions, chosen: Policy) -> None:
    """Check options that not every rule can have beside it."""
    spelling, servers, late = chosen.spelling, options.servers, options.late or ()
    if servers > 1 and not isinstance(chosen, ServerRule):
        raise ConfigurationError(f"--servers {servers}: {spelling} has no servers that could share the parameters; leave --servers out")
    if options.batch is not None and chosen.plans_batches:
        raise ConfigurationError(
            f"--batch {options.batch}: {spelling} sets the batch sizes by itself, from its budget; leave --batch out, or the rule's budget="
        )
    of_shards = isinstance(chosen, ServerRule) and chosen.scope == "shard"
    if isinstance(chosen, ServerRule) and of_shards:
        chosen.blocks(servers)  # refuses a number of servers that the rule cannot have
    if late and not of_shards:
        raise ConfigurationError(f"--late {late[0]}: under {spelling} servers send no blocks to delay; use --sync 'psp(...)'")


def span_of(text: str) -> tuple[int, int]:
    """Return the least and the greatest number of workers that ``--workers`` says.

    Raises:
        ConfigurationError: it is neither N nor MIN..MAX.

    >>> span_of("4"), span_of("2..8"), span_of("2:8")
    ((4, 4), (2, 8), (2, 8))
    """
    match = re.fullmatch(r"(-?\d+)(?:(?:\.\.|:)(\d+))?", str(text).strip())
    if match is None:
        raise ConfigurationError(f"--workers {text}: write N, or MIN..MAX, for instance 2..8")
    least, most = int(match[1]), int(match[2] or match[1])
    if least < 1:
        raise ConfigurationError(f"--workers {text}: must be at least 1")
    if least > most:
        raise ConfigurationError(
            f"--workers {text}: the job would begin with {least} workers and have at most {most}; write {most}..{least}"
        )
    return least, most


def _check_least(rule: Policy, least: int, most: int) -> None:
    try:
        rule.check(least)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"the job would begin with {least} of {most} workers (--workers MIN..MAX, --nnodes MIN:MAX), and {error}"
        ) from None


def followers_of(options: JobOptions) -> tuple[FollowerSpec, ...]:
    """Return the processes that follow the job, for the values of ``--log-to``, ``--metrics`` and ``--dashboard``.

    Raises:
        ConfigurationError: a value is wrong, or given twice.
    """
    targets, port, page = options.log_to or [], options.metrics, options.dashboard
    twice = [text for text in targets if targets.count(text) > 1]
    if twice:
        raise ConfigurationError(f"--log-to {twice[0]} is given twice: leave one out")
    found = [FollowerSpec(name=f"--log-to {text}", command=log_to.command_of(text), kinds=curves.KINDS) for text in targets]
    if port is not None:
        found.append(FollowerSpec(name=f"--metrics {port}", command=metrics.command_of(port), kinds=metrics.KINDS))
    if page is not None:
        name = f"--dashboard {page}".strip()
        command = dashboard.command_of(page, "" if options.journal is None else str(options.journal.resolve()))
        found.append(FollowerSpec(name=name, command=command, kinds=job_view.FOLLOWED, environment=dashboard.environment()))
    return tuple(found)


def _check_replicas(replicas: int, *, sync: str | None, on_driver: bool) -> None:
    if replicas != 1:
        raise ConfigurationError(f"--replicas {replicas}: each server can have no standby (0) or one (1)")
    if on_driver:
        raise ConfigurationError(
            "--replicas 1: servers that run beside this command end with it, whether they have standbys or not; add --servers-on nodes, "
            "or leave --replicas out"
        )
    if sync is not None:
        check_replicas(rule(sync))


def ray_options(options: RunOptions) -> RayOptions | None:
    """Check the options of ``run`` that are about Ray, and return them; None: the job runs on this machine only.

    Raises:
        ConfigurationError: an option is wrong, or given without ``--on ray``.
    """
    if options.on not in ("local", "ray"):
        raise ConfigurationError(
            f"--on {options.on}: must be local or ray; under torchrun, Slurm or MPI use offbeat agent (docs/clusters.md)"
        )
    if options.on == "local":
        names = ("ray_address", "cpus_per_worker", "gpus_per_worker", "servers_on", "start_timeout", "tls", "tls_cert", "tls_key", "tls_ca")
        lonely = [name for name in names if getattr(options, name) not in (None, "")]
        if lonely:
            raise ConfigurationError(f"--{lonely[0].replace('_', '-')} is for jobs on a Ray cluster: add --on ray, or leave it out")
        return None
    if options.servers_on not in (None, "driver", "nodes"):
        raise ConfigurationError(f"--servers-on {options.servers_on}: must be driver (beside this command) or nodes (on the nodes in turn)")
    tls_of(options.tls, several=True, **options.tls_files)
    return RayOptions(
        address=options.ray_address or "",
        cpus=1.0 if options.cpus_per_worker is None else options.cpus_per_worker,
        gpus=options.gpus_per_worker or 0.0,
        start_s=600.0 if options.start_timeout is None else options.start_timeout,
        spread_servers=options.servers_on == "nodes",
    )


def check_files(journal: Path | None, summary: Path | None) -> None:
    """Check that the two files can be written.

    Raises:
        ConfigurationError: one of them cannot be written, the journal cannot be compressed, or they are the same file.
    """
    for option, path in (("journal", journal), ("summary", summary)):
        if path is not None:
            _check_writable(f"--{option} {path}", path.absolute())
    if journal is not None:
        packer(journal)
    if journal is not None and summary is not None and journal.absolute() == summary.absolute():
        raise ConfigurationError(f"--journal and --summary are the same file, {journal}: name two different files")


def _check_writable(option: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigurationError(f"{option}: there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigurationError(f"{option}: this is a folder; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigurationError(f"{option}: no permission to write there")


def _check_folder(folder: Path) -> None:
    """Create the folder of ``--log-dir`` if it does not exist, and check that it can be written."""
    try:
        make_folder(folder)
    except OSError as error:
        raise ConfigurationError(f"--log-dir {folder}: cannot create this folder ({error.strerror}); name another one") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"--log-dir {folder}: no permission to write there")
