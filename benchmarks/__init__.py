"""How fast, beside peers, in the same run. Ratios are what these are for: absolute times are the machine's."""
