"""The decisions of a job, pure: no clock, no randomness, no torch, no input or output. Events go in, effects come out."""
