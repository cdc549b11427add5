"""Inject faults into a job, and judge what came of it: ``offbeat chaos`` (docs/chaos.md).

```
    schedule     PURE: what a fault is; from a seed, which fault hits what, when, for how long
    injector     PURE: carries the faults out, sees that each has happened, and undoes what it must
    machine      the processes of the job, found and signalled by procfs.py; the links of a host; the journal's file
    run          one command from its start to its end, and what it leaves behind
    history      PURE: what the journal says of faults, beside its tally and its audit: pauses, capacity, replicas
    judgement    PURE: the checks, and how the job ended
    command      options, the undisturbed job, the job with faults, the table
```
"""
