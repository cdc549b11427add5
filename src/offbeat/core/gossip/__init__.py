"""Gossip: who exchanges parameters with whom, with what weights, and what becomes of each gradient."""
