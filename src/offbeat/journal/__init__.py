"""Write down every event and effect of a run, and count and check what was written. No torch, no clock.

```
    runtime, sim                           report, cli
        │ log(event or effect, t)              │ read(path)
        ▼                                      ▼
    file.Journal ──── one JSON object a line: records.record
        │ each record, to every listener
        ▼
    summary.Tally ──► worker_summary.WorkerTally   one worker's counts and waiting times
        └───────────► audit.Audit                  one fate for each push, folds only of what was pushed
                          └── arrivals             which records belong to one push
```

`Tally.add` takes records one by one, so the live display, the summary file and the report of an old journal share one implementation.
``docs/journal-records.md`` describes the fields.

Example: a worker is released at 0.5 s, computes for 0.9 s and pushes at 1.5 s. No fate follows, and the audit says so.

>>> from offbeat.journal.summary import Tally
>>> tally = Tally()
>>> tally.add({"kind": "job", "t": 0, "format": 1, "sync": "asp", "workers": 1, "servers": 1, "seed": 0})
>>> tally.add({"kind": "release", "t": 0.5, "worker": 0, "incarnation": 1, "version": 0, "clock": 0, "reason": ""})
>>> tally.add({"kind": "pushed", "t": 1.5, "worker": 0, "incarnation": 1, "version": 0, "samples": 8, "compute_s": 0.9})
>>> tally.summary()["pushes"], tally.summary()["per_worker"][0]["compute_s"]
(1, 0.9)
>>> tally.add({"kind": "end", "t": 2.0, "ok": True, "reason": "done"})
>>> tally.problems()
['worker 0, incarnation 1: its push at 1.5 s has no fate']
"""
