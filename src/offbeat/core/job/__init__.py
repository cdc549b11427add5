"""Combine the parts of one job: membership, one ledger and the sample leases, called through `Coordinator`.

```
    live server, simulator
        │ Coordinator.on(event, now), Coordinator.wake(now)
        ▼
    coordinator.Coordinator      one handler for each event
        │
        ├──► start.JobStart                 version 0 is asked for, and is there
        ├──► participants.Participants ──► core.membership      joined, alive, dead, finished; fenced
        ├──► waiting.Waiting               admitted, idle, set aside
        └──► contributions.Contributions   pushes and questions
                 │
                 ▼
             work.JobWork ──► a ledger of one family
                 │            ▲ pause, resume
                 └──► epochs.Epochs ──► core.leases, core.partitions

    several_optimizers.Several   above the coordinators of a job with several optimizers: whom not to wait for
    resumption.kept_from         the ledger of a coordinator after the loss of all processes
```

For a push, `Contributions` checks the sender's incarnation, claims the leases, and asks the ledger. The fates that the ledger returns
settle the leases; then free samples are dealt to workers that wait for some. All parts append to one list of effects, which
`Coordinator.on` returns: they are in the order in which they are to be carried out.

Example: worker 1 is lost while bsp waits for it. Its loss is an event like any other, and worker 0 goes on.

>>> from offbeat.core.events import Initialised, Joined, Lost, Pushed
>>> from offbeat.core.job.coordinator import Coordinator
>>> from offbeat.policies import rule
>>> job = Coordinator(rule("bsp"), workers=2)
>>> for event in (Joined(0), Joined(1), Initialised(0)):
...     _ = job.on(event, now=0.0)
>>> job.on(Pushed(0, 1, version=0, samples=8, compute_s=0.5), now=0.5)
[]
>>> [type(effect).__name__ for effect in job.on(Lost(1, "connection closed"), now=2.0)]
['StateChanged', 'Fold', 'Settle', 'Release']
"""
