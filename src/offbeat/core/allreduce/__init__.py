"""Decide the rounds of a partial allreduce: when a round closes, whose gradients it takes, and in which steps they are summed.

```
    policy.RoundRule      "does the open round close now?"
        ▲ asks
    rounds.Rounds         the state of the rounds, in one array of integers; called by
        ├── ledger.RoundLedger          the coordinator and the simulator
        ├── runtime/.../one_host        ranks of one host, on an array in memory that they share
        └── sequencer.Sequencer         ranks of several hosts (view_change: after a rank has died or joined)

    schedule, algorithms  what each rank sends, receives and adds, as data; executed by runtime/.../multi_host
```

A round is *open* until the rule closes it, *closed* while its gradients are summed, and *done* when the sum is available: round r makes
version r + 1. A gradient that arrives after its round has closed is *carried*: it waits in its rank's buffer and goes into a later round.

Example: three ranks under majority, seed 4. Rank 1 closes round 0, whose sum is divided by 3; rank 2 is late for it.

>>> from offbeat.core.allreduce.rounds import Rounds
>>> from offbeat.policies import rule
>>> rounds = Rounds(rule("majority"), ranks=3, seed=4)
>>> for rank in range(3):
...     _ = rounds.enter(rank, 0)
>>> rounds.arrive(0, 0).closed, rounds.arrive(1, 0).closed
(False, True)
>>> rounds.closed()
Round(number=0, parts=(RoundPart(rank=0, buffer=0), RoundPart(rank=1, buffer=0)), divisor=3, weights=())
>>> rounds.fold_done(), rounds.version(0)
(False, 1)
>>> rounds.arrive(2, 0)
Arrival(number=1, late=True, closed=False, through=1)
"""
