"""The simulator: the same rules and the same protocol objects under a virtual clock, with laws and traces instead of waiting."""
