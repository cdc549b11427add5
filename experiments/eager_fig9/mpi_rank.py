"""One rank of the measurement under MPI; started by mpiexec. Rank 0 prints what all have measured, as JSON."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from mpi4py import MPI  # type: ignore[import-not-found,unused-ignore]


def main() -> None:
    nbytes, skew_s, settle_s, warm_up, iterations = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:6])
    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    vector = np.zeros(nbytes // 4, dtype=np.float32)
    found = []
    for iteration in range(warm_up + iterations):
        vector.fill((rank + iteration) % 17)
        world.Barrier()
        # Whoever waits in MPI polls, so the rank that says when to start may be the last to get a core.
        start = world.bcast(time.monotonic() + 0.05, root=0)
        apart_s = skew_s if iteration >= warm_up else 0.0
        time.sleep(max(0.0, start + (rank + 1) * apart_s - time.monotonic()))
        began = time.perf_counter()
        world.Allreduce(MPI.IN_PLACE, vector)
        latency_s = time.perf_counter() - began
        time.sleep(max(0.0, start + world.Get_size() * apart_s + settle_s - time.monotonic()))
        world.Barrier()
        found.append((latency_s, True, int(vector.min() != vector.max())))
    gathered = world.gather(found[warm_up:], root=0)
    if rank == 0:
        print(json.dumps(gathered))


if __name__ == "__main__":
    main()
