"""Limits are read from trees of files as Linux has them, and a tree that is missing, cut off or nonsense is no error."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.doctor import limits, network
from offbeat.doctor.readings import Limits

UNLIMITED = 9223372036854771712


def tree(root: Path, **files: str) -> Path:
    """Make files below ``root``: a name's ``__`` stands for ``/`` and its ``_dot_`` for a dot."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_nothing_can_be_read(tmp_path: Path) -> None:
    assert limits.limits(tmp_path) == Limits()
    assert limits.memory(tmp_path) == (None, None)
    assert limits.shm(tmp_path / "none") is None
    network.interfaces(tmp_path)


def test_version_2_and_the_groups_around_this_one(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        proc__self__cgroup="0::/job/step\n",
        sys__fs__cgroup__cgroup_dot_controllers="cpu memory",
        sys__fs__cgroup__job__cpu_dot_max="50000 100000",
        sys__fs__cgroup__job__step__cpu_dot_max="max 100000",
        sys__fs__cgroup__job__memory_dot_max="1000000",
        sys__fs__cgroup__job__memory_dot_current="900000",
        sys__fs__cgroup__job__memory_dot_stat="anon 1\ninactive_file 300000\n",
        sys__fs__cgroup__job__step__memory_dot_max="max",
    )
    assert limits.limits(root) == Limits(cpus=0.5, memory_nbytes=1000000, used_nbytes=600000)


def test_version_1_in_a_container_that_sees_the_host_s_path(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        proc__self__cgroup="4:memory:/docker/3f\n2:cpu,cpuacct:/docker/3f\n",
        **{
            "sys__fs__cgroup__cpu,cpuacct__cpu_dot_cfs_quota_us": "150000",
            "sys__fs__cgroup__cpu,cpuacct__cpu_dot_cfs_period_us": "100000",
            "sys__fs__cgroup__memory__memory_dot_limit_in_bytes": "268435456",
            "sys__fs__cgroup__memory__memory_dot_usage_in_bytes": "1000",
        },
    )
    assert limits.limits(root) == Limits(cpus=1.5, memory_nbytes=268435456, used_nbytes=1000)


def test_version_1_without_limits(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        sys__fs__cgroup__cpu__cpu_dot_cfs_quota_us="-1",
        sys__fs__cgroup__cpu__cpu_dot_cfs_period_us="100000",
        sys__fs__cgroup__memory__memory_dot_limit_in_bytes=str(UNLIMITED),
    )
    assert limits.limits(root) == Limits()


@pytest.mark.parametrize("text", ["", "max", "\0\0", "many words in it", "-5 0", "9" * 400, "50000 0"])
def test_nonsense_is_no_limit_or_some_limit_and_never_an_error(tmp_path: Path, text: str) -> None:
    root = tree(
        tmp_path,
        proc__self__cgroup="nonsense\n0::/../../etc\n" + text,
        sys__fs__cgroup__cgroup_dot_controllers="",
        sys__fs__cgroup__cpu_dot_max=text,
        sys__fs__cgroup__memory_dot_max=text,
        sys__fs__cgroup__memory_dot_current=text,
        sys__fs__cgroup__memory_dot_stat=text,
        proc__meminfo=text,
        proc__net__if_inet6=text,
    )
    limits.limits(root)
    limits.memory(root)
    network.interfaces(root)


def test_this_machine() -> None:
    assert limits.memory()[0] or not Path("/proc/meminfo").exists()
    assert any("127.0.0.1" in one.addresses for one in network.interfaces())
    assert network.name("localhost").addresses
    assert network.name("no such name").failure and network.name("x" * 70 + ".example").failure
    (taken,) = network.ports(1, 0)
    assert (taken.number, taken.asked) == (1, True)
