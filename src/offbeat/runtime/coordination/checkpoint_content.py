"""Write the files of a checkpoint, and read them for a job that resumes.

``model.pt`` is what the model's ``state_dict`` would be, ``optimizer.pt`` that of the plain optimizer, ``workers.pt`` has the part of each
worker (``runtime/worker/job_checkpoints.py``). A second optimizer of the script has ``model-1.pt`` and ``optimizer-1.pt``, and so on.
``torch.load(..., weights_only=True)`` reads each. The manifest has the rest: version, rule, places of the samplers, layout. None of it
depends on the number of servers, so that a job with another number can resume from it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from offbeat.core.job.coordinator import Coordinator
from offbeat.core.job.progress import Progress
from offbeat.core.job.resumption import kept_from
from offbeat.core.job.start import Beginning
from offbeat.core.policy import Policy
from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.files import private, why
from offbeat.runtime.job.checkpoint_folder import Checkpoint, manifest_of
from offbeat.runtime.job.packing import pack, unpack
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.recovery.plain_graph import PURE, freeze, thaw
from offbeat.tensors.layout import Layout, Span
from offbeat.tensors.optimizers import OptimizerSpec
from offbeat.tensors.state import assemble_state_dict, split_state_dict
from offbeat.tensors.whole import ShardCopy, parameters_of, write_parameters
from offbeat.transport.base import Message
from offbeat.types import Version, WorkerId

log = logging.getLogger(__name__)
WORKERS: Final = "workers.pt"
COORDINATOR: Final = b"offbeat coordinator 2\n"
"""What a coordinator's file begins with; the number changes with the classes of ``offbeat.core`` in a way that makes older bytes wrong."""
FLUSH_NBYTES: Final = 16 << 20
REPLICA: Final = "replica_groups"
"""In the optimizer's file of a job without servers: the settings that the optimizer itself changes, which a joining rank gets."""


def named(what: str, number: int) -> str:
    """Return the name of a file about optimizer ``number``."""
    return f"{what}-{number}.pt" if number else f"{what}.pt"


@dataclass
class ModelRest:
    """What a model's ``state_dict`` has beside the parameters that the servers hold."""

    names: dict[str, str] = field(default_factory=dict)
    """By key of the ``state_dict``: the name of a parameter that the servers hold."""
    rest: dict[str, Any] = field(default_factory=dict)
    """By key: buffers, and parameters that are not trained."""


@dataclass
class OptimizerContent:
    """What a checkpoint has of one optimizer."""

    layout: Layout
    spec: OptimizerSpec
    place: Mapping[str, Any]
    """What the manifest says of it: version, rule, places of the samplers."""
    copies: list[ShardCopy] = field(default_factory=list)
    """Of this process's shard; those of the others are in files."""
    servers: list[int] = field(default_factory=list)
    """The other servers that have written a file."""
    parts: dict[WorkerId, Message] = field(default_factory=dict)
    """The workers' parts, by worker."""
    giver: WorkerId | None = None
    """The worker that was asked for the rest of the model."""
    rest: ModelRest = field(default_factory=ModelRest)
    """What earlier checkpoints know of it."""
    coordinator: bytes | None = None
    """The coordinator's state; None: it is not kept."""
    replica: Message | None = None
    """Of a job without servers: a rank's replica, in the form of `runtime.ranks.replica.Replica.give`."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a snapshot of the server: which workers have handed in a part or a replica, without these."""
        nothing = {"copies": [], "rest": ModelRest(), "coordinator": None}
        replica = None if self.replica is None else Message({"from": self.replica.header.get("from")}, memoryview(b""), ())
        parts = {worker: Message({}, memoryview(b""), ()) for worker in self.parts}
        return {**vars(self), **nothing, "replica": replica, "parts": parts}


def shard_file(folder: Path, server: int, number: int) -> Path:
    """Return the file that another server writes of optimizer ``number`` into the folder of a checkpoint in the making."""
    return folder / f"server-{server}-{number}.pt"


def coordinator_bytes(coordinator: Coordinator) -> bytes | None:
    """Return the state of a coordinator between two events, for a file; None: its rule keeps something that is no data."""
    try:
        return COORDINATOR + freeze(coordinator)[0]
    except TypeError:
        return None


def coordinator_from(data: bytes) -> Coordinator:
    """Return what `coordinator_bytes` was given. Only objects that can do nothing but compute are made.

    Raises:
        ProtocolError: these are not the bytes of a coordinator, or they are another release's.
    """
    if not data.startswith(COORDINATOR):
        raise ProtocolError(f"expected the state of a coordinator, which begins with {COORDINATOR!r}; it begins with {data[:22]!r}")
    found = thaw(data[len(COORDINATOR) :], packages=PURE)
    if not isinstance(found, Coordinator):
        raise ProtocolError(f"expected the state of a coordinator, found a {type(found).__name__}")
    return found


class _Steadily:
    """Write to a file, and have the disk take the bytes from time to time: one long flush at the end would hold up other files."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._waiting = file, 0

    def write(self, data: Any) -> int:
        self._waiting += self._file.write(data)
        if self._waiting >= FLUSH_NBYTES:
            self.flush()
        return len(data)

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._waiting = 0


def write_file(content: Any, path: Path) -> None:
    """Write a new file of `torch.save`, and flush it to the disk."""
    with open(path, "xb", opener=private) as file:
        torch.save(content, _Steadily(file))  # type: ignore[arg-type]


def write_copy(path: Path, copy: ShardCopy) -> None:
    """Write what another server's shard holds, for `write_files` of server 0, and flush it to the disk."""
    content = {
        "span": list(copy.span),
        "parameters": torch.frombuffer(copy.parameters, dtype=torch.uint8) if copy.parameters else torch.empty(0, dtype=torch.uint8),
        "headers": copy.headers,
        "state": torch.frombuffer(copy.state, dtype=torch.uint8) if copy.state else torch.empty(0, dtype=torch.uint8),
    }
    write_file(content, path)


def read_copy(path: Path) -> ShardCopy:
    """Read what `write_copy` has written."""
    content = torch.load(path, weights_only=True)
    parameters = bytearray(content["parameters"].numpy().tobytes())
    return ShardCopy(Span(*content["span"]), parameters, content["headers"], content["state"].numpy().tobytes())


def write_files(folder: Path, contents: Sequence[OptimizerContent]) -> list[dict[str, Any]]:
    """Write all files of a checkpoint but the manifest, and remove what the other servers have written for it.

    Returns:
        For each optimizer, what the manifest says of it.

    Raises:
        OSError: a file cannot be written or read.
        ConfigurationError: no worker has described its model.
        ProtocolError: a worker's part, or a shard's state, does not fit.
    """
    workers: dict[int, dict[int, Any]] = {}
    for number, content in enumerate(contents):
        parts = {worker: unpack(message.header["part"], message.payload) for worker, message in sorted(content.parts.items())}
        _note_rest(content.rest, {worker: part.pop("model", None) for worker, part in parts.items()})
        _write_model(folder, number, content, parts)
        if content.coordinator is not None:
            with open(folder / f"coordinator-{number}.state", "xb", opener=private) as file:
                file.write(content.coordinator)
        for worker, part in parts.items():
            workers.setdefault(worker, {})[number] = part
    write_file(workers, folder / WORKERS)
    for number, content in enumerate(contents):
        for server in content.servers:
            shard_file(folder, server, number).unlink()
    return [
        {
            **content.place,
            "optimizer": content.spec.name,
            "layout": content.layout.to_wire(),
            "keys": _other_keys(content.rest.names),
        }
        for content in contents
    ]


def _other_keys(names: Mapping[str, str]) -> dict[str, str]:
    """Return the key in the ``state_dict`` of each parameter that has another name there."""
    return {name: key for key, name in names.items() if name not in names}


def _note_rest(rest: ModelRest, described: Mapping[WorkerId, Any]) -> None:
    for model in described.values():
        if model is not None:
            rest.names = model["names"]
            rest.rest.update(model["rest"])


def _write_model(folder: Path, number: int, content: OptimizerContent, parts: Mapping[WorkerId, Any]) -> None:
    if not content.rest.names:
        asked = content.giver is not None
        raise ConfigurationError(
            f"worker {content.giver} has not described its model in time" if asked else "no worker has described its model as it left"
        )
    groups: list[dict[str, Any]] = next((part["groups"] for part in parts.values()), [])
    if content.replica is not None:
        replica = unpack(content.replica.header["replica"], content.replica.payload)
        slots = [tensor.slot for tensor in content.layout.tensors]
        parameters = bytearray(replica["parameters"].numpy().tobytes())
        copies = [ShardCopy(Span(0, content.layout.nbytes), parameters, [], b"")]
        state = {"state": dict(zip(slots, replica["state"], strict=True)), "param_groups": groups, REPLICA: replica["groups"]}
        _write_state_dicts(folder, number, content, copies, state)
        return
    copies = [*content.copies, *(read_copy(shard_file(folder, server, number)) for server in content.servers)]
    state = assemble_state_dict(content.layout, content.spec, [(copy.headers, memoryview(copy.state)) for copy in copies], groups)
    _write_state_dicts(folder, number, content, copies, state)


def _write_state_dicts(folder: Path, number: int, content: OptimizerContent, copies: Sequence[ShardCopy], state: Mapping[str, Any]) -> None:
    parameters = parameters_of(content.layout, copies)
    model = {key: parameters[name] for key, name in content.rest.names.items()}
    write_file({**model, **content.rest.rest}, folder / named("model", number))
    write_file(dict(state), folder / named("optimizer", number))


class Resumed:
    """Read the checkpoint from which a job resumes.

    Args:
        path: its folder.

    Raises:
        ConfigurationError: the folder is no complete checkpoint, or of a newer version of offbeat.
    """

    def __init__(self, path: str) -> None:
        manifest = manifest_of(Path(path))
        if manifest is None:
            raise ConfigurationError(f"--resume: {path} is not a complete checkpoint; on all machines it must be the same, shared folder")
        self.checkpoint = Checkpoint(Path(path), manifest)
        self._workers: Mapping[int, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a snapshot of the server has; the file is read again if a worker needs its part of it."""
        return {"path": str(self.checkpoint.path), "manifest": self.checkpoint.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.checkpoint, self._workers = Checkpoint(Path(state["path"]), state["manifest"]), None

    def has(self, number: int) -> bool:
        """Return True if the script had made this optimizer when the checkpoint was made: it makes several, maybe one after the other."""
        return number < len(self.checkpoint.manifest["optimizers"])

    def check(self, number: int, policy: Policy, layout: Layout, spec: OptimizerSpec) -> None:
        """Compare an optimizer of the job with that of the checkpoint.

        Raises:
            ConfigurationError: the rule, the model or the optimizer differs; the message names both.
        """
        saved = self._of(number)
        if saved["sync"] != policy.spelling:
            raise ConfigurationError(
                f"--resume {self.checkpoint.path}: the checkpoint is of a job under {saved['sync']}, this job is under {policy.spelling}; "
                f"resume with --sync '{saved['sync']}', or load its model.pt in the script of a new job"
            )
        if saved["optimizer"] != spec.name:
            raise ConfigurationError(
                f"--resume {self.checkpoint.path}: the checkpoint has the state of {saved['optimizer']}, and the script uses {spec.name}: "
                "resume with the optimizer of the job before, or load model.pt in the script of a new job"
            )
        difference = Layout.from_wire(saved["layout"]).difference(layout)
        if difference is not None:
            raise ConfigurationError(
                f"--resume {self.checkpoint.path}: the checkpoint is of another model than the script's: of its parameters, {difference}"
            )

    def version(self, number: int) -> Version:
        """Return the version of an optimizer's parameters."""
        return int(self._of(number)["version"])

    def version_at(self, number: int, shard: int, settings: JobSettings) -> Version:
        """Return the version with which a shard begins: its own, where there are as many servers as before."""
        versions: Sequence[Version] = self._of(number)["versions"]
        return versions[shard] if self._alike(settings) else self.version(number)

    def _alike(self, settings: JobSettings) -> bool:
        manifest = self.checkpoint.manifest
        return (manifest["workers"], manifest["servers"]) == (settings.workers, settings.servers)

    def beginning(self, number: int, policy: Policy, settings: JobSettings) -> Beginning:
        """Return where an optimizer's coordinator begins: with the ledger of the job before, if it has as many workers and servers."""
        saved, ledger = self._of(number), None
        path = self.checkpoint.path / f"coordinator-{number}.state"
        if self._alike(settings) and path.name in self.checkpoint.manifest["files"]:
            try:
                ledger = kept_from(coordinator_from(path.read_bytes()), saved["now"])
            except (OSError, ProtocolError) as error:
                log.warning(
                    "the rule's state begins anew, since that of the checkpoint cannot be read, or is of another release: %s", error
                )
        # A checkpoint of an older release has no steps: the scripts count from 0.
        progress = Progress(map(tuple, saved["steps"])) if "steps" in saved and self._alike(settings) else None
        return Beginning(saved["version"], dict(saved["places"]), ledger, progress, saved["now"] if ledger is not None else 0.0)

    def copy_for(self, number: int, layout: Layout, span: Span, spec: OptimizerSpec) -> ShardCopy:
        """Return what the shard of this span holds.

        Raises:
            ConfigurationError: the optimizer's state is that of another optimizer.
        """
        parameters = self._parameters(number, layout, span)
        state = self._load(named("optimizer", number))
        headers, pieces = split_state_dict(layout, spec, state, None, [span])[0]
        return ShardCopy(span, parameters, headers, b"".join(pieces))

    def replica(self, number: int, layout: Layout) -> Message:
        """Return what the ranks of a job without servers begin with, in the form of a rank's initial parameters."""
        parameters = self._parameters(number, layout, Span(0, layout.nbytes))
        state = self._load(named("optimizer", number))
        plain, payload = pack(
            {
                "parameters": torch.frombuffer(parameters, dtype=torch.uint8),
                "state": [state["state"].get(tensor.slot, {}) for tensor in layout.tensors],
                "groups": state.get(REPLICA, []),
                "settings": {},  # of ranks that have made more steps than those of this job
            },
            "the checkpoint",
        )
        return Message({"replica": plain, "from": 0}, memoryview(b"".join(payload)), ())

    def _parameters(self, number: int, layout: Layout, span: Span) -> bytearray:
        """Return the parameters of an optimizer that lie in a span of the layout."""
        parameters, model = bytearray(span.nbytes), self._load(named("model", number))
        by_name = {name: model[key] for name, key in self._of(number)["keys"].items()}
        write_parameters(layout, span, {**model, **by_name}, memoryview(parameters))
        return parameters

    def part_of(self, worker: WorkerId, number: int) -> dict[str, Any] | None:
        """Return the part with which a worker resumes; None: there are no parts.

        A worker that is not in the checkpoint gets the part of the first that is, without random generators.
        """
        if self._workers is None:
            self._workers = self._load(WORKERS)
        if worker in self._workers and number in self._workers[worker]:
            part: dict[str, Any] = self._workers[worker][number]
            return part
        others = [parts[number] for _, parts in sorted(self._workers.items()) if number in parts]
        return {key: value for key, value in others[0].items() if key != "random"} if others else None

    def _of(self, number: int) -> Mapping[str, Any]:
        of: Mapping[str, Any] = self.checkpoint.manifest["optimizers"][number]
        return of

    def _load(self, name: str) -> Any:
        """Read one of the files that the manifest lists, whose bytes the command line has compared with their digests."""
        if name not in self.checkpoint.manifest["files"]:
            raise ConfigurationError(f"--resume {self.checkpoint.path}: it has no {name}; resume from another checkpoint")
        try:
            return torch.load(self.checkpoint.path / name, weights_only=True, map_location="cpu", mmap=True)
        except Exception as error:  # whatever PyTorch raises about a file that is none of its own
            first = why(error).splitlines()[0]
            raise ConfigurationError(
                f"--resume {self.checkpoint.path}: {name} cannot be read ({first}); it has changed since the job began, or it is not the "
                "same, shared folder on all machines"
            ) from None
