"""Hold what every process of a job must agree on: settings, the job's specification, the messages, and how tensors travel in them.

Who uses what::

    launch/, the supervisor  -- settings.py  JobSettings, WorkerSettings -->  servers and workers
    a worker's hello         -- job_spec.py  JobSpec: layout, optimizer, rule --  must equal the job's, or the worker is refused
    every process            -- messages.py  every kind of message with its fields; what does not fit is refused on arrival
                             -- numbered.py  one connection between servers for several optimizers
                             -- packing.py   tensors in lists and maps as bytes (nothing is pickled)
                             -- control_groups.py  what the groups of this process leave of the machine
    while a job begins       -- loading.py, first_steps.py  did all workers load the same state, do they see different samples
    while it ends            -- last_words.py  why a process fails, for a process that can still print it

An example: the script of worker 1 makes another model than that of worker 0. Its ``hello`` fits `messages`, but the layout in it differs
from the `JobSpec` that worker 0 brought. Server 0 answers ``refused`` with a sentence that names the difference, and the worker raises
`RefusedError` before it has computed anything.
"""
