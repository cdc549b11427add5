"""Starting the processes of a job. On one machine we do it ourselves; on a cluster that is the cluster's work."""
