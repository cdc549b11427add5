"""Messages between processes. No rule, no ledger and no optimizer is known here; `base` is the interface, the rest implement it."""
