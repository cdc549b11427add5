"""Gossip among ranks: parameters are mixed with those of neighbours, through shared memory on one host, and over TCP between hosts.

Who calls whom::

    member.py   GossipMember                 plane.py  GossipPlane
      a rank's step                            the coordinator: enter, leave, pause, follow
                  |                                  |
                  v                                  |
    exchange.py GossipRank: step, catch_up           |
        one_host.py    OneHostGossip  <--------------+  shared memory: the `core.gossip.table.GossipTable`, and vectors with a
        |                                            |  stamp each: the step as of which the parameters are
        multi_host.py  MultiHostGossip               v
          peers: vectors by TCP     <--->    sequenced.py  SequencedGossip: the same table in server 0, asked by messages.py

An example: rule dpsgd, two ranks that have made no step, with the parameters [0] and [2].

1. Both have published these as of step 0, and computed gradients, by which SGD would move them by [1] and [-1].
2. Rank 0 calls ``step([1])``. The table says that its neighbour, rank 1, has come as far, and with which weights to mix: a half each. It
   counts the step, and writes the entry ARRIVE into the log. Rank 0 reads rank 1's parameters as of step 0, and publishes
   0.5 * [0] + 0.5 * [2] + [1] = [2] as of step 1.
3. Rank 1 does the same with rank 0's parameters as of step 0, which are kept: 0.5 * [0] + 0.5 * [2] - [1] = [0]. Had rank 0 called ``step``
   again before that, it would have waited until rank 1's step was counted, or until rank 1 was reported dead.
"""
