"""Carry messages between the processes of a job. ``base.py`` is the interface; no rule, ledger or optimizer is known here.

```
    runtime (workers, servers)
        │ Connection.send, Connection.bind       ▲ Hub.poll
        ▼                                        │
    base.Hub, base.Connection
        └── hub.SocketHub ── stream ── wire (frames), outbox (unsent bytes), handshake (the job's token)
                ├── tcp      other hosts: the bytes of a region follow the header
                └── shm      the same host: a local socket for headers, shared memory for regions

    schema     checks the fields of a message before anything is done with it
    copy_on_write  shows a process shared memory in which its own writes are seen by it only
    device_memory  blocks of a GPU's memory, which travel as those of the host's (``cuda_memory.py`` makes and maps them)
    futex      lets processes wait for each other on shared memory
```

A message is a msgpack header, with few bytes of payload or a region of memory that both ends have bound under one name. Nothing that
arrives is unpickled or executed.

Example: a worker sends a server a message with a payload. What may come in one call of ``poll`` depends on the network.

>>> from offbeat.transport.hub import SocketHub
>>> server, worker = SocketHub("token"), SocketHub("token")
>>> to_server = worker.connect(server.listen())
>>> to_server.send({"kind": "push", "version": 0}, payload=(b"1234",))
>>> arrived = []
>>> while not arrived:
...     _, arrived = worker.poll(0.0), server.poll(0.05)
>>> [(to_worker, message)] = arrived
>>> message.header, bytes(message.payload)
({'kind': 'push', 'version': 0}, b'1234')
>>> worker.close(), server.close()
(None, None)
"""
