"""The options of a job on the command line, and their checks, which come before any process is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from offbeat.core.batch_sizes import BatchOrder
from offbeat.core.policy import ServerRule
from offbeat.errors import ConfigurationError
from offbeat.files import make_folder
from offbeat.journal.compression import packer
from offbeat.launch import checkpointing
from offbeat.launch.cluster import tls_of
from offbeat.launch.faults import parse_all, parse_late
from offbeat.launch.followers import FollowerSpec, kinds_of
from offbeat.launch.forkserver import POSSIBLE
from offbeat.launch.leadership import store_of
from offbeat.launch.notice import NoticeCommand
from offbeat.launch.program import Program
from offbeat.launch.ray_engine import RayOptions
from offbeat.policies import RULES, rule
from offbeat.runtime.job.checkpoint_folder import Checkpoint
from offbeat.runtime.job.settings import CheckpointOrder, JobSettings
from offbeat.runtime.job.wire_choice import check_replicas, check_rule, wire_format
from offbeat.view import curves, dashboard, job_view, log_to, metrics

Script = Annotated[str, typer.Argument(help="The training script; arguments after it are its own.", show_default=False)]
Module = Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module's name, as after python -m.")]


def rule_names(incomplete: str) -> list[str]:
    """Return the rules whose names begin so, for the shell's completion.

    >>> rule_names("ss"), rule_names("'ss")
    (['ssp'], ['ssp'])
    """
    return sorted(name for name in RULES if name.startswith(incomplete.lstrip("'\"").lower()))


Sync = Annotated[
    str | None,
    typer.Option(help="Synchronization rule, for instance 'ssp(staleness=3)'; overrides the script's.", autocompletion=rule_names),
]
Wire = Annotated[
    str | None,
    typer.Option(help="How gradients and parameters travel between hosts: float32, bf16 or int8; overrides the script's."),
]
Batch = Annotated[
    str | None,
    typer.Option(
        help="Samples of a worker's batch, in place of the script's: N, WORKER=N,... or auto\\[:N\\[:MOST]], by measured speed.",
    ),
]
Replicas = Annotated[int, typer.Option(help="1: every server has a standby, on another machine if there are several, which takes over.")]


def _known_store(text: str | None) -> str | None:
    """Return the value of ``--leaders``. Raises `ConfigurationError` if it names no store."""
    if text not in (None, "none"):
        store_of(text)
    return text


Leaders = Annotated[
    str | None,
    typer.Option(
        callback=_known_store,
        help="etcd://HOST\\[:PORT]/JOB: the store that decides who leads; or none.  \\[default: with --replicas, torchrun's own]",
    ),
]
MaxRestarts = Annotated[int, typer.Option(help="How often each worker is restarted when its process dies.")]
Slow = Annotated[list[str] | None, typer.Option(help="WORKER=SECONDS\\[@FROM-TO] or any=SECONDS: make a straggler (FROM-TO: versions).")]
Kill = Annotated[list[str] | None, typer.Option(help="WORKER@VERSION: kill a worker by SIGKILL at this version.")]
LateReplies = Annotated[list[str] | None, typer.Option(help="SERVER=SECONDS\\[@PERCENT%] or any=SECONDS...: delay blocks, under psp.")]
JournalFile = Annotated[
    Path | None, typer.Option(help="Write every event to this file, compressed if it ends in .zst or .gz (docs/journal.md).")
]
SummaryFile = Annotated[Path | None, typer.Option(help="Write the final figures to this file, as JSON.")]
LogDir = Annotated[Path | None, typer.Option(help="Append each worker's and server's whole output to files in this folder.")]
LogTo = Annotated[
    list[str] | None,
    typer.Option(
        "--log-to", help="tensorboard:DIR, wandb\\[:PROJECT] or mlflow\\[:URI]: write what scripts log there, and the job's figures."
    ),
]
Dashboard = Annotated[
    str | None,
    typer.Option(metavar="[PORT]", help="Serve a page that shows the job, at PORT of this machine.  \\[default port: 7860, or a free one]"),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print what the scripts print, warnings, errors, and one line at the end.")]
Metrics = Annotated[
    str | None, typer.Option(help="PORT, or HOST:PORT where others may see it: serve the job's figures to Prometheus, at /metrics.")
]
CheckpointDir = Annotated[
    Path | None, typer.Option("--checkpoint", help="Write checkpoints of the whole job into this folder (docs/checkpoints.md).")
]
Every = Annotated[
    str | None, typer.Option(help="SECONDS between two checkpoints, or VERSIONSv, such as 500v.  \\[default: 600, with --checkpoint]")
]
Keep = Annotated[int | None, typer.Option(help="How many of the newest checkpoints are kept.  \\[default: 2, with --checkpoint]")]
Resume = Annotated[
    Path | None,
    typer.Option(help="Go on from the newest checkpoint in this folder; options that are not given are those of the job before."),
]
AutoResume = Annotated[
    bool, typer.Option("--auto-resume", help="Go on from the newest checkpoint in the folder of --checkpoint; if it has none, begin.")
]
Seed = Annotated[int, typer.Option(help="Seed of sample orders and of injected slowness.")]
Timeout = Annotated[float, typer.Option(help="Seconds of silence after which a worker counts as dead.")]
ProgressTimeout = Annotated[
    float, typer.Option(help="Seconds without a call of offbeat after which a worker's script counts as stuck and is killed; 0: never.")
]
Grace = Annotated[float, typer.Option(help="Seconds for scripts to end after Ctrl-C (KeyboardInterrupt) or SIGTERM.")]
NoticeLine = Annotated[
    str | None, typer.Option(help="COMMAND to run every few seconds; its status 0 is the notice that this machine will be taken away.")
]
Procs = Annotated[int, typer.Option(help="Processes of each worker, the ranks of a torch.distributed group of its own, for DDP or FSDP2.")]
StartTimeout = Annotated[float, typer.Option(help="Seconds to wait for other machines, at the start and if all are lost.")]
UseTls = Annotated[bool | None, typer.Option("--tls/--no-tls", help="Encrypt what crosses machines.  [default: if several]")]
TlsCert = Annotated[str, typer.Option(help="PEM file with this machine's certificate, in place of one made for the job.")]
TlsKey = Annotated[str, typer.Option(help="PEM file with its key.")]
TlsCa = Annotated[str, typer.Option(help="PEM file with the authority that has signed the certificates of all machines.")]
NoPreload = Annotated[bool, typer.Option("--no-preload", help="Start each worker as a new process, with its own imports.")]
NoPhases = Annotated[bool, typer.Option("--no-phases", help="Do not measure where the workers' time goes.")]
NoTorchrunEnv = Annotated[bool, typer.Option("--no-torchrun-env", help="Do not set RANK, WORLD_SIZE and so on in the workers.")]


def check(
    *,
    program: Program,
    workers: int,
    servers: int,
    sync: str | None,
    max_restarts: int,
    slow: list[str],
    kill: list[str],
    journal: Path | None,
    summary: Path | None,
    seed: int,
    timeout_s: float,
    port: int,
    wire: str | None = None,
    progress_timeout_s: float = 1800.0,
    grace_s: float = 30.0,
    notice_command: str | None = None,
    late: Sequence[str] = (),
    log_dir: Path | None = None,
    followers: Sequence[FollowerSpec] = (),
    procs_per_worker: int = 1,
    no_torchrun_env: bool = False,
    no_phases: bool = False,
    checkpoint: CheckpointOrder | None = None,
    resume: Checkpoint | None = None,
    replicas: int = 0,
    on_driver: bool = False,
    batch: str | None = None,
) -> JobSettings:
    """Check the options of ``run`` and return the job's settings. No process is started.

    Raises:
        ConfigurationError: an option is wrong, or two options contradict each other.
    """
    for name, value, least in (
        ("workers", workers, 1),
        ("servers", servers, 1),
        ("max-restarts", max_restarts, 0),
        ("port", port, 0),
        ("procs-per-worker", procs_per_worker, 1),
    ):
        if value < least:
            raise ConfigurationError(f"--{name} {value}: must be at least {least}")
    if procs_per_worker > 1 and not POSSIBLE:
        raise ConfigurationError(f"--procs-per-worker {procs_per_worker}: this works on Linux only")
    if procs_per_worker > 1 and (checkpoint is not None or resume is not None):
        raise ConfigurationError(
            f"--procs-per-worker {procs_per_worker}: checkpoints of the whole job do not have the state of a worker's other processes yet; "
            "leave --checkpoint and --resume out, and save in the script (docs/groups.md)"
        )
    if port > 65535:
        raise ConfigurationError(f"--port {port}: must be at most 65535; 0 chooses a free port")
    if not 0.1 <= timeout_s < float("inf"):
        raise ConfigurationError(f"--timeout {timeout_s:g}: must be a number of seconds of at least 0.1")
    if not (progress_timeout_s == 0.0 or 0.1 <= progress_timeout_s < float("inf")):
        raise ConfigurationError(f"--progress-timeout {progress_timeout_s:g}: must be at least 0.1 seconds, or 0 for no limit")
    if not 0.0 <= grace_s < float("inf"):
        raise ConfigurationError(f"--grace {grace_s:g}: must be a number of seconds of at least 0")
    if notice_command is not None:
        NoticeCommand(notice_command)
    program.check()
    spelling, chosen_wire = None, None if wire is None else wire_format(wire)
    if sync is not None:
        chosen = rule(sync)
        chosen.check(workers)
        spelling = chosen.spelling
        if chosen_wire is not None:
            check_rule(chosen, chosen_wire)
        if servers > 1 and not isinstance(chosen, ServerRule):
            raise ConfigurationError(f"--servers {servers}: {spelling} has no servers that could share the parameters; leave --servers out")
        if batch is not None and chosen.plans_batches:
            raise ConfigurationError(
                f"--batch {batch}: {spelling} sets the batch sizes by itself, from its budget; leave --batch out, or the rule's budget="
            )
        if late and not (isinstance(chosen, ServerRule) and chosen.scope == "shard"):
            raise ConfigurationError(f"--late {late[0]}: under {spelling} servers send no blocks to delay; use --sync 'psp(...)'")
    if batch is not None:
        BatchOrder.of(batch, workers)
    if replicas:
        _check_replicas(replicas, sync=sync, on_driver=on_driver)
    checkpointing.check_rule(resume, spelling)
    check_files(journal, summary)
    if log_dir is not None:
        _check_folder(log_dir)
    slow_faults, kills = parse_all(slow, kill, workers)
    return JobSettings(
        workers=workers,
        servers=servers,
        sync=spelling,
        wire=chosen_wire,
        seed=seed,
        timeout_s=timeout_s,
        progress_timeout_s=progress_timeout_s,
        torchrun_env=not no_torchrun_env,
        phases=not no_phases,
        script=program.name,
        journal=None if journal is None else str(journal.absolute()),
        follow=kinds_of(followers),
        slow=slow_faults,
        kill=kills,
        late=tuple(parse_late(text, servers) for text in late),
        checkpoint=checkpoint,
        resume=None if resume is None else str(resume.path),
        replicas=replicas,
        batch=batch,
    )


def followers_of(targets: Sequence[str], port: str | None, page: str | None = None) -> tuple[FollowerSpec, ...]:
    """Return the processes that follow the job, for the values of ``--log-to``, ``--metrics`` and ``--dashboard``.

    Raises:
        ConfigurationError: a value is wrong, or given twice.
    """
    twice = [text for text in targets if targets.count(text) > 1]
    if twice:
        raise ConfigurationError(f"--log-to {twice[0]} is given twice: leave one out")
    found = [FollowerSpec(name=f"--log-to {text}", command=log_to.command_of(text), kinds=curves.KINDS) for text in targets]
    if port is not None:
        found.append(FollowerSpec(name=f"--metrics {port}", command=metrics.command_of(port), kinds=metrics.KINDS))
    if page is not None:
        name = f"--dashboard {page}".strip()
        command, environment = dashboard.command_of(page), dashboard.environment()
        found.append(FollowerSpec(name=name, command=command, kinds=job_view.KINDS, environment=environment))
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


def ray_options(
    *,
    on: str,
    ray_address: str | None,
    cpus_per_worker: float | None,
    gpus_per_worker: float | None,
    servers_on: str | None,
    start_timeout: float | None,
    tls: bool | None,
    tls_cert: str,
    tls_key: str,
    tls_ca: str,
) -> RayOptions | None:
    """Check the options of ``run`` that are about Ray, and return them; None: the job runs on this machine only.

    Raises:
        ConfigurationError: an option is wrong, or given without ``--on ray``.
    """
    if on not in ("local", "ray"):
        raise ConfigurationError(f"--on {on}: must be local or ray; under torchrun, Slurm or MPI use offbeat agent (docs/clusters.md)")
    if on == "local":
        given = {
            "--ray-address": ray_address,
            "--cpus-per-worker": cpus_per_worker,
            "--gpus-per-worker": gpus_per_worker,
            "--servers-on": servers_on,
            "--start-timeout": start_timeout,
            "--tls": tls,
            "--tls-cert": tls_cert or None,
            "--tls-key": tls_key or None,
            "--tls-ca": tls_ca or None,
        }
        lonely = [name for name, value in given.items() if value is not None]
        if lonely:
            raise ConfigurationError(f"{lonely[0]} is for jobs on a Ray cluster: add --on ray, or leave it out")
        return None
    if servers_on not in (None, "driver", "nodes"):
        raise ConfigurationError(f"--servers-on {servers_on}: must be driver (beside this command) or nodes (on the nodes in turn)")
    tls_of(tls, several=True, certificate=tls_cert, key=tls_key, authority=tls_ca)
    return RayOptions(
        address=ray_address or "",
        cpus=1.0 if cpus_per_worker is None else cpus_per_worker,
        gpus=gpus_per_worker or 0.0,
        start_s=600.0 if start_timeout is None else start_timeout,
        spread_servers=servers_on == "nodes",
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
