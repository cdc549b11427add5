"""The rule ``allreduce``, live: `torch.distributed` sums."""
