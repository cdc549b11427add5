"""Share state among the rank processes of one host, so that a process that dies in the middle of a change does no harm.

`runtime/allreduce/one_host` and `runtime/gossip` each keep one block of memory per job, and each extends `SharedState` with its own numbers
and vectors. Every process of the job maps the same block::

    rank 0            rank 1            coordinator
      | change          | look            | follow, make_room for it
      v                 v                 v
    +----------------------------------------------------------------+
    | header, rule     layout.py   which job, and where the rest is  |
    | lock             state.py    one change at a time              |
    | commits          state.py    how many changes; which copy is it|
    | copy 0 | copy 1  state.py    the newest state, and the one     |
    |                              before it, which is written next  |
    | log (a ring)     log.py      what happened, in order           |
    | events           state.py    the word that waiters sleep on    |
    | vectors          the family  gradients, results, parameters    |
    +----------------------------------------------------------------+

An example, with 7 changes made so far. Copy 1 is the newest, since 7 is odd. Rank 0 takes the lock, brings copy 0 up to date from
copy 1, changes copy 0, writes an entry into the log, and sets ``commits`` to 8: from this instruction on copy 0 is the newest. It then
changes ``events``, releases the lock and wakes the waiters. If rank 0 is killed before ``commits`` is 8, the kernel passes its lock to the
next rank, which finds 7 changes and copy 1 as it was; the entry that rank 0 has written lies beyond the end of the log, and the next entry
overwrites it.
"""
