"""Run the pure core with a real clock: servers, workers, the journal.

The processes of a job exchange these messages (``kind`` of the header; *carry* names the memory region whose bytes travel with it; those of
a gradient are sent ahead of the message, while the rest is computed):

| from | to | kind | |
|---|---|---|---|
| server | supervisor | listening, alive, loading, failed, failing, status, summary, kill, noticed, journal_failed | addresses first |
| server 0 | supervisor | checkpoint | one has been made, or could not be |
| server 0 | supervisor | standing | the state of a worker's process (``runtime/coordination/standings.py``) |
| server | supervisor | keep, drop, mortal | memory that its next process needs; why no other process can go on |
| server | supervisor | followed, standby_gone | its standby could lead from now on, or gets no records any more |
| supervisor | server | stand_by, lead, alone, fenced, moved | who leads (``runtime/standby_server.py``) |
| standby | its leader | follow, acknowledged | the first message, and how many records have come |
| standby | its leader | serves | a worker is on this machine: it can get its parameters from here |
| leader | its standby | bytes, record | what a record has changed, and the record |
| leader | a later standby | bytes, state | before the first record: all that the server keeps (``recovery/plain_graph.py``) |
| leader | worker | standby | the server has a new standby: wait there, too |
| worker | standby | await | over a connection for the answer, leading |
| standby | worker | leading | it has taken over: go on with the link over this connection |
| standby | worker | parameters (carry) | in place of the leader's, to a worker of the standby's machine |
| worker | leader | again | the standby is gone: send what it was to send |
| supervisor | server | job, process, lost, ended, noted, finish, records_taken | settings first, then starts and ends of processes |
| supervisor | server 0 | checkpoint | make one now: the job is about to end |
| supervisor | server | kept | before the settings: the memory that an earlier process has left |
| server, worker, supervisor | each other | resume | the first message of a link over each new socket (``transport/link.py``) |
| server, worker, supervisor | each other | confirm | what need not be kept any more, where no other message has said so for long |
| server s | server 0 | shard | the first message |
| server 0 | server s | setup, orders | the layout and the rule's kind, then folds and releases in order |
| server s | server 0 | arrived, initialised, measured | a push, or the initial parameters, have arrived at server s; the norms of a fold |
| server s | server 0 | saved | its part of a checkpoint is in a file |
| worker | server 0 | hello, ready, push (sent ahead), initial (carry), buffers, metrics, heard, pull, abandoned, state | |
| worker | server 0 | samples, epoch, skipped | about samples |
| worker | server 0 | barrier | it waits for the other workers |
| worker | server 0 | left, abort, failing | how it ends |
| worker | server 0 | stands, place, part, parts | it waits; for ``offbeat.save``: the samplers' places, and each worker's part |
| worker | server 0 | checkpoint_part | its part of a checkpoint of the job |
| worker | server s | attach, push (sent ahead), initial (carry), state | |
| server 0 | worker | welcome, refused, joined, provide, parameters (carry), buffers, fence, interrupt, unused, state, noted | |
| server 0 | worker | grant, no_more, epoch_ended | about samples |
| server 0 | worker | barrier_passed | all have come |
| server 0 | worker | goes_on, job_over | to a joiner: the steps of its script before; the job has ended |
| server 0 | worker | chief, place, parts | the chief has changed; answers for ``offbeat.save`` |
| server 0 | worker | checkpoint, resume_part | hand in your part; the part with which you resume |
| server s | worker | attached, parameters (carry), state | |

A released worker gets one ``parameters`` message from every shard, all with the same serial number, and goes on when it has all of them.

Without servers (the allreduce and gossip families) server 0 is still the coordinator, and ranks decide among themselves: in shared memory
that comes with the welcome, or, on several hosts, with messages among each other and with the sequencer in server 0
(``runtime/allreduce/multi_host/node.py``). A push then only describes the gradient that is about to arrive there; ``initial``,
``donation`` and ``parameters`` have a replica as payload, and there are further messages:

| from | to | kind | |
|---|---|---|---|
| server 0 | rank | donate, farewell | give your replica to this joiner; you may leave |
| rank | server 0 | donation, leaving | the replica; the rank is about to leave |
| server 0 | rank | meet | several hosts: connect to these, in a running job; ranks that begin get them with ``parameters`` |
| rank | server 0 | rounds | several hosts: the first message of a further connection, to the sequencer |
| rank | server 0 | met, outside, voided | connected; the others have excluded this rank; a round's mean was not finite |

In rules of shard scope a push is a payload that goes to every shard with its description, and each ``arrived`` passes the description on;
parameters are payloads, too. Every shard also sends its newest block to the workers with ``block``, and each answers ``got``.
"""
