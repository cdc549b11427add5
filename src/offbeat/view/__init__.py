"""Show a job in other programs: processes that follow it, and fail without consequences for it.

```
    server 0                      supervisor                         a follower's process
    journal.followed ──records──► launch.followers ──stdin, lines──► view.follow ──► a Sink
    a bounded ring                a bounded queue                                      log_to   dashboard
```
Each arrow drops the oldest records where the next part is slow, and counts them. A follower may be killed at any moment: it is started
again, and gets again what it has not confirmed.
"""
