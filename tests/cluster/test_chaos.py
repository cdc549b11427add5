"""``offbeat chaos`` on hosts that have links: these are cut, for shorter and longer than the timeout, and the job goes on."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

from tests.cluster.hosts import Host
from tests.faults.job import AGENT, TRAIN

SCRIPT = """
{first} & first=$!
{second} &
trap 'kill -TERM $first' TERM
wait $first; status=$?
while kill -0 $first 2>/dev/null; do wait $first; status=$?; done
wait
exit $status
"""


def test_links_are_cut_and_come_back(two_hosts: list[Host], token: Path, tmp_path: Path) -> None:
    journal, result = tmp_path / "run.jsonl", tmp_path / "result.json"
    endpoint = ("--nnodes=2", f"--rdzv-endpoint={two_hosts[0].address}:7100", "--token-file", str(token), "--no-tls")
    words = [*AGENT, *endpoint, "--timeout=2", "--slow", "any=0.02", "--journal", str(journal), TRAIN, "--until", str(tmp_path / "never")]
    first, second = (shlex.join(host.words(*words)) for host in two_hosts)
    script = tmp_path / "start-agents.sh"
    script.write_text(SCRIPT.format(first=first, second=second))
    options = ("--faults", "cut", "--mtbf", "5", "--count", "2", "--seed", "4", "--time", "20", "--no-baseline", "--json", str(result))
    files = ("--journal", str(journal), "--timeout", "2", "--", "sh", str(script))
    done = subprocess.run([sys.executable, "-m", "offbeat.cli", "chaos", *options, *files], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    cuts = [fault for fault in found["faults"] if fault["done"]]
    assert cuts and all(fault["proved"] and fault["until_s"] is not None for fault in cuts), found["faults"]
    assert found["outcome"] == "finished"
