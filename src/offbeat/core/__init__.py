"""Decide what a job does next, without doing it: events go in, effects come out, and nothing here has a clock, a socket or a tensor.

```
    live server, simulator, tests
        │ event, now        ▲ effects, in order
        ▼                   │
    core.job.Coordinator ───┘
        │
        ├── membership             which workers are alive, and under which incarnation
        ├── core.job.epochs        which worker gets which samples (leases, partitions)
        └── a ledger               what becomes of each contribution; one class for each family:
            core.server | core.allreduce | core.gossip
              │ asks
              ▼
            a rule (offbeat.policies)

    supervisor, tests
        │ event, now        ▲ actions, in order
        ▼                   │
    core.fleet.Fleet ───────┘  which process leads each server, stands by or is started again, and when the job fails

    live worker, simulated worker, tests
        │ effects, steps    ▲ events, Compute
        ▼                   │
    core.worker.Worker ─────┘  what one worker does; core.block_cache: which blocks it holds
```

``events.py`` and ``effects.py`` are the vocabulary, ``policy.py`` is the contract between a ledger and a rule. The core imports no torch,
reads no clock and has no random generator: the time and the seed are arguments, so equal inputs give equal outputs.

Example: worker 0 under a staleness bound of 1. It may run one iteration ahead of worker 1; after its second push it has to wait, so the
answer to that push contains no `Release`. The first push of worker 1 releases both.

>>> from offbeat.core.events import Initialised, Joined, Pushed
>>> from offbeat.core.job.coordinator import Coordinator
>>> from offbeat.policies import rule
>>> job = Coordinator(rule("ssp(staleness=1)"), workers=2)
>>> for event in (Joined(0), Joined(1), Initialised(0)):
...     _ = job.on(event, now=0.0)
>>> def push(worker, version, now):
...     effects = job.on(Pushed(worker, 1, version=version, samples=8, compute_s=0.5), now=now)
...     return [(type(effect).__name__, getattr(effect, "worker", None)) for effect in effects]
>>> push(0, version=0, now=0.5)
[('Fold', None), ('Settle', 0), ('Release', 0)]
>>> push(0, version=1, now=1.0)
[('Fold', None), ('Settle', 0)]
>>> push(1, version=0, now=1.5)
[('Fold', None), ('Settle', 1), ('Release', 1), ('Release', 0)]
"""
