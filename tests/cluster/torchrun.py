"""The command that a user of torchrun types on each of several hosts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.cluster.hosts import Host

PORT = 29511


def torchrun(hosts: Sequence[Host], node: int, *, per_node: int = 1, run: Sequence[str] = ("-m", "offbeat.agent")) -> list[str]:
    """Return the command for host ``node``, without the arguments of what it runs.

    Args:
        hosts: of the job; the first one has torchrun's store.
        node: the number of this host.
        per_node: processes of each host.
        run: a script, or ``-m`` and a module.
    """
    where = [f"--master-addr={hosts[0].address}", f"--master-port={PORT}"]
    numbers = [f"--nnodes={len(hosts)}", f"--node-rank={node}", f"--nproc-per-node={per_node}"]
    return [sys.executable, "-m", "torch.distributed.run", *numbers, *where, *run]
