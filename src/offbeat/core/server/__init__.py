"""The ledgers of rules with servers: which push is in which version, for the whole job or for each shard by itself."""
