"""Carry messages between the processes of a job. ``base.py`` is the interface; no rule, ledger or optimizer is known here.

```
    runtime (workers, servers)
        │ Connection.send, Connection.bind       ▲ Hub.poll
        ▼                                        │
    base.Hub, base.Connection
        ├── hub.SocketHub ── stream ── wire (frames), outbox (unsent bytes), handshake (the job's token)
        │       ├── tcp      other hosts: the bytes of a region follow the header
        │       └── shm      the same host: a local socket for headers, shared memory for regions
        └── memory.MemoryHub   within one process, for tests

    schema     checks the fields of a message before anything is done with it
    copy_on_write  shows a process shared memory in which its own writes are seen by it only
    futex      lets processes wait for each other on shared memory
```

A message is a msgpack header, with few bytes of payload or a region of memory that both ends have bound under one name. Nothing that
arrives is unpickled or executed.

Example: a worker carries the region ``push`` to a server. The two ends do not share memory here, so the bytes are copied.

>>> from offbeat.transport.memory import MemoryHub, MemoryNetwork
>>> network = MemoryNetwork(shares_memory=False)
>>> server, worker = MemoryHub(network, "token"), MemoryHub(network, "token")
>>> to_server = worker.connect(server.listen())
>>> to_server.send({"kind": "hello"})
>>> [(to_worker, message)] = server.poll(None)
>>> gradient, received = bytearray(b"1234"), bytearray(4)
>>> to_server.bind("push", memoryview(gradient))
>>> to_worker.bind("push", memoryview(received))
>>> to_server.send({"kind": "push", "version": 0}, carry="push")
>>> [(_, message)] = server.poll(None)
>>> message.header, received
({'kind': 'push', 'version': 0}, bytearray(b'1234'))
"""
