"""Access the memory of one host's rounds from one process: the shared state, the owners of ranks, and the sums."""

from __future__ import annotations

from functools import partial

import numpy as np

from offbeat.core.allreduce.policy import CLOSED, DONE, RoundRule
from offbeat.policies import rule_of
from offbeat.runtime.allreduce.one_host.layout import RoundsLayout
from offbeat.runtime.allreduce.one_host.reduce import CORES, Folder
from offbeat.runtime.allreduce.one_host.state import Closing, RoundsState
from offbeat.runtime.shared_memory.state import SharedState
from offbeat.transport.base import SharedMemory
from offbeat.transport.futex import EVERYBODY


class RoundsMemory(SharedState[RoundsState]):
    """The shared state of one job's rounds, and the vectors that are summed.

    Args:
        block: the memory; it must outlive this object.
        rule: of a new block; None: the rule that the header names.
        layout: of a new block, which is initialised; None: another process has made the block.

    Raises:
        ProtocolError: the block is not one for rounds.
        ConfigurationError: this version of offbeat has no such rule; a user's own rule must be given to `OneHostRounds.attach`.
    """

    def __init__(self, block: SharedMemory, rule: RoundRule | None, layout: RoundsLayout | None) -> None:
        fresh = layout is not None
        if layout is None:
            layout, spelled = RoundsLayout.read(block.view)
            rule = rule_of(RoundRule, spelled) if rule is None else rule  # type: ignore[type-abstract]
        assert rule is not None
        self.layout, self.rule = layout, rule
        memory = layout.parts(block.view)
        super().__init__(memory, layout, partial(RoundsState, layout=layout, rule=rule), fresh=fresh)
        self.owners = np.frombuffer(memory["owners"], np.int64, 2 * layout.ranks).reshape(layout.ranks, 2)
        """By rank: the number of its process and when that process began."""
        self.folder = Folder(memory, layout, fresh=fresh)
        if fresh:
            layout.write(block.view, rule.spelling)

    def _update(self, new: RoundsState, newest: RoundsState) -> None:
        new.cells[:] = newest.cells

    def _complete(self, new: RoundsState, before: RoundsState) -> int:
        """Sum a small round at once if this change has closed one."""
        cells, old = new.cells, before.cells
        while cells[DONE] < cells[CLOSED] and self.folder.inline:
            closing = new.closing()
            assert closing is not None
            if not self.folder.sum(closing):
                self.folder.void(closing)
            new.fold_done()
        if cells[DONE] != old[DONE]:
            return EVERYBODY
        return (CORES - 1 or 1) if cells[CLOSED] != old[CLOSED] else 0

    def help(self) -> bool:
        """Help with the fold that is under way, if there is one. Returns True if anything was done."""
        closing = self.look(lambda state: state.closing())
        if closing is None:
            return False
        count, complete = self.folder.help(closing)
        if complete:
            self.change(self._finish, closing)
        return bool(count) or complete

    def _finish(self, state: RoundsState, closing: Closing) -> None:
        """Count this round as folded. Every process that summed a last slice calls this; only the first call counts."""
        if state.rounds.done == closing.round.number < state.rounds.number:
            self.folder.settle(closing)
            state.fold_done()
