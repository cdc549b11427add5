"""A worker of several processes: the ranks of a ``torch.distributed`` group, in which the script's own DDP or FSDP2 works.

```
    leader (rank 0)                                         rank 1 .. K-1
    DDP / FSDP2 ◄────────── collectives of the script ─────────► DDP / FSDP2
    values.Own ──── memory of the session, which all map ─────── values.Own
    shadow.Shadow                                                    │
    JobSession ── the job                                   follower.FollowerSession
          ▲                                                          │
          └──────────────── channel.py: who calls what ──────────────┘
```

The rule, the coordinator and the servers see one worker: the leader. Its session works on a `Shadow` of the model, plain parameters of all
ranks, so any rule works. A call of the library is made by all ranks, in the same order: the leader waits for the others' requests, makes
the call, and answers. So what the rule decides reaches all ranks alike.
"""
