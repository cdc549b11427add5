"""Hold a rank's replica and its place among the other ranks, whatever they exchange.

`RankSession` (``worker_side.py``) tells the coordinator about it. Gradients are summed in ``runtime/allreduce/round_member.py``, parameters
mixed in ``runtime/gossip/member.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.errors import ProtocolError
from offbeat.runtime.ranks.replica import Replica
from offbeat.transport.base import Buffer, SharedMemory
from offbeat.types import Seconds, Version, WorkerId

LOOK_S: Seconds = 0.05
"""How often a rank that waits for others reads messages of the coordinator, in seconds."""


class RankMember(ABC):
    """Take part in a job as one rank. Every method raises `Fenced` if the rank does not take part any more.

    Args:
        rank: this rank.
        replica: its model and optimizer.
        memory: the blocks that came with the welcome, where all ranks are on one host.
    """

    others_decide = False
    """True if other ranks may go on without this rank before the coordinator knows of it."""
    mixes_parameters = False
    """True if each rank has parameters of its own, which are mixed with those of neighbours: what a script writes is mixed, too. The
    coordinator does not know that a rank waits for neighbours unless the rank says so."""

    def __init__(self, rank: WorkerId, replica: Replica, memory: Sequence[SharedMemory] = ()) -> None:
        self._rank, self._replica, self._memory = rank, replica, memory
        self.version: Version = 0
        """How many results the replica has; if parameters are mixed, how many steps all ranks had made at this rank's last one."""
        self._kept: tuple[Any, bytes] | None = None
        """The replica that this rank began with in a running job, until its first step."""
        self.attach()

    @abstractmethod
    def attach(self) -> None:
        """Attach as this rank, replacing any earlier process with the same number."""

    @property
    def contact(self) -> dict[str, Any]:
        """Return what other ranks need to know of this rank before it can take part."""
        return {}

    def meet(self, header: Mapping[str, Any]) -> None:  # noqa: B027 - on one host the shared memory has it
        """Read from ``header`` what this rank has to know of the other ranks before it begins."""

    def come_to(self, header: Mapping[str, Any]) -> None:
        """Connect to the ranks of a running job before a replica comes. Needed only if ranks are on different hosts."""
        raise ProtocolError("server 0 sent 'meet', and this job's ranks do not connect to each other (expected 'parameters')")

    def begin(self, given: tuple[Any, memoryview, Version] | None, goal: Version, *, first: bool) -> None:
        """Take part, with the replica of another rank if there is one.

        Args:
            given: the other rank's replica and version; None: this rank has its own.
            goal: take at least the results up to this version.
            first: True if the job begins with this rank. Its script may load a state, so no result changes the replica before `start`.
        """
        if given is not None:
            plain, payload, self.version = given
            self._replica.take(plain, payload)
        self._enter()
        if first:
            return
        self.start()
        self.catch_up(goal)
        if given is not None:
            plain, mine = self._replica.give()
            self._kept = plain, b"".join(mine)
            self._replica.flat.remember()

    @abstractmethod
    def _enter(self) -> None:
        """Make the model write its gradients into the send buffer."""

    def start(self) -> None:  # noqa: B027 - gradients are of no use to others before the first step
        """Let other ranks read the replica; called before the first step, and again after a state was loaded."""

    @abstractmethod
    def resume(self) -> None:
        """Let other ranks wait for this rank, which computes again."""

    @abstractmethod
    def contribute(self, usable: bool, samples: int) -> None:
        """Make a step with the gradient, or without one if it is not usable; wait for other ranks as far as the rule says.

        ``samples``: of the gradient; 0: not known, or the gradient is a sum, so that it has no weight by them.
        """

    @abstractmethod
    def catch_up(self, goal: Version = 0, *, exactly: bool = False) -> None:
        """Take available results without a step, and wait for those up to version ``goal``.

        ``exactly``: take none after these: other ranks that have them begin with the same version.
        """

    def pull(self) -> None:
        """Take all results that exist by now, on whatever host they are."""
        self.catch_up()

    def part(self) -> None:  # noqa: B027 - gradients in shared memory stay there
        """Wait until the other ranks can do without this rank, which is about to leave."""

    def restore(self, *, again: bool = False) -> None:
        """Undo writes of the script into the replica that this rank has just received: an old checkpoint that the script loaded, for
        example.

        ``again``: True if the script may load more after this call.
        """
        kept = self._kept
        if not again:
            self._kept = None
        if kept is not None and (self._replica.flat.touched() or self._replica.flat.changed(exact=True)):
            self._replica.take(kept[0], memoryview(kept[1]))
            self._replica.flat.remember()

    def give_to(self, rank: WorkerId | None, ticket: Sequence[int]) -> tuple[Any, list[Buffer]]:
        """Return the replica, as plain data and bytes, and admit the rank that is to have it.

        Args:
            rank: it takes part from now on if its current process has this ticket; None: no rank is admitted, and the replica is kept for
                later.

        Raises:
            OffbeatError: the replica cannot be given.
        """
        given = self._replica.give()
        if rank is not None:
            self._admit(rank, ticket)
        return given

    @abstractmethod
    def _admit(self, rank: WorkerId, ticket: Sequence[int]) -> None:
        """Admit another rank, which will have this rank's replica. No round waits for it while it reads that."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory. Called once, and last."""
