"""Partial allreduce: when a round closes, who sums it and how, and what becomes of each gradient."""
