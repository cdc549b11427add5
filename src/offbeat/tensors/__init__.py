"""Flat parameter and gradient memory, shards, the optimizer on the server's side, weighted sums. Knows torch, knows no network."""
