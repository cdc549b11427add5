"""Run the rules without servers: what allreduce and gossip have in common. Each rank has a replica and an optimizer of its own.

Who calls whom::

    the rank's process                           server 0's process
    worker_side.py  RankSession                  plane.py  RankPlane
      step: tells the coordinator what             follows the log of what the ranks decided, and feeds it,
      the gradient is of, then takes part          with what each rank has said of its gradient, to `core.job.Coordinator`
          |                                          |                    |
          v                                          v                    v
    member.py  RankMember (abstract)             group.py  Group      state_transfer.py  Joiners
      allreduce: ../allreduce/round_member.py      who takes part;      which rank gives its replica
      gossip:    ../gossip/member.py               the log              to one that joins
          |
          v
    replica.py  Replica       hyperparameters.py: learning rates that travel with the gradients

An example: rank 2 dies under ``majority`` and comes back.

1. Its connection closes. The plane takes rank 2 out of the group, so that no round waits for it, and reads that from the log.
2. A new process says ``hello`` and ``ready``. `Joiners` asks a living rank, say 0, with ``donate``.
3. Between two steps rank 0 admits rank 2 to the group at its own version v: from round v on results are kept for rank 2. Then it sends its
   replica (``donation``) through the coordinator.
4. Rank 2 gets it with ``parameters``, applies the results since v, and resumes: from now on rounds may wait for it.
"""
