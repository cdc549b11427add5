"""What the sequencer writes down of gradients that go with their hosts; ``tests/runtime/allreduce/multi_host`` plays whole jobs."""

from __future__ import annotations

from offbeat.core.allreduce.sequencer import Sequencer
from offbeat.core.rank_log import EntryKind, RankLog
from offbeat.policies import rule_of
from offbeat.policies.eager import Majority


def test_a_gradient_that_goes_with_the_rank_whose_end_closes_its_round_was_for_that_round() -> None:
    closed = 0
    for seed in range(20):
        log = RankLog(lambda: 0.0)
        sequencer = Sequencer(rule_of(Majority, "majority"), 3, log, seed=seed)
        sequencer.begin({0: "a", 1: "b", 2: "c"})
        for rank in (0, 1):
            sequencer.arrive(rank, 0)
        if sequencer.number == 0:
            continue  # rank 2 is drawn already
        sequencer.arrive(2, 0)  # late, and carried
        for rank in (0, 1):
            if sequencer.number == 1:
                sequencer.arrive(rank, 1)
        if sequencer.number > 1:
            continue  # rank 2 is not drawn
        sequencer.leave(2)
        entries = log.follow(0)
        (left,) = (entry for entry in entries if entry.kind is EntryKind.LEAVE)
        (lost,) = (entry for entry in entries if entry.kind is EntryKind.LOST)
        assert left.closed and left.number == 1 and sequencer.number == 2
        assert (lost.rank, lost.version, lost.buffer) == (2, 1, 0), "the journal says of round 1 that it has the gradient"
        closed += 1
    assert closed > 2
