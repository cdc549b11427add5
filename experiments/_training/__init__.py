"""What the experiments that train have in common: models, one run of a rule on a simulated cluster, and many of them side by side."""
