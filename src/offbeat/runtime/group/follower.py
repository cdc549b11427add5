"""Provide the session of a group's followers, the processes of a worker other than its leader: each call waits for the leader's."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from offbeat.core.phases import UNMEASURED, Phase
from offbeat.runtime.group import messages, values
from offbeat.runtime.group.channel import follower
from offbeat.runtime.group.state import Entries, ScriptState
from offbeat.runtime.worker.phase_watch import PhaseWatch
from offbeat.session import Barrier, LeasedRange, Place, Preemption, Session, Snapshot, orders
from offbeat.tensors.optimizers import load_settings
from offbeat.types import Epoch, LeaseId, WorkerId


class FollowerSession(Session):
    """Take part in the job through the leader.

    Args:
        place: this process's place in the worker.
        model, optimizer: the script's, in this process.

    Raises:
        JobError: the processes have different models, or the leader could not join.
    """

    chief = False

    def __init__(self, place: Place, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.worker, self.workers = WorkerId(int(os.environ["OFFBEAT_WORKER"])), int(os.environ["OFFBEAT_WORKERS"])
        self.seed = int(os.environ.get("OFFBEAT_SEED", "0"))
        channel = follower(place)
        self._channel, self._optimizer = channel, optimizer
        parameters = values.trained(model, optimizer)
        channel.announce("DistributedOptimizer", {"pieces": values.own_pieces(channel.rank, parameters)})
        pieces = values.from_wire(channel.await_answer(messages.PIECES)["pieces"])
        gradients, parameters_in_memory = channel.receive_memory(), channel.receive_memory()
        self._own = values.Own(channel.rank, parameters, pieces, gradients.view, parameters_in_memory.view)
        self._own.give()
        self._state = ScriptState(optimizer, parameters)
        channel.announce("DistributedOptimizer", {}, self._state.entries(optimizer.state_dict()))
        optimizer.state.clear()
        self._watch = PhaseWatch.of_process() if os.environ.get("OFFBEAT_PHASES") else None
        self._phases = UNMEASURED if self._watch is None else self._watch.clock
        if self._watch is not None:
            self._watch.follow(model)
        self._note(channel.await_answer())

    def _call(self, name: str, entries: Entries | None = None, **sent: Any) -> dict[str, Any]:
        with self._phases.within(Phase.WAIT):
            self._channel.announce(name, sent, entries)
            answer = self._channel.await_answer()
        with self._phases.within(Phase.PULL):
            self._note(answer)
        return answer

    def _note(self, answer: dict[str, Any]) -> None:
        if answer["moved"]:
            self._own.read_from(self._channel.receive_memory().view)
        if answer["loads"]:
            self._own.take()
        self.version, self.batch, self.overlap = answer["version"], answer["batch"], answer["overlap"]
        self.resumes = answer["resumes"]
        self.before, self.restarted, self.over = answer["before"], answer["restarted"], answer["over"]
        self.ended = self.ended or answer["ended"]
        orders.given = None if answer["order"] is None else Preemption(*answer["order"])
        for report in answer["reports"]:
            self.note_report(report)
        held = {(pool, lease) for pool, lease in answer["held"]}
        self._outstanding = [grant for grant in self._outstanding if (grant.pool, grant.lease) in held]

    def step(self, samples: int | None) -> None:
        with self._phases.within(Phase.PUSH):
            finite = self._own.give_gradients()
        self.steps += 1
        account: dict[str, Any] = {} if self._watch is None else {"account": self._watch.take()}
        self._call("step", samples=samples, nonfinite=[number for number in finite if not finite[number]], **account)

    def take(self, pool: int, epoch: Epoch, size: int | None, batch: int) -> LeasedRange | None:
        found = self._call("take")["grant"]
        if found is None:
            return None
        of, lease, start, stop, parts, rows = found
        grant = LeasedRange(of, lease, start, stop, tuple((a, b) for a, b in parts), rows)
        self._outstanding.append(grant)
        return grant

    def pull(self) -> None:
        self._call("pull")

    def barrier(self) -> Barrier:
        number, version, workers, shared, past = self._call("barrier")["barrier"]
        return Barrier(number, version, tuple(workers), shared, past)

    def state_dict(self) -> dict[str, Any]:
        self._call("state_dict")
        return self._state.state_dict(self._channel.receive_state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._own.give()
        self._call("load_state_dict", self._state.entries(state))
        load_settings(self._optimizer, state["param_groups"])

    def snapshot(self) -> Snapshot:
        raise AssertionError("only the chief makes a snapshot")

    def hand_in(self, part: dict[str, Any]) -> None:
        """Block until the leader's save() returns. Followers add nothing to a checkpoint."""
        self._call("save")

    def place(self, pool: int) -> dict[str, Any] | None:
        """Return None: the leader has the place in the samples."""

    def _leave_out(self, leases: tuple[LeaseId, ...]) -> None:
        """Do nothing: the leader reports skipped leases."""

    def close(self) -> None:
        """Do nothing: the leader leaves the job."""
