"""Laws of seconds: how long a computation or a message takes, drawn or read from measured traces."""
