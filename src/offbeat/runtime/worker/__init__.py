"""Give a worker's process its tools, the same for every family of rules.

Who calls whom::

    the user's script -> offbeat.DistributedOptimizer -> offbeat.session.Session (abstract)
                                                             ^ extends
    job_session.py  JobSession: takes part in a job as one process
      ^ extends: ../parameter_server/worker_side.py, ../ranks/worker_side.py
      |
      +-- connection.py     connections to all servers, heartbeat, waits; sorts what arrives
      +-- core/worker.py    Worker: decides when to push, ask, give up and join again; the session carries that out
      +-- siblings.py       Siblings: the sessions of one process, which are tended while it waits with one of them
      +-- checkpoint_parts.py  the parts of a checkpoint that other workers have handed in
      +-- samples.py        the epochs that the script takes part in
      +-- script_writes.py  notices that the script writes to the parameters itself
      +-- process_end.py    the script ends, raises, or SIGTERM comes
      +-- library_calls.py  whether the script is inside a call of the library; what progress is judged by
      +-- stacks.py         prints the Python stacks of a process that hangs
    other_launchers.py      what torchrun and others leave in the environment

An example: the end of an epoch. The batch sampler calls `JobSession.take`; `WorkerSamples` sends ``samples`` and waits. Another worker
still holds a lease of this epoch, and there is nothing else to grant. So no answer comes until that lease is pushed, or comes back from a
dead worker and is granted here. Then ``epoch_ended`` comes with the report of the epoch and the newest parameters, and the ``for`` loop
of the script ends. A worker that itself holds samples that it has not pushed is answered ``no_more`` at once: it pushes, and asks again.
"""
