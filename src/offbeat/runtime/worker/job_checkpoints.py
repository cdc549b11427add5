"""Hand in one worker's part of the job's checkpoints, and resume the worker from such a part; the script calls nothing for either.

A part is the state of the process at the moment when the script begins its next batch: random generators, buffers, untrained parameters
that the script has changed (an average of the weights), schedulers, the settings of the optimizer's groups and, where workers step by
themselves, the optimizer's state. Where a sampler of the job deals out the batches, the script's request for a batch marks that moment.
Otherwise the part has the random generators and buffers as they were after the last step, and the settings and schedulers as they are when
the next step begins. A resumed script gets the state of its part at the same moment: when its first batch is dealt out, or else when its
first step begins. The state overwrites what the script has done before, such as seeding. A part also has the settings that the script had
at its own first batch. If a resumed script has others there, a line on stderr names the settings in use.

A worker that writes the file of `offbeat.save` fetches the parts that other workers have handed in by that call: `parts_of_others`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from offbeat.errors import warn
from offbeat.runtime.job.loading import frozen
from offbeat.runtime.job.packing import pack, unpack
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
from offbeat.tensors.optimizers import load_settings
from offbeat.transport.base import Message
from offbeat.types import FIRST_WORKER, Seconds, Version, WorkerId

PARTS_S: Final[Seconds] = 5.0
"""Longest wait for the parts of other workers, in seconds."""
LOOK_S: Final[Seconds] = 0.005
"""The interval between two requests, in seconds."""


class JobCheckpoints:
    """Hand in this worker's parts of checkpoints, and set the state of the part with which it resumes.

    Args:
        link: the worker's connections.
        layout, model, optimizer: the parameters' layout, the model and the optimizer of this session.
        own_state: returns True if this worker's optimizer has a state of its own, so that the part includes it.
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
        """Objects that a scheduler may hold as its optimizer: the wrapped optimizer, and each wrapper that the script uses."""
        self.random = True
        """False: another optimizer's part has the random generators of this process."""
        self.asking = False
        """True while the script waits for a batch, or for an epoch's end, and has no step under way."""
        self._described = False
        """True once this worker has sent the model's untrained parameters, as they were at the script's first batch."""
        self._untrained: int | None = None
        """Their checksum then. Few scripts change them: one that keeps an average of the weights in the model, say."""
        self._wanted: Mapping[str, Any] | None = None
        """Newest request to which this worker has not sent a final part; None: no request is open."""
        self._held: dict[str, Any] | None = None
        """The part as of the end of the last step; None: no request was open then."""
        self._resumes: dict[str, Any] | None = None
        """The part from which this worker resumes, until `_restore` has set its state."""
        self._script: dict[str, Any] | None = None
        """The settings that the script had at its first batch; in a resumed job, those of the first job's script."""

    def begin(self) -> None:
        """Prepare for checkpoints, if the job makes any. Called after the job's welcome."""
        if self._link.checkpoints:
            watch_schedulers()

    def wanted(self, request: Mapping[str, Any], *, over: bool = False) -> None:
        """Note a request for this worker's part, and hand in a provisional part at once if the script is waiting for the job.

        Args:
            request: ``version`` of the checkpoint; whether the part is to have the ``random`` generators, what the job does not know of
                the model (``rest``), and its ``frozen`` parameters.
            over: True: the training is over, the script does not call this session any more, and the part is final.
        """
        self._wanted, self._held, self.random = request, None, request["random"]
        if self.asking or over:
            self._hand_in(self._part(), final=over)

    def resume(self, message: Message) -> None:
        """Note the part from which this worker resumes, and load its buffers at once: the script may evaluate at any time."""
        self._resumes = part = unpack(message.header["part"], message.payload)
        load_buffers([self.model], part["buffers"])

    # Where the script is.

    def stepped(self) -> None:
        """Note that the script has made a step and has the parameters that followed."""
        if self._wanted is not None:
            self._held = self._part()

    def dealt(self) -> None:
        """Note that the script gets a batch."""
        self._restore()
        if self._wanted is not None:
            self._hand_in(self._part(), final=True)

    def passed(self) -> None:
        """Note that the script gets no more batches in this epoch, and hand in a provisional part: the next request may be far off."""
        if self._wanted is not None:
            self._hand_in(self._part(), final=False)

    def stepping(self) -> None:
        """Note that the script begins a step."""
        self._restore()
        if self._held is not None:
            self._hand_in({**self._held, **self._settings()}, final=True)

    def leaving(self, *, chief: bool) -> None:
        """Hand in this worker's part of the checkpoint at the job's end, and of one at the last version, after which no step has come.

        Args:
            chief: True: this worker adds the description of the model.
        """
        if not self._link.checkpoints:
            return
        if self._wanted is not None:
            self._hand_in({**(self._held or self._part()), **self._settings()}, final=True)
        part = self._part()
        if chief:
            part["model"] = self._rest(frozen=not self._described)
        self._send(part, "this worker's part of the last checkpoint", version=0, final=True, leaves=True)

    def with_settings(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's ``state_dict`` with the group settings of the part to resume from, until `_restore` has set them."""
        if self._resumes is None:
            return state
        groups = zip(state["param_groups"], self._resumes["groups"], strict=False)
        return {**state, "param_groups": [{**group, **saved, "params": group["params"]} for group, saved in groups]}

    # The part.

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"buffers": buffers_of([self.model]), **self._settings(), "script": self._script or self._settings()}
        if self._untrained is not None and self._checksum() != self._untrained:
            held = self._trained()
            untrained = ((name, one.detach()) for name, one in self.model.named_parameters() if id(one) not in held and is_plain(one))
            part["buffers"][0].update((name, value.clone()) for name, value in untrained)
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
        wanted = self._wanted
        if wanted["rest"]:
            part = {**part, "model": self._rest(frozen=wanted["frozen"])}
            self._described = self._described or wanted["frozen"]
        self._send(part, "this worker's part of a checkpoint", version=wanted["version"], final=final)
        if final:
            self._wanted = self._held = None

    def _send(self, part: Mapping[str, Any], what: str, **about: Any) -> None:
        plain, payload = pack(part, what)
        self._link.coordinator.send({"kind": "checkpoint_part", **about, "part": plain}, payload=payload)

    def _rest(self, *, frozen: bool) -> dict[str, Any]:
        """Return the model's untrained ``state_dict`` entries (``rest``), and the layout's name for each entry that is trained (``names``).

        Args:
            frozen: True: ``rest`` includes parameters that are not trained; it does so too where the script has changed them.
        """
        held = self._trained()
        frozen = frozen or self._checksum() != self._untrained
        names, rest, left_out = {}, {}, []
        for key, value in self.model.state_dict(keep_vars=True).items():
            if id(value) in held:
                names[key] = held[id(value)]
            elif not is_plain(value):
                left_out.append(f"{key} ({type(value).__name__})")
            elif frozen or not isinstance(value, nn.Parameter):
                rest[key] = value
        if frozen and left_out:
            more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
            warn(f"checkpoints lack {', '.join(left_out[:3])}{more}, which are no plain tensors: a script that resumes makes them anew")
        return {"names": names, "rest": rest}

    def _checksum(self) -> int | None:
        trained = self._trained()
        return frozen(self.model, (one for one in self.model.parameters() if id(one) in trained))

    def _trained(self) -> dict[int, str]:
        """Return the layout's name for each parameter that is trained, by its `id`."""
        trained = {tensor.name for tensor in self._layout.tensors}
        return {id(parameter): name for name, parameter in self.model.named_parameters() if name in trained}

    def _restore(self) -> None:
        """Set the state of the part from which this worker resumes, the first time that it is called."""
        part, self._resumes = self._resumes, None
        if self._script is None:
            self._script = self._settings()
            self._untrained = self._checksum() if self._link.checkpoints else None
        if part is None:
            return
        self._compare(part)
        if "random" in part:
            set_random_state(part["random"])
        load_buffers([self.model], part["buffers"])
        load_settings(self._optimizer, part["groups"], strict=False)
        load_schedulers(schedulers_of(self.optimizers), part["schedulers"])
        if "state" in part and self._own_state():
            groups = self._optimizer.state_dict()["param_groups"]
            self._optimizer.load_state_dict({"state": part["state"], "param_groups": groups})

    def _compare(self, part: Mapping[str, Any]) -> None:
        """Print which settings are in use where the script's differ from those of the earlier job's script."""
        now, before = self._script, part.get("script")
        if now is None or before is None:
            return
        self._script = before  # the settings in use derive from these, so the next resumption has to compare with them
        if self._link.worker == FIRST_WORKER and (lines := differences(now, before, part)):
            print(f"offbeat: resumed with the settings of the checkpoint, and not with the script's: {'; '.join(lines)}", file=sys.stderr)


def parts_of_others(link: WorkerConnection, version: Version, nth: int) -> dict[WorkerId, dict[str, Any]]:
    """Return the parts of this checkpoint that other workers have handed in, by worker.

    Under lockstep rules, workers that may still reach the same `offbeat.save` are awaited, for `PARTS_S`. A warning names the missing.

    Args:
        link: connections of the worker that writes.
        version, nth: the version of the checkpoint, and the number of earlier saves at that version.
    """
    until = time.monotonic() + PARTS_S
    while True:
        last = time.monotonic() > until
        link.coordinator.send({"kind": "parts", "version": version, "nth": nth, "last": last})
        answer = link.receive("parts")
        awaited = answer.header["awaited"]
        if not awaited or last:
            break
        time.sleep(LOOK_S)
    if awaited:
        workers = ", ".join(str(worker) for worker in awaited)
        warn(
            f"offbeat.save: worker {workers} has not called it within {PARTS_S:.0f} s, so the checkpoint lacks its random generators: "
            "call offbeat.save on every worker"
        )
    parts, at = {}, 0
    for worker, plain, nbytes in answer.header["parts"]:
        parts[worker] = unpack(plain, answer.payload[at : at + nbytes])
        at += nbytes
    return parts
