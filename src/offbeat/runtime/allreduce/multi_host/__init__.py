"""Rounds among ranks of different hosts, over TCP: one process decides, and one rank of each host sums."""
