"""Simulate a job: the coordinator and rules of live jobs, with simulated workers and servers under a virtual clock.

```
    offbeat simulate (command), scripts
        ▼
    run.simulate(rule, cluster, work)
        ▼
    simulation.Simulation ── event_queue.EventQueue        what happens when; the time jumps, nothing waits
        │
        ├── workers, shard_workers (process)               shells of core.worker.Worker: when it computes, how long
        │      │ pushes                      ▲ releases
        ▼      ▼                             │
    coordinator_inbox.CoordinatorInbox ── core.job.Coordinator
        └── servers.Servers, gossip_links.Links            when messages arrive, when folds are done

    cluster, faults        the settings: machines, latency models, faults
    sim.latency            how long things take          sim.training    what contributions contain
```

A run depends only on its settings and its seed: equal ones give the same journal, byte for byte.

Example: worker 1 needs 4 s for an iteration, worker 0 needs 1 s. Ten versions take bsp 40 s. Under asp each push is a
version: in 8 s worker 0 pushes eight times and worker 1 twice.

>>> from offbeat.sim.cluster import Cluster, Work
>>> from offbeat.sim.run import simulate
>>> cluster = Cluster(workers=2, compute="per_worker(law='constant(seconds=1)', factors=(1, 4))")
>>> for rule in ("bsp", "asp"):
...     result = simulate(rule, cluster, Work(versions=10))
...     print(rule, result.seconds, result.summary["pushes"])
bsp 40.0 20
asp 8.0 10
"""
