"""Run the rule ``allreduce``: `torch.distributed` sums, all ranks in every round, as a baseline that people know.

Who calls whom::

    ranks/worker_side.py                     ranks/coordinator_side.py
          |                                        ^ extends
          v                                        |
    member.py  TorchMember                   coordinator_side.py  TorchCoordinatorSide, TorchGroup
      the optimizer's step with each mean      a round closes when every computing rank has announced its gradient
          |                                        |
          v                                        v
    process_group.py  TorchAllreduce         process_group.py  MeetingPoint
      all_reduce of one flat vector            the store at which the ranks meet

An example: two ranks, and rank 1 has no samples left before the epoch's end. Rank 0 announces its gradient with ``push`` and calls
``all_reduce``. The coordinator closes the round and sends ``absent`` to rank 1, which waits for the epoch's end; rank 1 takes part with
nothing, since the call of rank 0 returns only when all ranks have made it. The death of a rank ends the job.
"""
