"""A worker's side of a rule of shard scope: which blocks it holds, at which versions, and when it may go on."""

from __future__ import annotations


class Blocks:
    """The blocks that one worker holds, one of each shard."""
