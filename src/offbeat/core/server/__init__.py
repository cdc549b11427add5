"""Keep the ledger of a job with parameter servers: which push goes into which version, and which worker may go on.

```
    core.job.Coordinator
        │ enter, push, abandon, leave ...       ▲ effects: Fold, Settle, Release ...
        ▼                                       │
    Ledger          (rules of job scope) ───────┤
    ShardedLedger   (rules of shard scope) ─────┘
        ├── shard_view.ShardLedger      one for each shard: its version and its pending contributions
        └── shard_pushes.Pushes  one fate for each push, out of its fates at the shards
```

`Ledger` decides once for all shards: a fold takes the same contributions at every shard. In `ShardedLedger` each shard has a version of its
own and asks its own copy of the rule. Both ask ``rule.fold`` until it returns None; `Ledger` then asks ``rule.admit`` for waiting workers.

Example: under bsp the first push waits for the second. That one makes version 1, settles both contributions and releases both workers.

>>> from offbeat.core.events import Pushed
>>> from offbeat.core.server.ledger import Ledger
>>> from offbeat.policies import rule
>>> ledger = Ledger(rule("bsp"))
>>> for worker in range(2):
...     _ = ledger.enter(worker, 1, now=0.0)
>>> ledger.push(Pushed(0, 1, version=0, samples=8, compute_s=0.5), now=0.5)
[]
>>> for effect in ledger.push(Pushed(1, 1, version=0, samples=8, compute_s=1.5), now=1.5):
...     print(type(effect).__name__, effect.reason)
Fold all 2 active workers have pushed
Settle all 2 active workers have pushed
Settle all 2 active workers have pushed
Release the barrier is open
Release the barrier is open
"""
