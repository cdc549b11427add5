"""The memory that ranks of one host share for gossip: the state of `core.gossip.push_sum.Gossip`, and some vectors of parameters of each
rank.

The state is there twice. A change is made under the lock, written into the older copy, and counts once the number of changes has been
raised, so that a process which dies in between has changed nothing. What happens is in a log, in the order in which it was decided, for
the coordinator to follow. A vector belongs to its rank, which writes it outside the lock;
it has a stamp, the step as of which it is, that is out of the way while it is being written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.core.gossip.push_sum import Gossip, GossipRule
from offbeat.core.rank_log import Entry, EntryKind
from offbeat.errors import ConfigurationError, JobError, ProtocolError
from offbeat.policies import rule as rule_of
from offbeat.transport.base import SharedMemory
from offbeat.transport.futex import WORD_NBYTES, Futex, RobustLock
from offbeat.types import Clock, WorkerId

T = TypeVar("T")

MAGIC, FORMAT = 0x6F666662676F7373, 1
DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
LONGEST_SPELLING = 1024
AHEAD = 3
"""How many of its messages a rank keeps, beyond those that are to be read later anyway: so far can it get ahead of who reads them."""
LOG_ENTRIES, LOG_WIDTH = 1 << 14, 8
FOLLOWER_TIMEOUT_S = 60.0
"""How long the ranks wait for a follower that does not keep up with the log."""
_HEADER = 10
_BEING_WRITTEN = -1.0


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Where everything is. All of it follows from these numbers, which the header holds."""

    ranks: int
    numel: int
    """Parameters of a model."""
    dtype_index: int
    slots: int
    """Vectors of each rank."""
    messages: int
    """Room for so many that nobody has read yet."""
    seed: int
    followed: int = 0
    """1: somebody reads the log, and nothing may be overwritten that he has not read."""

    @classmethod
    def of(cls, rule: GossipRule, ranks: int, numel: int, dtype: torch.dtype, seed: int, *, followed: bool = False) -> MemoryPlan:
        """For a new block.

        Raises:
            ConfigurationError: parameters of this type are not mixed here, or the rule takes too long to spell.
        """
        if dtype not in DTYPES:
            raise ConfigurationError(f"parameters of {dtype} cannot be mixed in shared memory; use one of {', '.join(map(str, DTYPES))}")
        if len(rule.spelling.encode()) > LONGEST_SPELLING:
            raise ConfigurationError(f"the rule {rule.spelling[:40]}... takes more than {LONGEST_SPELLING} bytes to spell")
        slots = {"push": rule.delay_steps + AHEAD, "average": 3, "pair": 1}[rule.exchange]
        messages = ranks * slots * min(rule.edges.degree, ranks) if rule.exchange == "push" else 0
        kind = DTYPES.index(dtype)
        return cls(ranks=ranks, numel=numel, dtype_index=kind, slots=slots, messages=messages, seed=seed, followed=int(followed))

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_index]

    @property
    def padded(self) -> int:
        """Elements from one vector to the next: two must not share a cache line."""
        line = WORD_NBYTES // self.dtype.itemsize
        return -(-self.numel // line) * line

    @property
    def state_words(self) -> int:
        """What `Gossip.words` may come to, how many of them there are, each rank's incarnation, the end of the log, and the number of steps
        in it."""
        return 3 + self.ranks + 5 + 9 * self.ranks + 4 * self.messages

    def offsets(self) -> dict[str, tuple[int, int]]:
        """Where each part begins, and its length in bytes."""
        sizes = {
            "header": 8 * _HEADER,
            "rule": LONGEST_SPELLING,
            "commits": WORD_NBYTES,
            "read": WORD_NBYTES,
            "events": WORD_NBYTES,
            "lock": WORD_NBYTES,
            "vector_locks": WORD_NBYTES * self.ranks,
            "states": 2 * 8 * self.state_words,
            "log": 8 * LOG_WIDTH * LOG_ENTRIES,
            "stamps": 8 * self.ranks * self.slots,
            "vectors": self.dtype.itemsize * self.padded * self.ranks * self.slots,
        }
        found, at = {}, 0
        for name, nbytes in sizes.items():
            found[name] = at, nbytes
            at = -(-(at + nbytes) // WORD_NBYTES) * WORD_NBYTES
        return found

    @property
    def nbytes(self) -> int:
        start, nbytes = self.offsets()["vectors"]
        return start + nbytes

    def numbers(self) -> tuple[int, ...]:
        return self.ranks, self.numel, self.dtype_index, self.slots, self.messages, self.seed, self.followed


class GossipMemory:
    """One process's view of the block.

    Args:
        block: must outlive this.
        rule, plan: of a new block, which is made; None: it has been made by somebody else.

    Raises:
        ProtocolError: it is no such block.
    """

    def __init__(self, block: SharedMemory, rule: GossipRule | None = None, plan: MemoryPlan | None = None) -> None:
        fresh = plan is not None
        if plan is None or rule is None:
            rule, plan = _read(block.view)
        self.rule, self.plan = rule, plan
        at = plan.offsets()
        piece = {name: block.view[start : start + nbytes] for name, (start, nbytes) in at.items()}
        self.events = Futex(piece["events"])
        self._lock = RobustLock(piece["lock"], fresh=fresh)
        starts = range(0, WORD_NBYTES * plan.ranks, WORD_NBYTES)
        self.vector_locks = [RobustLock(piece["vector_locks"][i : i + WORD_NBYTES], fresh=fresh) for i in starts]
        self._commits = np.frombuffer(piece["commits"], np.int64, 1)
        self._followed = np.frombuffer(piece["read"], np.int64, 1)
        self._log = np.frombuffer(piece["log"], np.int64).reshape(LOG_ENTRIES, LOG_WIDTH)
        self._notes: list[tuple[EntryKind, WorkerId]] = []
        self._seq = 0
        self.steps = 0
        """How many steps all ranks have made, as of the last look."""
        self._states = np.frombuffer(piece["states"], np.float64).reshape(2, plan.state_words)
        self._stamps = np.frombuffer(piece["stamps"], np.float64).reshape(plan.ranks, plan.slots)
        numpy_dtype = np.dtype(f"f{plan.dtype.itemsize}")
        self._vectors: NDArray[np.float32 | np.float64] = np.frombuffer(piece["vectors"], numpy_dtype).reshape(
            plan.ranks, plan.slots, plan.padded
        )
        self._gossip = Gossip(rule, plan.seed)
        if fresh:
            self._stamps[:] = _BEING_WRITTEN
            self._write(self._states[0], self._gossip.words(), [0.0] * plan.ranks)
            _write_header(block.view, rule, plan)

    def change(self, what: Callable[[Gossip, list[float]], T], *, tell: bool = True) -> T:
        """Change the state, given it and the incarnations of the ranks; if ``what`` raises, nothing has changed.

        Args:
            tell: wake those who wait for something.
        """
        self._lock.acquire()
        try:
            commits = int(self._commits[0])
            incarnations = self._load(commits & 1)
            self._notes.clear()
            result = what(self._gossip, incarnations)
            self._write_log()
            self._write(self._states[~commits & 1], self._gossip.words(), incarnations)
            self._commits[0] = commits + 1
            if tell:
                self.events.change()
        finally:
            self._lock.release()
        if tell:
            self.events.wake()
        return result

    def note(self, kind: EntryKind, rank: WorkerId) -> None:
        """To be called by what makes a change: this is what happens, for the log."""
        self._notes.append((kind, rank))

    def _write_log(self) -> None:
        for kind, rank in self._notes:
            steps = self._gossip.steps(rank) if rank in self._gossip.present else 0
            self._log[self._seq % LOG_ENTRIES] = (self._seq, kind, rank, steps, -1, 0, 0, time.monotonic_ns())
            self._seq += 1
            self.steps += kind is EntryKind.ARRIVE

    def follow(self, start: int) -> list[Entry]:
        """The entries of the log from there on; those before are no more needed. A rank's step is an arrival; its version is the number of
        its steps after that."""
        self._followed[0] = start
        return self.look(lambda _, __: [self._entry(seq) for seq in range(start, self._seq)])

    def _entry(self, seq: int) -> Entry:
        at, kind, rank, steps, _, number, _, at_ns = self._log[seq % LOG_ENTRIES].tolist()
        assert at == seq, f"entry {seq} of the log is overwritten by {at}"
        return Entry(seq, EntryKind(kind), rank, steps, None, number, False, at_ns)

    def make_room(self) -> None:
        """Wait until the log has room for what the ranks may do next.

        Raises:
            JobError: its follower has read nothing for `FOLLOWER_TIMEOUT_S`.
        """
        before, began = int(self._followed[0]), time.monotonic()
        while self.plan.followed and self._seq - int(self._followed[0]) > LOG_ENTRIES - 8 * (self.plan.ranks + 16):
            time.sleep(0.0005)
            if int(self._followed[0]) != before:
                before, began = int(self._followed[0]), time.monotonic()
            if time.monotonic() - began > FOLLOWER_TIMEOUT_S:
                raise JobError(f"the coordinator has read nothing of the log of gossip for {FOLLOWER_TIMEOUT_S:g} s, and the log is full")

    def look(self, what: Callable[[Gossip, list[float]], T]) -> T:
        """Read the state as it is at one moment."""
        self._lock.acquire()
        try:
            return what(self._gossip, self._load(int(self._commits[0]) & 1))
        finally:
            self._lock.release()

    def vector(self, rank: WorkerId, slot: int) -> torch.Tensor:
        """A rank's vector, shape (numel,): a view."""
        return torch.from_numpy(self._vectors[rank, slot, : self.plan.numel])

    def write(self, rank: WorkerId, steps: Clock, parameters: torch.Tensor) -> None:
        """Put parameters as of a step into their slot."""
        slot = steps % self.plan.slots
        self._stamps[rank, slot] = _BEING_WRITTEN
        self.vector(rank, slot).copy_(parameters)
        self._stamps[rank, slot] = steps

    def holds(self, rank: WorkerId, steps: Clock) -> bool:
        """Whether a rank's parameters as of this step are in their slot. What was read from there counts if they still are afterwards."""
        return bool(self._stamps[rank, steps % self.plan.slots] == steps)

    def filled(self, rank: WorkerId) -> bool:
        """Whether a rank has put anything anywhere."""
        return bool((self._stamps[rank] != _BEING_WRITTEN).any())

    def forget(self, rank: WorkerId) -> None:
        """What is in a rank's slots is of another process."""
        self._stamps[rank] = _BEING_WRITTEN

    def _load(self, which: int) -> list[float]:
        words: list[float] = self._states[which].tolist()
        ranks, self._seq, self.steps = self.plan.ranks, int(words[1]), int(words[2])
        self._gossip.restore(words[3 + ranks : 3 + ranks + int(words[0])])
        return words[3 : 3 + ranks]

    def _write(self, state: NDArray[np.float64], words: list[float], incarnations: list[float]) -> None:
        assert len(words) + 3 + self.plan.ranks <= len(state), f"{len(words)} words, {len(state)} are planned for"
        state[: 3 + self.plan.ranks + len(words)] = [len(words), self._seq, self.steps, *incarnations, *words]


def _write_header(memory: memoryview, rule: GossipRule, plan: MemoryPlan) -> None:
    spelled = rule.spelling.encode()
    start, _ = plan.offsets()["rule"]
    memory[start : start + len(spelled)] = spelled
    header = np.frombuffer(memory, np.int64, _HEADER)
    header[1:9] = [FORMAT << 32 | len(spelled), *plan.numbers()]
    header[0] = MAGIC


def _read(memory: memoryview) -> tuple[GossipRule, MemoryPlan]:
    header = np.frombuffer(memory, np.int64, _HEADER).tolist() if len(memory) >= 8 * _HEADER else [0] * _HEADER
    if header[0] != MAGIC or header[1] >> 32 != FORMAT:
        raise ProtocolError(f"a block for gossip begins with {MAGIC}, format {FORMAT}; this one begins with {header[:2]}")
    ranks, numel, dtype_index, slots, messages, seed, followed = header[2 : 2 + 7]
    plan = MemoryPlan(ranks=ranks, numel=numel, dtype_index=dtype_index, slots=slots, messages=messages, seed=seed, followed=followed)
    if len(memory) < plan.nbytes:
        raise ProtocolError(f"the block for gossip has {len(memory)} bytes, its header speaks of {plan.nbytes}")
    start, _ = plan.offsets()["rule"]
    rule = rule_of(bytes(memory[start : start + (header[1] & 0xFFFFFFFF)]).decode())
    if not isinstance(rule, GossipRule):
        raise ProtocolError(f"{rule.spelling} is no rule of the gossip family")
    return rule, plan
