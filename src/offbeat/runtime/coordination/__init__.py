"""Give the coordinator's process its tools, the same for every family of rules.

Who calls whom::

    runtime/coordinator.py           LiveCoordinator: one message in, and what follows from it, for one optimizer
      +-- runtime/admission.py       Admission: from a process's hello to its welcome or refusal
      +-- runtime/worker_requests.py WorkerRequests: what a message of a welcomed worker asks for
      +-- runtime/driver.py          Driver: one event for `core.job.Coordinator` -> effects -> journal, plane, messages
      |
      +-- peers.py            which connection speaks for which worker
      +-- plane.py            the interface of what differs with and without servers:
      |                       ../parameter_server/plane.py, ../ranks/plane.py
      +-- arrivals.py         pushes that have arrived at some shards only; hyperparameters that came with them
      +-- notifier.py         effects that concern a worker, as messages (grant, no_more, fence, interrupt ...)
      |     +-- buffers.py    the mean of the workers' BatchNorm statistics, which goes with some of them
      +-- standings.py        tells the supervisor how each worker's process stands
      +-- save_points.py      parts of a checkpoint of ``offbeat.save`` that workers have handed in
      +-- checkpoints.py      makes the job's own checkpoints: when, and what belongs to one
      |     +-- checkpoint_content.py   their files, and how a job resumes from them
      |     +-- shard_files.py          what another server writes
      |     +-- file_writer.py          the thread that writes, whose results are events
      +-- fault_injection.py  the faults that ``--slow``, ``--late`` and ``--kill`` order

An example: worker 3 asks for samples. Its message ``samples`` comes over a connection that `Peers` knows as worker 3's, and becomes the
event `LeaseWanted`. The coordinator answers with the effect `Grant`; the journal has it, and `Notifier` sends ``grant`` over the same
connection. Had worker 3 been declared dead meanwhile, the effect would be `Fence`, and the worker would join again.
"""
