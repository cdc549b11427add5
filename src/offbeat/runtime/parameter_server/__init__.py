"""Rules with servers, live: the coordinator's side, the shards, and the worker's side."""
