"""Other libraries' training loops in a job: one module for each library, which is imported by the module's user and nowhere else."""
