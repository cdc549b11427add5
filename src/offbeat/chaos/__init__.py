"""Inject faults into a job, and judge what came of it: ``offbeat chaos`` (docs/chaos.md).

```
    schedule     PURE: from a seed, which fault hits what, when, for how long
    injector     PURE but for its `Machine`: carries the faults out, sees that each has happened, and undoes what it must
    machine      the processes of the job, found in /proc and signalled over pidfd; links (links.py) and limits of files
    observation  PURE: what the journal says about folds, capacity, restarts and replicas
    judgement    PURE: the checks, and how the job ended
    command      options, the undisturbed job, the job with faults; table.py prints
```

Time is one clock, handed in (`clock.Clock`), so that tests of the injector do not wait.
"""
