"""Start, watch and end a job's processes, on one machine, or on several with the help of torchrun, Slurm, MPI, Kubernetes or Ray.

Who calls whom::

    cli.py  offbeat run                    cli.py  offbeat agent, one process for each task of the engine
          |                                      |
          |                                      v
          |                                cluster.py  take_part: find the others, be an agent; task 0 also starts the supervisor
                  |                                  +-- tasks.py        detects the engine and this task's number
                  |                                  +-- rendezvous.py   finds the supervisor's address; token.py: the job's secret
                  |                                  +-- agent.py        starts what the supervisor asks for, and reports
                  v                                      ^
            supervisor.py  Supervisor: one thread, one loop; decides nothing about training
              +-- server_fleet.py  carries out the decisions of `core.fleet`: which process leads each server, stands by or is restarted
              |     +-- leadership.py   claims leadership in a store of the cluster
              +-- engine.py        Engine and Child: the interface that starts processes, and a process
      |     +-- local.py       on this machine       agents.py   through agents (agent_messages.py)
      |                                              ray_engine.py   through agents that are actors of Ray
          +-- program.py       finds the script or module before anything starts
          +-- environment.py   sets the variables of each server and worker
          +-- processes.py     starts children that cannot outlive the supervisor; forkserver.py: forks with imports done (--preload)
          |     +-- preload.py      chooses what is imported; script_imports.py: finds the script's imports by reading it
          |     +-- import_trial.py   leaves imports that forks cannot share to the workers
          |     +-- process_exit.py   ends a fork, or a rank of a worker of several processes
          |     +-- starter.py          forks servers and workers from processes that have imported what they need
          +-- output.py        prints whole lines, labelled ``[worker 2]``, and writes files (--log-dir)
          +-- restarts.py      decides whether a worker that died is restarted (--max-restarts)
          +-- watchers.py      answers ``offbeat top``; private_folder.py: where its user finds the job
          +-- hangs.py         detects worker processes without progress: stacks, then SIGKILL
          +-- outcome.py       computes how the job ended, and the exit status of the command
        faults.py: parses ``--slow``, ``--late`` and ``--kill``

For example, the kernel kills worker 1 for its memory. The supervisor sees that the process has ended and sends ``lost`` to the servers; the
coordinator declares worker 1 dead, and gives its samples to others. `WorkerProcess` has one restart left, so the supervisor starts a new
process with the same number, which joins as the next incarnation. With no restart left, the other workers go on, and the job's last line
names worker 1; the exit status is 0 if another worker finishes, since worker 1's script made no mistake.
"""
