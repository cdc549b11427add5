"""Sum rounds among ranks of several hosts over TCP: one process orders the rounds, and one rank of each host, its leader, sums.

Who calls whom, in a rank::

    multi_host_member.py
          |
          v
    rounds.py  MultiHostRounds     what a rank's step calls: send, arrive, wait, results; a lock and a thread
          |                  |
          v                  v
    node.py  Node          connections.py  PeerConnections
      what a rank does       sockets, one to each other rank and one to the sequencer, and the thread that reads them
      with a message       messages.py: every kind of message with its fields; what does not fit is refused
          |
          v
    executor.py  a leader runs the schedule of a round (`core.allreduce.schedule`) on the vectors in
    memory.py    send buffers and results, shared by the ranks of a host

and in server 0: multi_host_plane.py, sequenced_rounds.py, `core.allreduce.sequencer.Sequencer`.

An example: ``majority``, ranks 0 and 1 on host a, 2 and 3 on host b; leaders are 0 and 2; the sequencer is in server 0.

1. Each rank writes its gradient into its buffer and sends ``arrive`` to the sequencer. With the arrival of the drawn initiator, say rank 3,
   the sequencer closes the round and sends ``go`` to rank 0, with the gradients that are in it. Rank 0 passes it on to rank 2 (``on``).
2. Each leader adds up its host's gradients, and the leaders exchange ``piece`` by ``piece`` as the schedule says, until both have the sum.
3. The sum is divided by the number of living ranks; each leader has the result in its host's memory and sends ``done`` to the ranks there.
4. A rank that arrives now is late: its gradient stays in its buffer for the next round, and the answer names the result that it takes.
"""
