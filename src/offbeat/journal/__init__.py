"""Write down every event and effect of a run, and count and check what was written. No torch, no clock.

```
    runtime, sim                           report, cli
        │ log(event or effect, t)              │ read(path)
        ▼                                      ▼
    file.Journal ──── one JSON object a line: records.record
        │ each record, to every listener
        ▼
    summary.Tally ──► turns.Turns                  what each worker does at each moment
        ├───────────► worker_summary.WorkerTally   one worker's counts and times
        └───────────► audit.Audit                  one fate for each push, folds only of what was pushed
                          └── arrivals             which records belong to one push
```

`Tally.add` takes records one by one, so the live display, the summary file and the report of an old journal share one implementation.
``docs/journal-records.md`` describes the fields.
"""
