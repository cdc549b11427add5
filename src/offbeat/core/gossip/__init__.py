"""Decide the exchanges of a job without servers and without rounds: each rank mixes its parameters with those of a few neighbours.

```
    core.job.Coordinator, simulator         ranks (runtime/gossip), which decide among themselves
        │ push, enter, leave ...                │ step, mix, pair ...
        ▼                                       │
    ledger.GossipLedger                         │
        │ asks                                  │
        ▼                                       ▼
    push_sum.Gossip <── table.GossipTable: members, and what each rank may do next
        │ steps, weights and messages under way of all ranks
        ▼
    topology            which places of the graph are neighbours at which step
```

`ledger` gives each gradient its one fate, `table` answers live ranks, `push_sum` keeps the weights, `topology` is arithmetic on places
0 .. count - 1.

Example: two ranks under sgp. Each keeps half of its mass and sends the other half. Rank 0 has to wait for rank 1's message.

>>> from offbeat.core.gossip.push_sum import Gossip
>>> from offbeat.policies import rule
>>> gossip = Gossip(rule("sgp"))
>>> gossip.enter(0), gossip.enter(1)
(0, 0)
>>> gossip.step(0), gossip.behind(0)
(Sent(to=(1,), weight=0.5), (1,))
>>> gossip.step(1), gossip.behind(0)
(Sent(to=(0,), weight=0.5), ())
>>> gossip.mix(0)
Mixture(own=0.5, messages=(GossipMessage(sender=1, steps=1, weight=0.5, mass=0.5),), mass=1.0)
"""
