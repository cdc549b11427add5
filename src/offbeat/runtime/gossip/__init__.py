"""Gossip among the ranks of one host: parameters are mixed with those of neighbours, through vectors in shared memory.

Who calls whom::

    member.py   GossipMember                 coordinator_side.py
      a rank's step                            the coordinator: enter, leave, pause, follow
                  |                                  |
                  v                                  v
    exchange.py OneHostGossip ------> members.py  GossipMembers
      begin, step, pause, resume        who takes part; log
                  |                                  |
                  +---------------+------------------+
                                  v
    waiting.py  GossipRank: reads the state as a member, waits, holds vectors
                                  |
                                  v
    memory.py   GossipMemory, a `runtime.shared_memory.state.SharedState`
                  |                          |
                  v                          v
    memory.py   GossipState              vectors, with a stamp each: the step as of
      the numbers of                       which the parameters are
      core/gossip/push_sum.py            layout.py: the block's parts

An example: rule dpsgd, two ranks that have made no step, with the parameters [0] and [2].

1. Both have written these into slot 0 of their vectors, stamp 0, and computed gradients, by which SGD would move them by [1] and [-1].
2. Rank 0 calls ``step([1])``. The state says that its neighbour, rank 1, has come as far, and with which weights to mix: a half each. Rank
   0 reads rank 1's slot 0, checks that its stamp is still 0, and writes 0.5 * [0] + 0.5 * [2] + [1] = [2] into its own slot 1, stamp 1.
   Under the lock it counts its step and writes the entry ARRIVE into the log; then it wakes the ranks that wait.
3. Rank 1 does the same with rank 0's slot 0, which is kept: 0.5 * [0] + 0.5 * [2] - [1] = [0]. Had rank 0 called ``step`` again before
   that, it would have slept until rank 1's step was counted, or until rank 1 was reported dead with ``leave``.
"""
