"""Run the pure core with a real clock: servers, workers, the journal.

The processes of a job exchange these messages (``kind`` of the header; *carry* names the memory region whose bytes travel with it):

| from | to | kind | |
|---|---|---|---|
| server | supervisor | listening, alive, loading, failed, failing, status, summary, kill, journal_failed | addresses first |
| server 0 | supervisor | standing | the state of a worker's process (``runtime/coordination/standings.py``) |
| supervisor | server | job, process, lost, ended, noted, finish | settings first, then starts and ends of processes |
| server s | server 0 | shard | the first message |
| server 0 | server s | setup, orders | the layout and the rule's kind, then folds and releases in order |
| server s | server 0 | arrived, initialised, measured | a push, or the initial parameters, have arrived at server s; the norms of a fold |
| worker | server 0 | hello, ready, push (carry), initial (carry), buffers, metrics, heard, pull, samples, epoch, abandoned, state | |
| worker | server 0 | left, abort, failing | how it ends |
| worker | server 0 | stands, place, part, parts | it waits; for a checkpoint: the samplers' places, and each worker's part |
| worker | server s | attach, push (carry), initial (carry), state | |
| server 0 | worker | welcome, refused, joined, provide, parameters (carry), buffers, fence, interrupt, state, noted | |
| server 0 | worker | grant, no_more, epoch_ended | about samples |
| server 0 | worker | chief, place, parts | the chief has changed; answers for a checkpoint |
| server s | worker | attached, parameters (carry), state | |

A released worker gets one ``parameters`` message from every shard, all with the same serial number, and goes on when it has all of them.

Where there are no servers (the allreduce and gossip families) server 0 is still the coordinator, and ranks decide among themselves, in
memory that comes with the welcome, or by `torch.distributed`; ranks of different hosts by messages of their own, among each other and
with a part of server 0 that decides when rounds close (``runtime/allreduce/multi_host/node.py``). Then a push is a word about the gradient
that is about to arrive there; ``initial``, ``donation`` and ``parameters`` have a replica as payload, and these come besides:

| from | to | kind | |
|---|---|---|---|
| server 0 | rank | donate, farewell | give your replica to this newcomer; you may go |
| server 0 | rank | absent | a plain allreduce: take part in this round with nothing |
| rank | server 0 | donation, leaving | here it is; I am about to go |
| server 0 | rank | meet | different hosts: connect to these, in a running job; who begins has it with ``parameters`` |
| rank | server 0 | met, outside, voided | done; the others go on without me; a round's mean was not finite |

In rules of shard scope a push is a payload, its copy goes to every shard with all there is to say of it, and each ``arrived`` passes that
on; parameters are payloads too. Beside them every shard sends ``block`` to the workers, its newest, and each answers ``got``.
"""
