"""What `offbeat report` prints, whole, in terminals of 80 and of 140 columns."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.printed import printed

from offbeat.journal.file import read
from offbeat.journal.summary import Tally
from offbeat.report.table import comparison, job_tables
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate

SLOW = "per_worker(law='constant(seconds=0.5)', factors=(1, 1, 4))"
FAULTS = "kill worker=1 at=6.2; restart worker=1 at=8"

CAPTURE_80 = """\
ssp(staleness=2): version 90 in 56.0 simulated s of training, 13 samples/s, 48%
waiting, 90 pushes
                         compute                    staleness
worker  state              /push  waiting  folded  (versions)        lead
     0  alive           500.0 ms      73%      30  0.1, max 1  1.9, max 2
     1  alive, back 1x  500.0 ms      70%      32  1.0, max 1  1.8, max 2
     2  alive             2.00 s       0%      28  2.2, max 6  0.0, max 1
Worker 2 is slow, which costs this job 68 % of what it could do: its computing
(1.9 s a step, 468.8 ms on the others). Remedy: give it smaller batches, or
choose a rule that does not wait for it. Worth up to 68 %.
Worker 1 died at 6.2 s and was back after 1.8 s: 1 % of the job's time (nobody
waited for it; killed by the script of faults).
(A terminal wider than 80 characters shows also: pushes, samples.)
                      ssp(staleness=2)  ssp(staleness=2)
training                        56.0 s            56.0 s
versions                            90                90
versions/s                        1.61              1.61
samples/s                         12.9              12.9
staleness (versions)       1.08, max 6       1.08, max 6
lead                             max 2             max 2
waiting                            48%               48%
"""

CAPTURE_140 = """\
ssp(staleness=2): version 90 in 56.0 simulated s of training, 13 samples/s, 48% waiting, 90 pushes
                                          compute                    staleness
worker  state           pushes  samples     /push  waiting  folded  (versions)        lead
     0  alive               30      240  500.0 ms      73%      30  0.1, max 1  1.9, max 2
     1  alive, back 1x      32      256  500.0 ms      70%      32  1.0, max 1  1.8, max 2
     2  alive               28      224    2.00 s       0%      28  2.2, max 6  0.0, max 1
Worker 2 is slow, which costs this job 68 % of what it could do: its computing (1.9 s a step, 468.8 ms on the others). Remedy: give it
smaller batches, or choose a rule that does not wait for it. Worth up to 68 %.
Worker 1 died at 6.2 s and was back after 1.8 s: 1 % of the job's time (nobody waited for it; killed by the script of faults).
rule              training  versions  versions/s  samples/s  staleness (versions)   lead  waiting
ssp(staleness=2)    56.0 s        90        1.61       12.9           1.08, max 6  max 2      48%
ssp(staleness=2)    56.0 s        90        1.61       12.9           1.08, max 6  max 2      48%
"""


@pytest.mark.parametrize(("width", "capture"), [(80, CAPTURE_80), (140, CAPTURE_140)])
def test_a_report_is_printed_so(width: int, capture: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    simulate("ssp(staleness=2)", Cluster(workers=3, compute=SLOW, faults=FAULTS), Work(versions=90, batch=8), journal=path)
    summary = Tally.of(read(path)).summary()
    text = printed(*job_tables(summary, width), comparison([summary, summary], width), width=width)
    assert [line.rstrip() for line in text.splitlines()] == capture.splitlines()
