"""Whole training steps of an MLP of 25 million parameters between hosts, over links of a limited rate, beside gloo.

Each host is a network namespace of this machine, with one worker and one server, started by ``offbeat agent``; DistributedDataParallel with
gloo runs in the same processes, in turn. ``ratio`` is to it, in folded samples per second: above 1 is faster. Without TLS unless ``--tls``,
since gloo has none. ``CPU ms`` is the processor time of one step, of all processes together. Needs root.

    python -m benchmarks.links --rates 100mbit 1gbit --wire float32 bf16 int8 --json links.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.cluster.hosts import Host, Network, why_not

from benchmarks.job import HERE, PYTHONPATH, save, with_cost
from benchmarks.processor_time import ProcessorTime
from offbeat.core.policy import ServerRule
from offbeat.policies import rule


def run(hosts: list[Host], rate: str, sync: str, wire: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One job: the JSON lines that worker 0 has written."""
    for host in hosts:
        if rate != "none":
            host.limit(rate)
    with tempfile.TemporaryDirectory() as folder:
        out, endpoint = Path(folder, "out.jsonl"), f"{hosts[0].address}:29400"
        agent = [sys.executable, "-m", "offbeat.agent", f"--nnodes={len(hosts)}", f"--rdzv-endpoint={endpoint}", "--nproc-per-node=1"]
        agent += [f"--servers={len(hosts)}"] if isinstance(rule(sync), ServerRule) else []
        agent += ["--sync", sync, "--wire", wire, "--max-restarts=0", "--tls" if options.tls else "--no-tls"]
        script = [str(HERE / "step_worker.py"), "--out", str(out), "--store", str(Path(folder, "store"))]
        script += ["--steps", str(options.steps), "--repeats", str(options.repeats), "--late", "0"]
        environment = {"PYTHONPATH": PYTHONPATH, "OFFBEAT_TOKEN": "only-for-this-benchmark", "GLOO_SOCKET_IFNAME": "eth0"}
        logs = [Path(folder, f"log{host.number}") for host in hosts]
        agents = []
        with ProcessorTime() as cost:
            for host, log in zip(hosts, logs, strict=True):
                with log.open("w") as sink:
                    command = [*agent, *script]
                    agents.append(host.popen(command, env=environment, stdout=sink, stderr=subprocess.STDOUT, cwd=str(HERE.parent)))
            failed = [agent.wait() for agent in agents]
        if any(failed):
            sys.exit("\n".join(log.read_text() for log in logs))
        return [with_cost(json.loads(line), cost) for line in out.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rates", nargs="+", default=["1gbit"], metavar="RATE", help="as tc writes them; none: no limit")
    parser.add_argument("--rules", nargs="+", default=["bsp"], metavar="RULE")
    parser.add_argument("--wire", nargs="+", default=["float32"], metavar="FORMAT")
    parser.add_argument("--steps", type=int, default=8, help="of each worker, per repeat (default: 8)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if (why := why_not()) is not None:
        sys.exit(why)
    table = Table(title=f"{args.hosts} hosts, 25.2 M parameters: folded samples per second", title_justify="left")
    for name in ("link", "rule", "wire", "offbeat", "DDP", "ratio", "least", "most", "CPU ms", "of servers", "DDP's"):
        table.add_column(name, justify="right")
    rows = []
    for rate, sync, wire in product(args.rates, args.rules, args.wire):
        with Network(args.hosts) as hosts:
            results = run(hosts, rate, sync, wire, args)
        ratios = sorted(result["samples_per_s"] / result["ddp_samples_per_s"] for result in results)
        ours, ddp = (median(result[key] for result in results) for key in ("samples_per_s", "ddp_samples_per_s"))
        costs = {key: median(result[key] for result in results) for key in ("workers_cpu_ms", "servers_cpu_ms", "ddp_cpu_ms")}
        rows.append({"rate": rate, "sync": sync, "wire": wire, "samples_per_s": ours, "ddp_samples_per_s": ddp, "ratios": ratios, **costs})
        print(json.dumps(rows[-1]), flush=True)  # a session may be cut off before the table
        spread = (f"{value:.2f}" for value in (median(ratios), ratios[0], ratios[-1]))
        cpu = (costs["workers_cpu_ms"] + costs["servers_cpu_ms"], costs["servers_cpu_ms"], costs["ddp_cpu_ms"])
        table.add_row(rate, sync, wire, f"{ours:.2f}", f"{ddp:.2f}", *spread, *(f"{value:.0f}" for value in cpu))
    Console().print(table)
    save(args.json, rows)


if __name__ == "__main__":
    main()
