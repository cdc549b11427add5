"""Start, watch and end the processes of a job, on one machine or with the help of torchrun, Slurm, MPI, Kubernetes or Ray on several.

Who calls whom::

    cli.py  offbeat run                    cli.py  offbeat agent, one process for each task of the engine
          |                                      |
          |                                      v
          |                                cluster.py  take_part: find the others, be an agent; task 0 also starts the supervisor
          |                                  +-- tasks.py        which task of which engine this is
          |                                  +-- rendezvous.py   where the supervisor listens; token.py: the job's secret
          |                                  +-- agent.py        starts what the supervisor asks for, and reports
          v                                      ^
    supervisor.py  Supervisor: one thread, one loop; decides nothing about training
      +-- server_fleet.py  carries out what `core.fleet` decides: which process leads each server, stands by or is started again
      |     +-- leadership.py   asks a store of the cluster who leads
      +-- engine.py        Engine and Child: what starts processes, and a process
      |     +-- local.py       on this machine       agents.py   through agents (agent_messages.py)
      |                                              ray_engine.py   through agents that are actors of Ray
      +-- program.py       the script or module, found before anything starts
      +-- environment.py   the variables of each server and worker
      +-- processes.py     a child that cannot outlive the supervisor; forkserver.py: one that is forked, imports done (--preload)
      |     +-- preload.py      what is imported; script_imports.py: what the script imports, found by reading it
      |     +-- import_trial.py   imports that forks cannot share are left to the workers
      |     +-- process_exit.py   the end of a fork, and of a rank of a worker of several processes
      |     +-- server_starter.py   servers, forks of a process that imports what they need
      +-- output.py        whole lines, labelled ``[worker 2]``, and files (--log-dir)
      +-- restarts.py      whether a worker that died starts again (--max-restarts)
      +-- watchers.py      answers ``offbeat top``; private_folder.py: where its user finds the job
      +-- hangs.py         processes of workers that make no progress: stacks, then SIGKILL
      +-- outcome.py       how the job has ended, and the exit status of the command
    faults.py: parses ``--slow``, ``--late`` and ``--kill``

An example: worker 1 is killed by the kernel for its memory. The supervisor sees the end of its process and sends ``lost`` to the servers;
the coordinator declares worker 1 dead, and its samples go to others. `WorkerProcess` says that one restart is left, so the supervisor
starts a new process with the same number, which joins as the next incarnation. With none left, the other workers go on, and the job's last
line names worker 1; the status is 0 if one of them finishes, since worker 1's script made no mistake.
"""
