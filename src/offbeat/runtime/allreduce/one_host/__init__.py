"""Partial allreduce among the ranks of one host: the arriving rank decides, under a lock in shared memory, and all present ranks sum.

Who calls whom::

    runtime/allreduce/round_member.py        runtime/allreduce/one_host_plane.py
      a rank's step                            the coordinator: enter, leave, pause, follow
                  |                                  |
                  v                                  v
    rounds.py   OneHostRounds
      of a rank: send, arrive, wait, results; of the coordinator: who takes part, and the log
                                  |
                                  v
    memory.py   RoundsMemory, a `runtime.shared_memory.state.SharedState`
                  |                          |
                  v                          v
    state.py    RoundsState                    reduce.py   Folder
      the table of rounds, slots,          sums send buffers into a result,
      tokens; decides with                 slice by slice
      core/allreduce/rounds.py           clipping.py, layout.py: norms; the block's parts

An example: rule solo, two ranks, gradients of 3 elements; both ranks have version 0.

1. Rank 0 writes [2, 4, 6] into the buffer that ``send()`` returned, and calls ``arrive()``. Under the lock, the rule closes round 0: slot 0
   is to hold its result. Rank 0 sums all buffers that were handed in, its own, over two ranks: results[0] = [1, 2, 3]. The log has the
   entries ARRIVE and FOLD_DONE.
2. ``wait()`` of rank 0 returns at once, and ``results()`` is [(0, [1, 2, 3])]: a view of slot 0. Rank 0 applies it and has version 1.
3. Rank 1 comes with [1, 1, 1]. Round 0 is closed, so its gradient is late: it stays in its buffer for round 1, and rank 1 is given the
   result of round 0 at once. The next arrival closes round 1, whose sum has the carried gradient in it.
"""
