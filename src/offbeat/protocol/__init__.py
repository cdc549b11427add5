"""What can happen in a job and what to do about it. Pure: no clock, no randomness, no torch, no input or output."""
