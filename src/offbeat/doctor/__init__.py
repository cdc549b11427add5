"""Look for what would stop or slow down a job on this machine, and between machines, before the job does: ``offbeat doctor``.

```
    command      options, the order of things, text or JSON
      ├── machine   reads this machine: limits, packages, names, interfaces, ports  ──> readings (data)
      ├── peer      measures pairs of machines with the project's own transport     ──> readings (data)
      └── machine_checks, network_checks   pure: readings in, findings out
```

A reading that cannot be taken (no /sys/fs/cgroup, no /proc) is None, and never an exception.
"""
