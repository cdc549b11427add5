"""Provide the parts of a worker's process that every family of rules uses.

Who calls whom::

    the user's script -> offbeat.DistributedOptimizer -> offbeat.session.Session (abstract)
                                                             ^ extends
    job_session.py  JobSession: takes part in a job as one process
      ^ extends: ../parameter_server/worker_side.py, ../ranks/worker_side.py
      |
          +-- connection.py     connections to all servers, heartbeat, waits; sorts messages that arrive
          +-- core/worker.py    Worker: decides when to push, ask, give up and join again; the session carries that out
          +-- siblings.py       Siblings: the sessions of one process, which are tended while it waits with one of them
          +-- job_checkpoints.py  hands in parts of checkpoints, and fetches those of other workers
          +-- samples.py        follows the epochs that the script takes part in
          +-- script_writes.py  notices that the script writes to the parameters itself
          +-- process_end.py    handles the script's end, an exception and SIGTERM
          +-- library_calls.py  tracks calls into the library, from which progress is judged
          +-- stacks.py         prints the Python stacks of a process that hangs
        other_launchers.py      reads what torchrun and other launchers leave in the environment

For example, the end of an epoch: the batch sampler calls `JobSession.take`; `WorkerSamples` sends ``samples`` and waits. Another worker
still holds a lease of this epoch, and nothing else is left to grant, so no answer comes until that lease is pushed, or is taken from a
dead worker and granted here. Then ``epoch_ended`` brings the report of the epoch and the newest parameters, and the script's ``for`` loop
ends. A worker that itself holds samples that it has not pushed gets the answer ``no_more`` at once: it pushes, and asks again.
"""
