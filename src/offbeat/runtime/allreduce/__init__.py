"""The allreduce family, live: a rank's part in rounds of one host or of several, and the coordinator's side of the latter."""
