"""Is the simulator right about links that messages share? Versions per second of live jobs between hosts, beside those of the simulator.

Each host is a network namespace of this machine with one worker, started by ``offbeat agent``, behind a link of a limited rate; servers are
on hosts 0, 1 and so on, as agents place them. A worker's step is a sleep, which varies by 10 %, and nothing of a job that has run enters
its prediction: ``simulate --hosts --link --model-size``. Headers count little here: the kernel hands packets of 64 KB to a device. Needs
root.

    python -m benchmarks.network --rates 200mbit 800mbit --rules bsp asp --servers 1 2 --json network.json
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.cluster.hosts import Host, Network, why_not

from benchmarks.job import HERE, PYTHONPATH, save
from offbeat.journal.file import Records
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.types import Seconds

SETTLED_S: Seconds = 3.0
"""Since the first fold: not counted, as processes start one after another."""


def live(hosts: list[Host], rate: str, sync: str, servers: int, options: argparse.Namespace) -> float:
    """Run a job and return its versions per second, from `SETTLED_S` after its first fold until the first script ends."""
    for host in hosts:
        host.limit(rate)
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(options.keep or folder, f"{sync}-{rate}-{servers}.jsonl")
        agent = [sys.executable, "-m", "offbeat.agent", f"--nnodes={len(hosts)}", f"--rdzv-endpoint={hosts[0].address}:29400"]
        agent += ["--nproc-per-node=1", f"--servers={servers}", "--sync", sync, "--max-restarts=0", "--no-tls"]
        script = [str(HERE / "network_worker.py"), str(options.model_mb), str(options.compute), str(options.seconds)]
        environment = {"PYTHONPATH": PYTHONPATH, "OFFBEAT_TOKEN": "only-for-this-benchmark", "OMP_NUM_THREADS": "1"}
        logs = [Path(folder, f"log{host.number}") for host in hosts]
        agents = []
        for host, log in zip(hosts, logs, strict=True):
            own = [f"--journal={journal}"] if host.number == 0 else []
            with log.open("w") as sink:
                words = [*agent, *own, *script]
                agents.append(host.popen(words, env=environment, stdout=sink, stderr=subprocess.STDOUT, cwd=str(HERE.parent)))
        failed = [agent.wait() for agent in agents]
        if any(failed):
            sys.exit("\n".join(log.read_text() for log in logs))
        return rate_of(journal)


def rate_of(journal: Path) -> float:
    """Return the versions per second of a live job."""
    folds: list[Seconds] = []
    for record in Records(journal):
        if record["kind"] == "state_changed" and record["state"] == "finished":
            break
        if record["kind"] == "fold":
            folds.append(record["t"])
    counted = [t for t in folds if t >= folds[0] + SETTLED_S]
    return (len(counted) - 1) / (counted[-1] - counted[0])


def predicted(rate: str, sync: str, servers: int, options: argparse.Namespace) -> float:
    """Return the versions per second that the simulator says."""
    low, high = 0.9 * options.compute, 1.1 * options.compute
    cluster = Cluster(
        workers=options.hosts,
        servers=servers,
        compute=f"uniform(low={low}, high={high})",
        link=rate,
        model_size=1e6 * options.model_mb,
        hosts=options.hosts,
    )
    return float(simulate(sync, cluster, Work(time_s=100.0)).summary["versions_per_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--rates", nargs="+", default=["200mbit", "800mbit"], metavar="RATE", help="as tc writes them")
    parser.add_argument("--rules", nargs="+", default=["bsp", "asp"], metavar="RULE")
    parser.add_argument("--servers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--model-mb", type=float, default=8.0, help="of float32 parameters")
    parser.add_argument("--compute", type=float, default=0.2, help="seconds of a step, before it sends")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a job, from a worker's first step")
    parser.add_argument("--keep", type=Path, help="keep the journals in this folder, for offbeat advise --link")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if (why := why_not()) is not None:
        sys.exit(why)
    table = Table(title=f"{args.hosts} hosts, {args.model_mb:g} MB, {args.compute:g} s: versions per second", title_justify="left")
    for name in ("link", "rule", "servers", "live", "simulated", "error", "without link"):
        table.add_column(name, justify="right")
    rows: list[dict[str, Any]] = []
    for rate, sync, servers in product(args.rates, args.rules, args.servers):
        with Network(args.hosts) as hosts:
            measured = live(hosts, rate, sync, servers, args)
        said, free = predicted(rate, sync, servers, args), predicted("1tbit", sync, servers, args)
        row = {"rate": rate, "sync": sync, "servers": servers, "live": measured, "simulated": said, "free": free}
        rows.append(row)
        print(f"{time.strftime('%H:%M:%S')} {row}", flush=True)
        table.add_row(rate, sync, str(servers), f"{measured:.3g}", f"{said:.3g}", f"{said / measured - 1.0:+.0%}", f"{free:.3g}")
    Console().print(table)
    save(args.json, rows)


if __name__ == "__main__":
    main()
