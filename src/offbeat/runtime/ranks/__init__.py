"""Rules without servers, live: what allreduce and gossip have in common. Each rank has a replica and an optimizer of its own."""
