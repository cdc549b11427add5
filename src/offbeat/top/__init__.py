"""``offbeat top``: find this user's jobs, attach to one of them, and show what costs it time, while it trains.

`launch.watchers` is the other end. Nothing here can slow a job: a job answers what it is asked, at most twice a second.
"""
