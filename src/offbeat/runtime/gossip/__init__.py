"""The gossip family, live, on one host: vectors in shared memory, and each rank's place among its neighbours."""
