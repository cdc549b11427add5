"""Rounds among the ranks of one host, in shared memory: whoever arrives decides, and all who are there sum."""
