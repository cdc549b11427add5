"""A spot fleet's night: instances of three zones come and go as a trace says, and one job trains on whatever is there.

Each zone is a network namespace of this machine, each instance an ``offbeat agent`` with one worker. A trace has the number of instances
that a zone had at each tick, in the format of the spot traces of "Can't Be Late" (NSDI '24):
``{"metadata": {"gap_seconds": 300}, "data": [...]}``. An instance that is taken away gets SIGTERM 120 s (of the trace) before it is killed,
or, every second one by chance, nothing before SIGKILL. The benchmark does for the fleet what a loop in a shell would: an agent that has
ended while its instance lives is started again by the same command, and the first machine is in another zone once its own has no instance.
Needs root.

    python -m benchmarks.night --zones us-west-2c.json us-east-1f.json us-east-2a.json --start 2280 --ticks 120 --minutes 120 --out night \\
        -- examples/mnist.py --data ../shared/data/mnist --epochs 1000

*Goodput*: samples whose gradients are in the final parameters, over those of a fleet to which changes cost nothing: at each number of
instances, the rate that the job had from `SETTLED_S` after a change until the next one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.hosts import Host, Network, until, why_not

from benchmarks.job import save
from offbeat.chaos import procfs
from offbeat.journal.file import Records
from offbeat.journal.summary import Tally
from offbeat.types import Seconds

PORT, PAGE, RESTARTS = 29400, 7860, 99
NOTICE_S: Seconds = 120.0
"""Of the trace's time, as AWS gives it."""
LOOK_S: Seconds = 0.5
BECAME = ("folded", "dropped", "rejected", "skipped", "unused", "returned")
"""What has become of the indices of an epoch, in its report."""
SETTLED_S: Seconds = 60.0
"""After an instance came or went: until then processes start, and `auto` learns."""

SHOOT = """
import sys
from playwright.sync_api import sync_playwright
with sync_playwright() as playwright:
    page = playwright.chromium.launch(executable_path=sys.argv[1], args=["--no-sandbox"]).new_page(viewport={"width": 1280, "height": 1000})
    page.goto(sys.argv[2])
    page.wait_for_timeout(15000)
    page.screenshot(path=sys.argv[3], full_page=True)
"""


@dataclass
class Instance:
    """One machine that is paid for."""

    host: Host
    mark: str
    began: float
    agent: subprocess.Popen[str] | None = None
    doomed: float | None = None
    """When it is killed, after its notice."""

    def kill(self) -> None:
        """End all processes of the machine at once."""
        for process in procfs.marked(self.mark):
            procfs.send(process, signal.SIGKILL, self.mark)
        if self.agent is not None:
            self.agent.wait()


@dataclass
class Zone:
    """A namespace and its instances."""

    host: Host
    seats: int
    counts: Sequence[int]
    """By tick: how many there are."""
    instances: list[Instance] = field(default_factory=list)

    @property
    def lasting(self) -> list[Instance]:
        return [instance for instance in self.instances if instance.doomed is None]


class Fleet:
    """The instances, and the job that runs on them, start after start.

    Args:
        zones: where they are.
        options: of the command line.
        tick_s: how long one tick of the trace takes here.
    """

    def __init__(self, zones: Sequence[Zone], options: argparse.Namespace, tick_s: Seconds) -> None:
        self._zones, self._options, self._tick_s = zones, options, tick_s
        self._draw = random.Random(options.seed)
        self._notice_s = NOTICE_S * tick_s / options.gap_s
        self._token = secrets.token_hex(16)
        self._head: Zone | None = None
        self.started: list[Seconds] = []
        """When the job was started, and started again."""
        self.changes: list[tuple[Seconds, int]] = []
        """When an instance came or went, and how many there were from then on."""
        self.paid_s: Seconds = 0.0
        self.happened: list[str] = []
        self._began = time.monotonic()

    @property
    def now(self) -> Seconds:
        """The seconds of the night so far."""
        return time.monotonic() - self._began

    def note(self, text: str) -> None:
        line = f"{self.now:7.1f} s  {text}"
        self.happened.append(line)
        print(line, flush=True)

    def run(self, seconds: Seconds, watch: Callable[[Seconds, Host, int], None]) -> None:
        """Follow the trace for so long."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            tick = int((now - self._began) / self._tick_s)
            for number, zone in enumerate(self._zones):
                self._follow(number, zone, now, zone.counts[min(tick, len(zone.counts) - 1)])
            alive = sum(len(zone.lasting) for zone in self._zones)
            if not self.changes or alive != self.changes[-1][1]:
                self.changes.append((self.now, alive))
            self._agents()
            if self._head is not None and self._head.instances:
                watch(self.now, self._head.host, len(self.started))
            time.sleep(LOOK_S)

    def _follow(self, number: int, zone: Zone, now: float, wanted: int) -> None:
        for instance in [one for one in zone.instances if one.doomed is not None and one.doomed <= now]:
            self._gone(zone, instance)
        for _ in range(len(zone.lasting) - wanted):
            instance = self._draw.choice(zone.lasting)
            if self._draw.random() < 0.5:
                self.note(f"zone {number}: an instance gets its notice")
                instance.doomed = now + self._notice_s
                if instance.agent is not None:
                    instance.agent.send_signal(signal.SIGTERM)
            else:
                self.note(f"zone {number}: an instance is gone")
                self._gone(zone, instance)
        for _ in range(wanted - len(zone.lasting)):
            self.note(f"zone {number}: an instance comes")
            zone.instances.append(Instance(zone.host, secrets.token_hex(8), now))

    def _gone(self, zone: Zone, instance: Instance) -> None:
        instance.kill()
        zone.instances.remove(instance)
        self.paid_s += time.monotonic() - instance.began

    def _agents(self) -> None:
        """Start an agent where there is none. Once the first machine's zone is empty, and the job has ended, all are started again."""
        if self._head is not None and self._head.instances and not self._head.lasting:
            return  # the job writes its last checkpoint
        if self._head is None or not self._head.lasting:
            head = max(self._zones, key=lambda zone: len(zone.lasting))
            if not head.lasting:
                return
            if self._head is not None:
                self.note(f"the first machine is in zone {self._zones.index(head)} now")
            self._head = head
            for instance in [one for zone in self._zones for one in zone.lasting]:
                instance.kill()
                instance.agent = None
        others = [(zone, instance) for zone in self._zones if zone is not self._head for instance in zone.lasting]
        first, *near = [(self._head, instance) for instance in self._head.lasting]
        for zone, instance in (first, *others, *near):  # a second server is on the second machine: in another zone
            if instance.agent is None or instance.agent.poll() is not None:
                self._start(zone, instance)

    def _start(self, zone: Zone, instance: Instance) -> None:
        assert self._head is not None
        first = zone is self._head and not self._listening()
        if instance.agent is not None:
            self.note(f"zone {self._zones.index(zone)}: an agent has ended with status {instance.agent.returncode}, and is started again")
        if first:
            self.started.append(self.now)
        out = Path(self._options.out)
        words = [sys.executable, "-m", "offbeat.agent", f"--nnodes={self._options.servers}:{sum(zone.seats for zone in self._zones)}"]
        words += [f"--rdzv-endpoint={self._head.host.address}:{PORT}", "--sync", self._options.sync, "--start-timeout=60"]
        words += [f"--servers={self._options.servers}", "--replicas=1"]
        words += [f"--checkpoint={out / 'saved'}", f"--every={self._options.every:g}", "--auto-resume", f"--max-restarts={RESTARTS}"]
        words += [f"--journal={out / f'night-{len(self.started)}.jsonl'}", f"--summary={out / f'night-{len(self.started)}.json'}"]
        words += [f"--dashboard={PAGE}", *(("--slow", self._options.slow) if self._options.slow else ()), *self._options.script]
        environment = {"OFFBEAT_TOKEN": self._token, "OMP_NUM_THREADS": "1", procfs.MARK: instance.mark}
        log = (out / f"agent-{len(self.started)}-{instance.mark}.log").open("a")
        with log:
            instance.agent = zone.host.popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        if first:
            self.note(f"start {len(self.started)} of the job")
            agent = instance.agent
            until("the supervisor listens", lambda: self._listening() or agent.poll() is not None)

    def _listening(self) -> bool:
        assert self._head is not None
        return str(PORT) in self._head.host.run("ss", "-Htln", f"sport = :{PORT}")

    def end(self) -> None:
        """Tell the first machine's agents to end the job, which makes its last checkpoint, and pay for all instances."""
        agents = [instance.agent for zone in self._zones for instance in zone.lasting if instance.agent is not None]
        for agent in agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
        for agent in agents:
            with_limit(agent)
        for zone in self._zones:
            for instance in list(zone.instances):
                self._gone(zone, instance)


def with_limit(agent: subprocess.Popen[str], seconds: Seconds = 60.0) -> None:
    try:
        agent.wait(seconds)
    except subprocess.TimeoutExpired:
        agent.kill()


class Start:
    """What the journal says of one start of the job."""

    def __init__(self, path: Path) -> None:
        self.resumed = self.takeovers = 0
        self.folded: list[tuple[Seconds, int, int]] = []
        """Of each folded gradient: when, the version that has it, and its samples."""
        self.reports: list[dict[str, Any]] = []
        self.tally = Tally()
        for record in Records(path):
            self.tally.add(record)
            match record["kind"]:
                case "job":
                    self.resumed = record.get("resumed") or 0
                case "settle" if record["fate"] == "folded":
                    self.folded.append((record["t"], record["version"], record["samples"]))
                case "epoch_ended":
                    self.reports.append(record["report"])
                case "process":
                    self.takeovers += record["what"] == "taken over"

    def row(self, until_version: float) -> dict[str, Any]:
        """Return its figures; the versions after `until_version` were lost."""
        summary = self.tally.summary()
        return {
            "resumed": self.resumed,
            "version": summary["version"],
            "samples": sum(samples for _, version, samples in self.folded if version <= until_version),
            "fates": summary["fates"],
            "deaths": sum(worker["deaths"] for worker in summary["per_worker"]),
            "takeovers": self.takeovers,
            "rules": [change["rule"] for change in summary["rule_changes"]],
            "epochs": len(self.reports),
            "indices": {what: sum(report[what] for report in self.reports) for what in ("indices", *BECAME)},
            "problems": self.tally.problems(),
        }


def goodput(changes: Sequence[tuple[Seconds, int]], folded: Sequence[tuple[Seconds, int]], seconds: Seconds) -> float:
    """Return the samples that were folded over those that would have been if changes cost nothing, where the night tells.

    >>> goodput([(0.0, 1), (200.0, 2)], [(t, 10) for t in range(20, 400)], seconds=400.0)
    0.95
    """
    whole_s: defaultdict[int, float] = defaultdict(float)
    calm_s: defaultdict[int, float] = defaultdict(float)
    calm: Counter[int] = Counter()
    for (begin, alive), end in zip(changes, [*(t for t, _ in changes[1:]), seconds], strict=True):
        settled = min(end, begin + SETTLED_S)
        whole_s[alive] += end - begin
        calm_s[alive] += end - settled
        calm[alive] += sum(samples for t, samples in folded if settled <= t < end)
    known = {alive for alive, at in calm_s.items() if at > 0.0}
    could = sum(whole_s[alive] * calm[alive] / calm_s[alive] for alive in known)
    could *= seconds / sum(whole_s[alive] for alive in known)
    return sum(samples for _, samples in folded) / could


def picture(host: Host, folder: Path, start: int, path: Path) -> None:
    """Take a picture of the page of the running job, whose address the first machine's agent has printed."""
    said = "".join(log.read_text(errors="replace") for log in folder.glob(f"agent-{start}-*.log"))
    if (address := re.search(r"http://127\.0\.0\.1:\d+/\S+", said)) is None:
        return
    words = [sys.executable, "-c", SHOOT, shutil.which("chromium") or "chromium", address[0], str(path)]
    with_limit(host.popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))


@contextmanager
def zones(options: argparse.Namespace, counts: Sequence[Sequence[int]]) -> Iterator[list[Zone]]:
    with Network(len(counts)) as hosts:
        made = [Zone(host, seats, of) for host, seats, of in zip(hosts, options.seats, counts, strict=True)]
        try:
            yield made
        finally:
            for zone in made:
                for instance in zone.instances:
                    instance.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zones", nargs="+", type=Path, required=True, help="a trace for each")
    parser.add_argument("--seats", nargs="+", type=int, default=[3, 3, 2], help="instances of each zone when all are there")
    parser.add_argument("--start", type=int, default=0, help="the first tick of the traces")
    parser.add_argument("--ticks", type=int, default=120)
    parser.add_argument("--minutes", type=float, default=120.0, help="that these ticks take here")
    parser.add_argument("--sync", default="auto(allow=biased)")
    parser.add_argument("--servers", type=int, default=1, help="each on a machine of its own; the loss of the first ends the start")
    parser.add_argument("--slow", default="", help="as offbeat run has it")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two checkpoints")
    parser.add_argument("--pictures", nargs="*", type=float, default=[0.33, 0.66, 0.98], help="of the page, at these parts of the night")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("script", nargs="+")
    options = parser.parse_args()
    if (why := why_not()) is not None:
        sys.exit(why)
    traces = [json.loads(path.read_text()) for path in options.zones]
    options.gap_s = traces[0]["metadata"]["gap_seconds"]
    whole = [max(trace["data"]) for trace in traces]
    of = [trace["data"][options.start : options.start + options.ticks] for trace in traces]
    counts = [[-(-seats * count // most) for count in row] for row, seats, most in zip(of, options.seats, whole, strict=True)]
    options.out.mkdir(parents=True, exist_ok=True)
    seconds = 60 * options.minutes
    due = [part * seconds for part in options.pictures]

    def watch(now: Seconds, host: Host, start: int) -> None:
        if due and now >= due[0]:
            picture(host, options.out, start, options.out / f"page-{int(due.pop(0))}.png")

    with zones(options, counts) as made:
        fleet = Fleet(made, options, seconds / options.ticks)
        fleet.run(seconds, watch)
        fleet.end()
    paths = [options.out / f"night-{number}.jsonl" for number in range(1, len(fleet.started) + 1)]
    found = [(begun, Start(path)) for begun, path in zip(fleet.started, paths, strict=True) if path.exists()]
    lost_after = [*(start.resumed for _, start in found[1:]), math.inf]
    rows = [start.row(version) for (_, start), version in zip(found, lost_after, strict=True)]
    folded = [
        (begun + t, samples)
        for (begun, start), last in zip(found, lost_after, strict=True)
        for t, version, samples in start.folded
        if version <= last
    ]
    result = {"goodput": goodput(fleet.changes, folded, seconds), "paid_s": fleet.paid_s, "starts": rows, "load": os.getloadavg()}
    print(json.dumps(result, indent=1), flush=True)
    save(options.out / "night.json", [{**result, "happened": fleet.happened, "changes": fleet.changes}])


if __name__ == "__main__":
    main()
