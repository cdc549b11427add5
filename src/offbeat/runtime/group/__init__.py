"""Run a worker as several processes: the ranks of a ``torch.distributed`` group, in which the script's own DDP or FSDP2 works.

```
    leader (rank 0)                                         rank 1 .. K-1
    DDP / FSDP2 ◄────────── collectives of the script ─────────► DDP / FSDP2
      values.Own ──── the session's memory, mapped by all ──────── values.Own
    shadow.Shadow                                                    │
    JobSession ── the job                                   follower.FollowerSession
          ▲                                                          │
                  └──────────────── channel.py: calls and answers ───────────┘
```

The rule, the coordinator and the servers see one process: the group's leader, rank 0. Its session works on a `Shadow` of the model, plain
parameters of all ranks, so that any rule works. All ranks make each call of the library, in the same order: the group's leader waits for
the followers' requests, makes the call, and answers. So a decision of the rule reaches all ranks alike.
"""
