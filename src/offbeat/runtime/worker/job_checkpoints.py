"""A worker's part in the checkpoints of its job, and how it resumes from one: the script knows nothing of either.

What belongs to a part is the state of the process when the script begins its next batch: random generators, buffers, schedulers, the
settings of the optimizer's groups and, where workers step by themselves, the optimizer's state. That moment is known where the batch is
dealt out by the job: the script asks for it. Otherwise the part has the random generators and buffers as they were after the last step, and
the schedulers as they are when the next step begins. A resumed script has a part's state set at the same place: when its first batch is
dealt out, or else when its first step begins. What the script has done before, such as passes over epochs that were over, or seeding, is
overwritten. A part also has the settings with which the script came to that place: a resumed script that comes with others is told which
are used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offbeat.runtime.job.packing import Packer, unpack
from offbeat.runtime.worker.changed_settings import differences
from offbeat.runtime.worker.connection import WorkerConnection
from offbeat.runtime.worker.process_state import (
    buffers_of,
    is_plain,
    load_buffers,
    load_schedulers,
    random_state,
    scheduler_states,
    schedulers_of,
    set_random_state,
    watch_schedulers,
)
from offbeat.tensors.layout import Layout
from offbeat.transport.base import Message
from offbeat.types import FIRST_WORKER


class JobCheckpoints:
    """Hand in this worker's parts of checkpoints, and set the state of the part with which it resumes.

    Args:
        link: the worker's connections.
        layout, model, optimizer: what is trained.
        own_state: returns True if the optimizer's state is this worker's own.
    """

    def __init__(
        self,
        link: WorkerConnection,
        layout: Layout,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        own_state: Callable[[], bool],
    ) -> None:
        self._link, self._layout, self.model, self._optimizer = link, layout, model, optimizer
        self._own_state = own_state
        self.optimizers: list[torch.optim.Optimizer] = [optimizer]
        """The objects that a scheduler may have as its optimizer."""
        self.random = True
        """False: the random generators belong to the part of another optimizer of this process."""
        self.asking = False
        """True while the script waits for a batch, or for an epoch's end, and has no step under way."""
        self._described = False
        """True once this worker has sent the parameters that are not trained."""
        self._wanted: Message | None = None
        """The newest request for a part that has not been answered for good."""
        self._held: dict[str, Any] | None = None
        """The part as it was after the last step."""
        self._resumes: dict[str, Any] | None = None
        """The part whose state the script has not got yet."""
        self._script: dict[str, Any] | None = None
        """The settings with which the script came to its first batch; of a resumed one, with which that of the job before did."""

    def begin(self) -> None:
        """Prepare for checkpoints once the job has welcomed this worker, if there will be some."""
        if self._link.checkpoints:
            watch_schedulers()

    def wanted(self, message: Message) -> None:
        """Note that the job makes a checkpoint."""
        self._wanted, self._held = message, None
        if self.asking:
            self._hand_in(self._part(), final=False)

    def resume(self, message: Message) -> None:
        """Note the part that this worker's script resumes from. The model has its buffers at once: the script may evaluate at any time."""
        self._resumes = part = unpack(message.header["part"], message.payload)
        load_buffers([self.model], part["buffers"])

    # Where the script is.

    def stepped(self) -> None:
        """Note that the script has made a step and goes on with the version that came of it."""
        if self._wanted is not None:
            self._held = self._part()

    def dealt(self) -> None:
        """Note that the script gets a batch."""
        self._restore()
        if self._wanted is not None:
            self._hand_in(self._part(), final=True)

    def passed(self) -> None:
        """Note that the script gets no batch more in this epoch. Much may happen before it asks for the next one."""
        if self._wanted is not None:
            self._hand_in(self._part(), final=False)

    def stepping(self) -> None:
        """Note that the script begins a step."""
        self._restore()
        if self._held is not None:
            self._hand_in({**self._held, **self._settings()}, final=True)

    def leaving(self, *, chief: bool) -> None:
        """Hand in this worker's part for the checkpoint of the job's end: the worker leaves.

        Args:
            chief: True for the worker that describes the model.
        """
        if not self._link.checkpoints:
            return
        part = self._part()
        if chief:
            part["model"] = self._rest(frozen=not self._described)
        packer = Packer()
        plain = packer.pack(part, "this worker's part of the last checkpoint")
        header = {"kind": "checkpoint_part", "version": 0, "final": True, "leaves": True, "part": plain}
        self._link.coordinator.send(header, payload=packer.payload)

    def with_settings(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's ``state_dict`` with the settings of the part, as long as the script has not got them."""
        if self._resumes is None:
            return state
        groups = zip(state["param_groups"], self._resumes["groups"], strict=False)
        return {**state, "param_groups": [{**group, **saved, "params": group["params"]} for group, saved in groups]}

    # The part.

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"buffers": buffers_of([self.model]), **self._settings(), "script": self._script or self._settings()}
        if self.random:
            part["random"] = random_state()
        if self._own_state():
            part["state"] = self._optimizer.state_dict()["state"]
        return part

    def _settings(self) -> dict[str, Any]:
        groups = [{key: value for key, value in group.items() if is_plain(value)} for group in self._optimizer.state_dict()["param_groups"]]
        return {"groups": groups, "schedulers": scheduler_states(schedulers_of(self.optimizers))}

    def _hand_in(self, part: Mapping[str, Any], *, final: bool) -> None:
        assert self._wanted is not None
        wanted = self._wanted.header
        if wanted["rest"]:
            part = {**part, "model": self._rest(frozen=wanted["frozen"])}
            self._described = self._described or wanted["frozen"]
        packer = Packer()
        plain = packer.pack(part, "this worker's part of a checkpoint")
        header = {"kind": "checkpoint_part", "version": wanted["version"], "final": final, "part": plain}
        self._link.coordinator.send(header, payload=packer.payload)
        if final:
            self._wanted = self._held = None

    def _rest(self, *, frozen: bool) -> dict[str, Any]:
        """Return what the ``state_dict`` of the model has beside the parameters that the servers hold, and the names of those.

        Args:
            frozen: True: with parameters that are not trained; they do not change.
        """
        trained = {tensor.name for tensor in self._layout.tensors}
        held = {id(parameter): name for name, parameter in self.model.named_parameters() if name in trained}
        names, rest = {}, {}
        for key, value in self.model.state_dict(keep_vars=True).items():
            if id(value) in held:
                names[key] = held[id(value)]
            elif is_plain(value) and (frozen or not isinstance(value, nn.Parameter)):
                rest[key] = value
        return {"names": names, "rest": rest}

    def _restore(self) -> None:
        """Set the state of the part that this worker resumes from, once."""
        part, self._resumes = self._resumes, None
        if self._script is None:
            self._script = self._settings()
        if part is None:
            return
        self._compare(part)
        if "random" in part and self.random:
            set_random_state(part["random"])
        load_buffers([self.model], part["buffers"])
        self._load_groups(part["groups"])
        load_schedulers(schedulers_of(self.optimizers), part["schedulers"])
        if "state" in part and self._own_state():
            groups = self._optimizer.state_dict()["param_groups"]
            self._optimizer.load_state_dict({"state": part["state"], "param_groups": groups})

    def _compare(self, part: Mapping[str, Any]) -> None:
        """Say which settings are used where the script has others than that of the job before."""
        now, before = self._script, part.get("script")
        if now is None or before is None:
            return
        self._script = before  # what is used follows from these, after the next resumption, too
        if self._link.worker == FIRST_WORKER and (lines := differences(now, before, part)):
            print(f"offbeat: resumed with the settings of the checkpoint, and not with the script's: {'; '.join(lines)}", file=sys.stderr)

    def _load_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        for group, settings in zip(self._optimizer.param_groups, saved, strict=False):
            group.update({key: value for key, value in settings.items() if key != "params"})
