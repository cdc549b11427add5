"""Partial allreduce without servers: among the ranks of one host, in shared memory, and of several, over TCP (``across.py``)."""
