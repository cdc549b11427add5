"""The leader's side of calls that all processes of a worker make."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offbeat.errors import ConfigurationError
from offbeat.runtime.group import values
from offbeat.runtime.group.channel import leader
from offbeat.runtime.group.shadow import Shadow
from offbeat.session import LeasedRange, Place, Session
from offbeat.transport.shm import MemoryBlock

SHARED_CALLS = {name: name for name in ("step", "take", "pull", "state_dict", "load_state_dict")} | dict.fromkeys(
    ("snapshot", "hand_in"), "save"
)
"""The methods of a session that all processes call, and the call's name: to save, the chief makes a snapshot, and all others hand in."""


def shadow_of(place: Place, model: nn.Module, optimizer: torch.optim.Optimizer) -> Shadow:
    """Agree with the other processes on the pieces of the model, and return the shadow.

    Raises:
        JobError: the processes have different models.
        ConfigurationError: the optimizer has a state of sharded parameters.
    """
    channel, parameters = leader(place), values.trained(model, optimizer)
    theirs = [values.from_wire(request["pieces"]) for request in channel.gather("DistributedOptimizer")]
    pieces = values.joined([values.own_pieces(0, parameters), *theirs])
    channel.answer({"pieces": values.to_wire(pieces)})
    shards = [piece for piece in pieces if piece.rank != values.REPLICATED]
    blocks = [MemoryBlock.allocate(values.size_of(those), what) for those, what in ((pieces, "parameters"), (shards, "gradients"))]
    for block in blocks:
        channel.share(block)
    channel.gather("DistributedOptimizer")  # the shards are in memory now
    return Shadow(model, optimizer, parameters, pieces, *(block.view for block in blocks))


class Leading:
    """What the leader does before and after a call of its session, so that the other processes take part.

    Args:
        place: of this process.
        shadow: on which the session works.
        session: which has joined.
    """

    def __init__(self, place: Place, shadow: Shadow, session: Session) -> None:
        self._channel, self._shadow, self._session = leader(place), shadow, session
        self._told = 0
        """How many of the session's reports the other processes have."""
        self._version = -1
        self.after("DistributedOptimizer", None)

    def before(self, call: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Wait until all processes make this call. Returns the arguments of the worker's call.

        Raises:
            JobError: a process makes another call, or has ended.
            ConfigurationError: the call is not possible with sharded parameters.
        """
        if call not in SHARED_CALLS:
            return arguments
        requests = self._channel.gather(SHARED_CALLS[call])
        if self._shadow.sharded and call in ("snapshot", "hand_in", "state_dict", "load_state_dict"):
            raise ConfigurationError(
                f"{SHARED_CALLS[call]}() of a worker with sharded parameters (FSDP2): the state of the optimizer, which the servers have, "
                "cannot be saved or loaded by shards; save the parameters with torch.distributed.checkpoint"
            )
        if call == "load_state_dict":
            self._shadow.read()
        elif call == "step":
            self._shadow.accumulate(self._session.delivered)
            counts = [arguments[0], *(request["samples"] for request in requests)]
            return (None if None in counts else sum(counts),)
        return arguments

    def after(self, call: str, result: Any) -> None:
        """Hand the result to all processes."""
        if call not in SHARED_CALLS and call != "DistributedOptimizer":
            return
        session = self._session
        if call == "load_state_dict":
            self._shadow.loaded()
        loads = call != "take" or result is None or session.version != self._version or not session.consumed
        if loads:
            self._shadow.publish()
            self._version = session.version
        news, self._told = session.reports_since(self._told), session.reported
        self._channel.answer(
            {
                "grant": list(result) if isinstance(result, LeasedRange) else None,
                "loads": loads,
                "version": session.version,
                "batch": session.batch,
                "overlap": session.overlap,
                "resumes": session.resumes,
                "reports": news,
                "held": [[grant.pool, grant.lease] for grant in session.outstanding],
            }
        )

    def failed(self, call: str, error: BaseException) -> None:
        """Tell all processes that the call has raised an error."""
        if call in SHARED_CALLS and isinstance(error, Exception):
            self._channel.answer({"error": f"{type(error).__name__}: {error}"})
