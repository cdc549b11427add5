"""The coordinator's tools, whatever the family: who is connected, what is told to whom, rehearsed faults, checkpoints."""
