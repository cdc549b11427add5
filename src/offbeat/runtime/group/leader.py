"""Run around each call of the session in a group's leader, so that the followers take part."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offbeat.core.phases import Phase, Spent
from offbeat.errors import ConfigurationError
from offbeat.runtime.group import values
from offbeat.runtime.group.channel import leader
from offbeat.runtime.group.shadow import Shadow
from offbeat.runtime.worker.job_session import JobSession
from offbeat.runtime.worker.phase_watch import Account
from offbeat.session import Barrier, LeasedRange, Place, orders
from offbeat.transport.base import SharedMemory
from offbeat.transport.shm import MemoryBlock

SHARED_CALLS = {name: name for name in ("step", "take", "pull", "barrier", "state_dict", "load_state_dict")} | dict.fromkeys(
    ("snapshot", "hand_in"), "save"
)
"""Methods of a session that all processes call, with the call's name. In a save, the chief's worker calls snapshot, the others hand_in."""


def shadow_of(place: Place, model: nn.Module, optimizer: torch.optim.Optimizer) -> Shadow:
    """Agree with the followers on the pieces of the model, and return the shadow, for which a session can be made.

    Raises:
        JobError: the processes have different models.
    """
    channel, parameters = leader(place), values.trained(model, optimizer)
    theirs = [values.from_wire(request["pieces"]) for request in channel.gather("DistributedOptimizer")]
    pieces = values.joined([values.own_pieces(0, parameters), *theirs])
    return Shadow(model, optimizer, parameters, pieces)


class Leading:
    """Let the followers take part in each call of the leader's session, by code before and after the call.

    Args:
        place: this process's place in the worker.
        shadow: the model on which the session works.
        session: the session, which has not joined yet. `Leading` writes all parameters to its memory.
    """

    def __init__(self, place: Place, shadow: Shadow, session: JobSession) -> None:
        self._channel, self._shadow, self._session = leader(place), shadow, session
        self._told = 0
        """Number of the session's reports that the followers have received."""
        self._version = -1
        orders.shared = False
        gradients, self._values = session.memory
        self._channel.answer({"pieces": shadow.pieces}, _mapped(gradients), _mapped(self._values))
        shadow.enter(session.flat, gradients.view, self._values.view)
        shadow.watch(session.watch)
        shadow.begin_with([request["state"] for request in self._channel.gather("DistributedOptimizer")])

    def joined(self) -> None:
        """Answer the followers' first call with the session's state after it has joined."""
        self._answer(None, loads=True)

    def before(self, call: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Wait until all followers make this call. Returns the arguments of the worker's call.

        Raises:
            JobError: a follower makes another call, or has ended.
            ConfigurationError: the call is impossible with sharded parameters.
        """
        if call not in SHARED_CALLS:
            return arguments
        with self._session.phases.within(Phase.WAIT):
            requests = self._channel.gather(SHARED_CALLS[call])
        if self._shadow.sharded and call in ("snapshot", "hand_in"):
            raise ConfigurationError(
                "save() of a worker with sharded parameters (FSDP2), of which no process has all: save the state_dict() of the model and "
                "of the optimizer with torch.distributed.checkpoint"
            )
        if call == "load_state_dict":
            self._shadow.own.give()
            return (self._shadow.to_load(arguments[0], [request["state"] for request in requests]),)
        elif call == "step":
            self._shadow.give_gradients({number for request in requests for number in request["nonfinite"]})
            self._session.other_accounts = [_account(request) for request in requests]
            counts = [arguments[0], *(request["samples"] for request in requests)]
            return (None if None in counts else sum(counts),)
        return arguments

    def after(self, call: str, result: Any) -> Any:
        """Send the call's result to the followers. Returns the result for the leader's script."""
        if call not in SHARED_CALLS:
            return result
        session = self._session
        if call == "load_state_dict":
            self._shadow.loaded()
        grant = result if isinstance(result, LeasedRange) else None
        met = result if isinstance(result, Barrier) else None
        with session.phases.within(Phase.PULL):
            self._answer(grant, met, loads=call != "take" or grant is None or session.version != self._version or not session.consumed)
        if call == "state_dict":
            self._channel.hand_out(lambda rank: self._shadow.entries(rank, result))
            return self._shadow.script_state(result)
        return result

    def _answer(self, grant: LeasedRange | None, met: Barrier | None = None, *, loads: bool) -> None:
        session, memory = self._session, self._session.memory[1]
        moved, self._values = memory is not self._values, memory
        if moved:
            self._shadow.own.read_from(memory.view)
        if loads:
            self._shadow.own.take()
            self._version = session.version
        order = orders.given  # read once: a signal may come in between, and all processes have to see it after the same call
        orders.shared = order is not None
        news, self._told = session.reports_since(self._told), session.reported
        self._channel.answer(
            {
                "moved": moved,
                "grant": list(grant) if grant is not None else None,
                "loads": loads,
                "barrier": list(met) if met is not None else None,
                "before": session.before,
                "restarted": session.restarted,
                "over": session.over,
                "ended": session.ended,
                "version": session.version,
                "batch": session.batch,
                "overlap": session.overlap,
                "resumes": session.resumes,
                "reports": news,
                "order": list(order) if order is not None else None,
                "held": [[held.pool, held.lease] for held in session.outstanding],
            },
            *([_mapped(memory)] if moved else []),
        )

    def failed(self, call: str, error: BaseException) -> None:
        """Answer the followers that the call has raised an error."""
        if call in SHARED_CALLS and isinstance(error, Exception):
            self._channel.answer({"error": f"{type(error).__name__}: {error}"})


def _account(request: dict[str, Any]) -> Account:
    spent, host = request.get("account", (None, None))
    return None if spent is None else Spent(*spent), host


def _mapped(block: SharedMemory) -> MemoryBlock:
    assert isinstance(block, MemoryBlock), f"{block} of a worker of several processes is memory of its leader only"
    return block
