"""Latency models ("laws"): how many seconds a simulated computation or message takes, drawn from a distribution or read from a trace.

```
    sim.cluster      "uniform(low=0.1, high=0.2)"
        ▼
    registry.law ──► base.Law            a frozen configuration
                        │ start(seed, workers)
                        ▼
                     base.Sampler        draw(worker, clock, now) -> seconds

    distributions, lognormal    random times                traces    measured times (offbeat.traces)
    modifiers                   laws that change another law: slow windows, factors, sums
```

A draw depends on (seed, worker, clock) and, for slow windows, on the time, but not on earlier draws. All rules simulated under one
seed therefore meet the same cluster.

Example: worker 2 computes five times slower between 10 s and 20 s. Half of an iteration of 1 s that begins at 9.5 s is slowed.

>>> from offbeat.sim.latency.registry import law
>>> slow = law("windows(law='constant(seconds=1)', worker=2, begin=10, end=20, factor=5)")
>>> sampler = slow.start(seed=0, workers=4)
>>> [sampler.draw(worker=2, clock=0, now=now) for now in (0.0, 9.5, 12.0)]
[1.0, 3.0, 5.0]
"""
