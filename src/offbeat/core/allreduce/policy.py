"""What a rule sees of a partial allreduce: the round's table, the view of it that is passed on, and what a rule is.

Who arrives, what is folded and who may read what is in ``core/allreduce/rounds.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.core.policy import Policy
from offbeat.core.settings import is_number, whole_number
from offbeat.errors import ConfigurationError
from offbeat.types import Version, WorkerId, worker_ids

Table: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]

LATE, ON_TIME = 1, 2
ABSENT, ACTIVE, IDLE = 0, 1, 2
"""The states of a rank: not there; a round may wait for it; there, but at the end of an epoch, and not waited for."""

# Positions in the table. They are constants of the module: attributes of a class and members of an enumeration take two and eight times as
# long to look up in Python 3.11, and a rank that arrives from a computation finds neither in the processor's caches.

# Columns of a rank's row.
STATE: Final = 0
"""`ABSENT`, `ACTIVE` or `IDLE`."""
VERSION: Final = 1
"""The rounds whose results it has."""
NEEDS: Final = 2
"""The first round whose result must be kept for it."""
ARRIVED: Final = 3
"""In the open round: `LATE`, `ON_TIME`, or 0."""
PENDING: Final = 4
"""Which of its buffers hold a gradient for the open round: bits."""
FROZEN: Final = 5
"""Which of them are in the round that is being folded: bits."""
THROUGH: Final = 6
"""It waits until so many rounds are done; 0: it does not wait."""
SAMPLES: Final = 7
"""The samples of the gradient in its first buffer; 0: not known. The next column is for its second buffer."""
LATEST: Final = 9
"""The samples of its last gradient."""
BATCH: Final = 10
"""The larger number of samples of its last two gradients, for which it counts in a round that it has no gradient in; 0: not known. Its last
one alone would not do: that may be the small one of an epoch's end."""

# Columns of the first row, which is the job's.
CLOSED: Final = 0
"""How many rounds are closed: the number of the open one."""
DONE: Final = 1
"""How many are folded: as many as are closed, or one less."""
LIVE: Final = 2
"""How many ranks were there when the last round closed: what its sum is divided by."""
UNEQUAL: Final = 3
"""1: the gradients of the round that was closed last weigh by their numbers of samples; 0: all have equal numbers, or one is not known."""
ACTIVES: Final = 4
"""How many ranks are active: this and the next two could be counted anew each time, and that takes much longer."""
ARRIVALS: Final = 5
"""How many of them have arrived."""
WAITING: Final = 6
"""How many of these on time: they wait."""
CHANGES: Final = 7
"""How often the active ranks have changed."""
TOTAL: Final = 8
"""Of the round that was closed last: the samples of the living ranks, of those for which they are known."""
KNOWN: Final = 9
"""How many ranks these are."""

WIDTH: Final = 16
"""Columns: a row is two cache lines."""

PLACES: Final = 16
"""Ranks are drawn from so many numbers, or twice, four times ... as many where there are more ranks. Were it as many as there are rows, one
seed would draw other ranks from the table of a live job, which has a row for each worker, than from the simulator's, which has room for
more."""
_WORD: Final = (1 << 64) - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class RoundView:
    """Show a rule the state from which it decides whether the open round closes. Masks have an entry for each rank."""

    def __init__(self, table: Table, seed: int) -> None:
        self._cells = table.reshape(-1).data
        self._columns = table[1:].T
        self._seed = seed
        self._rows = range(WIDTH, len(self._cells), WIDTH)
        self._ranks = worker_ids(len(self._rows))
        self._places = PLACES << max(0, (len(self._rows) - 1).bit_length() - (PLACES - 1).bit_length())
        self._drawn: dict[int, Sequence[WorkerId]] = {}
        self._drawn_at = (-1, -1)

    @property
    def number(self) -> Version:
        """Number of the open round."""
        return self._cells[CLOSED]

    @property
    def active(self) -> Mask:
        """Ranks that the round may wait for. `actives` says how many, without counting."""
        active: Mask = np.equal(self._columns[STATE], ACTIVE)
        return active

    @property
    def arrived(self) -> Mask:
        """Active ranks that have arrived in this round, late or not. `arrivals` says how many, without counting."""
        arrived: Mask = np.logical_and(self.active, self._columns[ARRIVED])
        return arrived

    @property
    def actives(self) -> int:
        return self._cells[ACTIVES]

    @property
    def arrivals(self) -> int:
        return self._cells[ARRIVALS]

    def arrivals_of(self, ranks: Sequence[WorkerId]) -> int:
        """Return how many of these active ranks have arrived."""
        return sum(self._cells[(1 + rank) * WIDTH + ARRIVED] != 0 for rank in ranks)

    def drawn(self, count: int) -> Sequence[WorkerId]:
        """So many active ranks, or all if they are fewer, as seed and round draw them. If one of them is gone the next takes its place,
        and the others stay."""
        now = self._cells[CLOSED], self._cells[CHANGES]
        if now != self._drawn_at:
            self._drawn.clear()
            self._drawn_at = now
        drawn = self._drawn.get(count)
        if drawn is None:
            drawn = self._drawn[count] = self._draw(count)
        return drawn

    def _draw(self, count: int) -> Sequence[WorkerId]:
        cells = self._cells
        if count >= cells[ACTIVES]:
            return [rank for rank, row in zip(self._ranks, self._rows, strict=True) if cells[row + STATE] == ACTIVE]
        # Ranks are drawn until so many active ones are among them. Drawing an order of all would be simpler, but slower, and the rank
        # that is on time draws under the lock for which the next rank waits.
        rows, ranks, last = self._rows, len(self._rows), self._places - 1
        number = _hashed(self._seed, cells[CLOSED])
        drawn: dict[WorkerId, None] = {}
        while len(drawn) < count:
            # `_hashed` of 0, 1, 2 ..., without a call: in a small job most numbers are no rank's.
            x = ((number ^ (number >> 30)) * _FIRST) & _WORD
            x = ((x ^ (x >> 27)) * _SECOND) & _WORD
            number = (number + _STEP) & _WORD
            rank = (x ^ (x >> 31)) & last
            if rank < ranks and cells[rows[rank] + STATE] == ACTIVE:
                drawn[self._ranks[rank]] = None
        return list(drawn)


@dataclass(frozen=True, kw_only=True)
class RoundRule(Policy, ABC):
    """Base class of the allreduce family: a rule says when a round closes. ``core/allreduce/rounds.py`` asks it.

    Its fields are the settings that all rules of the family have. Formulas in the rules' docstrings are those of batches of one size; of
    unequal batches each sample has one weight, see ``core/allreduce/rounds.py``.
    """

    family = "allreduce"

    always_spelled = ()

    ranks: ClassVar[str | None] = None
    """The setting that is a number of ranks, from 1 to the number of workers; None: the rule has none."""

    staleness: int | None = None
    """The most rounds between the version that a gradient was computed from and the one onto which it is folded: a round waits for a rank
    that would otherwise exceed it. Gradients of ranks that were idle are exempt. At least 1. None: no bound."""
    delivery: Literal["replay", "latest"] = "replay"
    """replay: a rank applies every result, in order, so that replicas stay equal, bit by bit. latest: a rank applies only the newest of
    the results that it missed, as in the paper; replicas drift apart."""
    model_sync_every: int | None = None
    """With ``latest``: the number of rounds after which replicas are set to their mean; at least 1. None: never."""
    carry_clip: float | None = None
    """A late gradient with a norm above this is scaled down to it; above 0. None: late gradients are not scaled."""

    def __post_init__(self) -> None:
        owner = self.called()
        if self.staleness is not None:
            whole_number(owner, "staleness", self.staleness, least=1)
        if self.delivery not in ("replay", "latest"):
            raise ConfigurationError(f"{owner}(delivery={self.delivery!r}): delivery must be replay or latest")
        if self.model_sync_every is not None:
            whole_number(owner, "model_sync_every", self.model_sync_every, least=1)
            if self.delivery == "replay":
                raise ConfigurationError(
                    f"{owner}(model_sync_every={self.model_sync_every}): with delivery=replay the replicas are equal already; "
                    "leave it out, or set delivery=latest"
                )
        clip = self.carry_clip
        if clip is not None and not (is_number(clip) and 0.0 < clip < float("inf")):
            raise ConfigurationError(f"{owner}(carry_clip={clip!r}): carry_clip must be a number above 0")
        if self.ranks is not None:
            whole_number(owner, self.ranks, getattr(self, self.ranks), least=1)

    def check(self, workers: int) -> None:
        if self.ranks is not None and (number := getattr(self, self.ranks)) > workers:
            advice = f"{self.ranks} must be at most {workers}"
            raise ConfigurationError(f"{self.called()}({self.ranks}={number}) with {workers} workers: {advice}")

    @abstractmethod
    def closes(self, view: RoundView) -> bool:
        """Return True if the open round closes now. Asked after each arrival, and when a rank goes or pauses while another rank waits:
        late gradients alone make none. It must say yes once all active ranks have arrived."""


def _hashed(key: int, number: int) -> int:
    """An unpredictable 64-bit number for each of these, the same in every process (splitmix64)."""
    x = (number * _STEP + key) & _WORD
    x = ((x ^ (x >> 30)) * _FIRST) & _WORD
    x = ((x ^ (x >> 27)) * _SECOND) & _WORD
    return x ^ (x >> 31)
