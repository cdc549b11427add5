"""Let a server go on in a new process, on its host, where the one that has died left off.

```
    survival.Survival      what the parts of a server need so that another process goes on where this one dies: nobody does, or
    keeper.Keeper          on this host: blocks of memory that the supervisor holds as well, by name; or
        │                  `replica.Replica`, see below
        ├── input_log.InputLog      the messages of the server, in order, since the last snapshot; and the snapshot
        │       ▲ each is written before it is handled
        ├── plain_graph.py          all that a server keeps besides tensors, as plain data
        └── tensors.shard_memory    parameters and optimizer state, and how far the shard's operations have come
```

The state of a server follows from its messages, the results of its writer of files (``coordination/file_writer.py``), and their times. The
next process of the server begins with the snapshot, and handles the messages in the log again. It changes no tensor that was changed
already (`ShardMemory.once`), and what it would send goes to `transport.link.Link`, which leaves out what the other end has.

Workers of other hosts have links to it, too, where no gradient comes over them: ranks, whose rounds the sequencer in server 0 orders
(``allreduce/multi_host/sequenced_rounds.py``).

A standby (``replica.py``) handles the same messages on another machine while the server serves. One that comes later gets the server's
objects from ``plain_graph.py``, too, and so does a job that resumes from a checkpoint: no reader of bytes can be made to run code.
"""
