"""Say what another rule, or one machine more, would have made of a run: ``offbeat advise run.jsonl``.

```
    sim.recording    a journal's steps, deaths and overheads, as a cluster
         ▼
    choices          the rules, each with settings that suit the job
         ▼
    trials           simulations of the recording, several of each rule, in several processes
         ▼
    advice  ◄── losses   the time to a loss        rows, and which of them is advised
         ▼
    words, table     sentences and the table; report and page take their first rows from `advice`
```

All ratios are between simulations of one recording, the rule that ran among them.
"""
