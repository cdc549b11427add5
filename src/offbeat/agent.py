"""``python -m offbeat.agent train.py``: the command ``offbeat agent``, in the form that torchrun, srun and mpirun start."""

from __future__ import annotations

import sys

from offbeat.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "agent")
    main()
