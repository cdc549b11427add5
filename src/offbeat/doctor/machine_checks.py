"""Judge the readings of one machine: software, cores, memory, files. Pure; nothing is read here."""

from __future__ import annotations

from typing import Final

from offbeat.doctor.findings import Finding, good, note, problem
from offbeat.doctor.readings import Machine, Package

OLDEST_PYTHON: Final = (3, 11)
PROCESS_NBYTES: Final = 400 << 20
"""Memory of a process that has imported PyTorch, where it was not measured."""
SHM_NBYTES: Final = 1 << 30
FILES_EACH: Final = 8
"""Descriptors that a supervisor has open for each worker: its connection, its pipes, its process, and what a restart needs for a moment."""
FILES_OWN: Final = 64
MIB: Final = 1 << 20
THREADS: Final = "OMP_NUM_THREADS"


def check_machine(machine: Machine) -> list[Finding]:
    """Return what is to be said of one machine, without its network."""
    return [
        _python(machine),
        _packages(machine),
        *_extras(machine),
        _torch(machine),
        *_gpus(machine),
        _cores(machine),
        _memory(machine),
        _sharing(machine),
        _shm(machine),
        _files(machine),
    ]


def _python(machine: Machine) -> Finding:
    version = ".".join(map(str, machine.python))
    seen = f"{version} on {machine.system}, offbeat {machine.offbeat}"
    if machine.python[:2] < OLDEST_PYTHON:
        return problem("Python", seen, f"use Python {'.'.join(map(str, OLDEST_PYTHON))} or newer", version=version)
    if not machine.system.startswith("Linux"):
        return note("Python", seen, "use Linux: elsewhere workers share no memory, and are not forks of one process", version=version)
    return good("Python", seen, version=version)


def _packages(machine: Machine) -> Finding:
    needed = [package for package in machine.packages if not package.extras]
    versions = {package.name: package.version for package in needed}
    if not needed:
        return note("packages", "offbeat is not installed as a package: its needs cannot be read", "pip install .")
    if lacking := [package for package in needed if not _fits(package)]:
        seen = "; ".join(_lack(package) for package in lacking)
        install = " ".join(f"'{package.name}>={package.least}'" for package in lacking)
        return problem("packages", seen, f"pip install {install}", **{"versions": versions})
    shown = ", ".join(f"{package.name} {package.version}" for package in needed if package.name != "torch")
    return good("packages", shown, **{"versions": versions})


def _extras(machine: Machine) -> list[Finding]:
    optional = [package for package in machine.packages if package.extras]
    if not optional:
        return []
    versions = {package.name: package.version for package in optional}
    there = [package for package in optional if package.version is not None]
    old = [package for package in there if not _fits(package)]
    missing = sorted({extra for package in optional if package.version is None for extra in package.extras})
    seen = ", ".join(f"{package.name} {package.version}" for package in there) or "none installed"
    if missing:
        seen += f"; not installed: {', '.join(missing)}"
    if old:
        extras = ",".join(sorted({package.extras[0] for package in old}))
        return [note("extras", "; ".join(map(_lack, old)), f"pip install --upgrade 'offbeat[{extras}]'", **{"versions": versions})]
    return [good("extras", seen, **{"versions": versions})]


def _lack(package: Package) -> str:
    return f"{package.name} {package.version or 'is not installed'}" + (f", {package.least} or newer is needed" if package.least else "")


def _fits(package: Package) -> bool:
    return package.version is not None and _release(package.version) >= _release(package.least)


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, for comparison.

    >>> _release("2.13.0+cpu") >= _release("2.6"), _release("2.6rc1"), _release("")
    (True, (2, 6), ())
    """
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        digits = part[: next((at for at, letter in enumerate(part) if not letter.isdecimal()), len(part))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _torch(machine: Machine) -> Finding:
    torch = machine.torch
    if torch.failure:
        return problem("PyTorch", f"cannot be imported: {torch.failure}", "install it again: pip install --force-reinstall torch")
    devices = f"CUDA {torch.cuda}, {len(torch.devices)} device{'s' * (len(torch.devices) != 1)}" if torch.cuda else "for processors only"
    seen = f"{torch.version}, {devices}; imported in {torch.import_s:.1f} s, {torch.resident_nbytes // MIB} MiB"
    return good("PyTorch", seen, version=torch.version, import_s=torch.import_s, resident_bytes=torch.resident_nbytes)


def _gpus(machine: Machine) -> list[Finding]:
    driver, torch = machine.driver, machine.torch
    if driver.version is None and not torch.devices:
        return []
    found: list[Finding] = []
    names = ", ".join(torch.devices) or ", ".join(gpu.name for gpu in driver.gpus) or "no name known"
    if driver.version is not None and not torch.failure and not torch.devices:
        why = "this PyTorch is built without CUDA" if torch.cuda is None else f"PyTorch (CUDA {torch.cuda}) cannot use them"
        remedy = "install a build of PyTorch for CUDA that suits this driver: https://pytorch.org/get-started; look at CUDA_VISIBLE_DEVICES"
        found.append(note("GPU", f"driver {driver.version}, {names}; {why}: gradients are computed by the processor", remedy))
    else:
        version = "" if driver.version is None else f"driver {driver.version}, "
        found.append(good("GPU", version + names, driver=driver.version, names=list(torch.devices)))
    if driver.failure:
        found.append(note("GPU", f"memory, heat and clocks are not read: {driver.failure}", "pip install nvidia-ml-py"))
    for number, gpu in enumerate(driver.gpus):
        used = gpu.nbytes - gpu.free_nbytes
        seen = f"{gpu.free_nbytes // MIB:,} of {gpu.nbytes // MIB:,} MiB free"
        seen += "" if gpu.temperature_c is None else f", {gpu.temperature_c} degrees C"
        name, figures = f"GPU {number}", {"free_bytes": gpu.free_nbytes, "bytes": gpu.nbytes, "temperature_c": gpu.temperature_c}
        if gpu.throttled:
            found.append(note(name, f"{seen}; its clock is reduced: {gpu.throttled}", "look at nvidia-smi -q -d PERFORMANCE", **figures))
        elif used > gpu.nbytes // 10:
            found.append(note(name, f"{seen}: other processes use it", "look at nvidia-smi, or choose by CUDA_VISIBLE_DEVICES", **figures))
        else:
            found.append(good(name, seen, **figures))
    return found


def usable_cores(machine: Machine) -> float:
    """Return for how many cores' worth of computing this machine has room, by affinity and control groups."""
    cores = float(machine.affinity or machine.cores)
    return cores if machine.limits.cpus is None else min(cores, machine.limits.cpus)


def _cores(machine: Machine) -> Finding:
    allowed, quota = machine.affinity or machine.cores, machine.limits.cpus
    usable = usable_cores(machine)
    figures = {"cores": machine.cores, "affinity": machine.affinity, "cgroup_cpus": quota, "usable": usable}
    if quota is not None and quota < allowed:
        threads = max(1, int(quota))
        seen = f"{_few(quota)} of {machine.cores} by the control group, although processes see {allowed}: more threads are stopped in turn"
        remedy = f"workers times {THREADS}: at most {threads}; or give the container more (docker --cpus, limits.cpu)"
        return note("cores", seen, remedy, **figures)
    if allowed < machine.cores:
        return note("cores", f"{allowed} of {machine.cores} by affinity", "look at taskset, Slurm's --cpus-per-task, or cpusets", **figures)
    return good("cores", f"{allowed}, all of this machine, no quota", **figures)


def _few(cores: float) -> str:
    return f"{cores:g}" if cores < 10 else f"{cores:.0f}"


def _memory(machine: Machine) -> Finding:
    limit, available = machine.limits.memory_nbytes, machine.available_nbytes
    left = None if limit is None else max(0, limit - (machine.limits.used_nbytes or 0))
    known = [nbytes for nbytes in (left, available) if nbytes is not None]
    figures = {"bytes": machine.memory_nbytes, "available_bytes": available, "cgroup_bytes": limit, "left_bytes": min(known, default=None)}
    if not known:
        return note("memory", "neither the machine's nor a limit can be read", "mount /proc", **figures)
    room = min(known)
    each = machine.torch.resident_nbytes or PROCESS_NBYTES
    seen = f"{room // MIB:,} MiB are free" + (
        f" of the control group's {limit // MIB:,}"
        if limit is not None and room == left
        else f" of {(machine.memory_nbytes or room) // MIB:,}"
    )
    if room < each:
        raised = "the container's memory (docker --memory, limits.memory)" if room == left else "the machine's memory"
        return problem("memory", f"{seen}; a process with PyTorch takes {each // MIB}", f"raise {raised}", **figures)
    if room < 4 * each:
        return note(
            "memory", f"{seen}; a process with PyTorch takes {each // MIB}", "start few workers, which share what is imported", **figures
        )
    return good("memory", seen, **figures)


def _sharing(machine: Machine) -> Finding:
    if not machine.memfd_failure:
        return good("shared memory", "blocks of memory can be shared between processes (memfd)")
    return problem(
        "shared memory",
        f"processes cannot share memory: {machine.memfd_failure}",
        "allow memfd_create (the container's seccomp profile), or set OFFBEAT_HOST=apart, with which all processes use TCP",
    )


def _shm(machine: Machine) -> Finding:
    for_loader = "offbeat does not use it; a DataLoader with num_workers > 0 shares its batches there"
    if machine.shm is None:
        return note("/dev/shm", f"there is none. {for_loader}", "mount a tmpfs at /dev/shm, or use num_workers=0")
    size, free = machine.shm.nbytes, machine.shm.free_nbytes
    seen = f"{free // MIB:,} of {size // MIB:,} MiB are free"
    if free < SHM_NBYTES:
        remedy = (
            "docker --shm-size=8g, Kubernetes: an emptyDir with medium: Memory" if size < SHM_NBYTES else "remove what others left there"
        )
        return note("/dev/shm", f"{seen}. {for_loader}, and dies by a bus error when it is full", remedy, bytes=size, free_bytes=free)
    return good("/dev/shm", seen, bytes=size, free_bytes=free)


def _files(machine: Machine) -> Finding:
    if machine.files is None:
        return good("open files", "no limit", limit=None)
    workers = max(0, (machine.files - FILES_OWN) // FILES_EACH)
    seen = f"at most {machine.files:,} a process: a supervisor has room for about {workers:,} workers"
    raise_to = 65536 if machine.files_hard is None else min(65536, machine.files_hard)
    can = "" if raise_to > machine.files else "; as root, since the hard limit is as low (limits.conf, LimitNOFILE=, docker --ulimit)"
    remedy = f"ulimit -n {max(raise_to, 65536 if can else raise_to)}{can}"
    figures = {"limit": machine.files, "hard_limit": machine.files_hard, "workers": workers}
    if workers < 2:
        return problem("open files", seen, remedy, **figures)
    if workers < 64 or workers < 2 * usable_cores(machine):
        return note("open files", seen, remedy, **figures)
    return good("open files", seen, **figures)
