"""Let a server that dies continue in a new process: on its own host, or in a standby on another machine.

```
        survival.Survival      asks for what a later process needs; by default there is no later process
        keeper.Keeper          on this host: blocks of memory that the supervisor holds as well, by name; or
            │                  `replica.Replica`, see below
            ├── input_log.InputLog      the server's messages, in order, since the last snapshot; and the snapshot
            │       ▲ each is written before it is handled
            ├── plain_graph.py          the server's objects as plain data, without tensors
            └── tensors.shard_memory    parameters and optimizer state, and the number of the shard's completed operations
```

A server's state is determined by its messages, the results of its file writer (``coordination/file_writer.py``), and the times of both. Its
next process begins with the snapshot, and handles the messages in the log again. It does not change a tensor that was changed already
(`ShardMemory.once`). Its own messages go to `transport.link.Link`, which omits those that the other end has.

Workers on other hosts also have links to a server to which they send no gradient: ranks, whose rounds the sequencer in server 0 orders
(``allreduce/multi_host/sequenced_rounds.py``).

A standby (``replica.py``) handles the same messages on another machine while the server serves. A standby that comes later gets the
server's objects from ``plain_graph.py``, and so does a job that resumes from a checkpoint: no bytes make their reader run code.
"""
