"""One job behind one entrance: the coordinator, which has a ledger of one of the families, and the epochs that it deals out."""
