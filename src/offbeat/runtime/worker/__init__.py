"""A worker's tools, whatever the family: its connections, its session, its samples, and how its process ends."""
