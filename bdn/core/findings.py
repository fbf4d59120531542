"""Judgements of ``bdn doctor``: from measured facts to findings. The callers measure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from bdn.core.units import format_duration, format_size

Level = Literal["ok", "note", "problem"]
Fact = str | int | float | bool | None
Facts = Mapping[str, Fact]

_KERNEL_OF_SYNCS: Final = (5, 8)  # syncfs(2) reports errors
_KERNEL_OF_MOUNTS: Final = (5, 12)  # mount_setattr(2)
_FEW_BYTES: Final = 20 * 10**9  # less than a model of 10 billion parameters
_FEW_CONNECTIONS: Final = 4096  # the most that a server of BDN accepts
_PROCESS_BYTES: Final = 512 * 1024**2  # an agent or a mirror without buffers
_BUFFER_BYTES: Final = 8 * 1024**2
_CLOCK_NOTE_SECONDS: Final = 5.0
_CLOCK_PROBLEM_SECONDS: Final = 60.0  # signed requests to buckets are valid for five minutes
_CERTIFICATE_NOTE_SECONDS: Final = 30 * 86400.0
_NOT_LOCAL: Final = frozenset({"nfs", "cifs", "fuse", "ceph", "lustre", "9p"})


@dataclass(frozen=True, slots=True)
class Finding:
    """``advice`` is what to do about a note or a problem, in one sentence."""

    check: str
    level: Level
    message: str
    advice: str | None = None
    facts: Facts = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.level == "ok") != (self.advice is None):
            raise ValueError(f"finding {self.check}: a note or a problem has advice, and nothing else has")


@dataclass(frozen=True, slots=True)
class Measured:
    """A rate in bytes per second, or the reason why it is unknown."""

    bytes_per_second: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        rate = self.bytes_per_second
        return f"unknown ({self.reason})" if rate is None else f"{format_size(int(rate))}/s"


@dataclass(frozen=True, slots=True)
class Examination:
    """The findings about an agent's directories and launchers, and the rates of its disk."""

    findings: tuple[Finding, ...]
    write: Measured
    read: Measured


def worst(findings: Iterable[Finding]) -> Level:
    levels = {finding.level for finding in findings}
    return "problem" if "problem" in levels else "note" if "note" in levels else "ok"


def judge_settings(problems: str) -> list[Finding]:
    """A finding for each line, which names a wrong setting."""
    remedy = "Correct the setting, or unset it; docs/contract.md lists all settings."
    return [Finding("settings", "problem", line, remedy) for line in problems.split("\n")]


# --- the machine ---


def judge_kernel(release: str, version: tuple[int, int]) -> Finding:
    facts: Facts = {"release": release}
    if version >= _KERNEL_OF_MOUNTS:
        return Finding("kernel", "ok", f"Linux {release}", None, facts)
    lacks = "mounts take four steps instead of one"
    if version < _KERNEL_OF_SYNCS:
        lacks += ", and thousands of small files are synced one by one"
    return Finding("kernel", "note", f"Linux {release}: {lacks}", "Upgrade to Linux 5.12 or newer.", facts)


def judge_memory(total: int, limit: int | None, byte_threads: int) -> Finding:
    """``limit`` of the cgroup; None: it has no limit."""
    usable = total if limit is None else min(total, limit)
    needed = _PROCESS_BYTES + 3 * byte_threads * _BUFFER_BYTES
    message = f"{format_size(total)}, " + ("no cgroup limit" if limit is None else f"cgroup limit {format_size(limit)}")
    facts: Facts = {"total_bytes": total, "cgroup_limit_bytes": limit, "needed_bytes": needed}
    if usable >= needed:
        return Finding("memory", "ok", message, None, facts)
    advice = f"Give the agent {format_size(needed)}, or set BDN_AGENT_BYTE_THREADS below {byte_threads}."
    return Finding("memory", "note", f"{message}: an agent may need {format_size(needed)}", advice, facts)


def judge_descriptors(limit: int, connections: int) -> Finding:
    """``limit`` of open files that a service of this user gets, and the ``connections`` that it then accepts."""
    facts: Facts = {"limit": limit, "connections": connections}
    message = f"{limit}, for {connections} connections of each server"
    if connections >= _FEW_CONNECTIONS:
        return Finding("open files", "ok", message, None, facts)
    advice = "Raise the hard limit of open files to 20000 or more (LimitNOFILE= of systemd, nofile of limits.conf)."
    return Finding("open files", "note", message, advice, facts)


def judge_clock(offset_seconds: float | None) -> Finding:
    """``offset_seconds`` of this clock against the mirror's, which is known to a second; None: no mirror answered."""
    facts: Facts = {"offset_seconds": offset_seconds}
    if offset_seconds is None:
        advice = "Start the mirror, and check that NTP runs here."
        return Finding("clock", "note", "not compared: no mirror answers", advice, facts)
    off = abs(offset_seconds)
    if off <= _CLOCK_NOTE_SECONDS:
        return Finding("clock", "ok", "agrees with the mirror's", None, facts)
    way = "ahead of" if offset_seconds > 0 else "behind"
    level: Level = "problem" if off > _CLOCK_PROBLEM_SECONDS else "note"
    message = f"{format_duration(off)} {way} the mirror's: grants and signed requests may be refused"
    return Finding("clock", level, message, "Let NTP set the clocks of both machines.", facts)


def judge_certificate(setting: str, file: str, left_seconds: float) -> Finding:
    check, left = f"certificate of {setting}", format_duration(left_seconds)
    facts: Facts = {"file": file, "left_seconds": round(left_seconds)}
    if left_seconds >= _CERTIFICATE_NOTE_SECONDS:
        return Finding(check, "ok", f"valid for {left}", None, facts)
    advice = f"Replace {file}: services load the new file without a restart."
    return Finding(check, "note", f"ends in {left}", advice, facts)


# --- directories ---


def judge_directory(
    check: str, path: str, *, file_system: str, free: int, budgets: Mapping[str, int] | None, setting: str
) -> Finding:
    """``free`` bytes of the disk; ``budgets``: bytes that each tier may take. None: all that is free."""
    room = free if budgets is None else sum(budgets.values())
    parts = "".join(f", {format_size(size)} for tier {tier}" for tier, size in (budgets or {}).items())
    message = f"{path} on {file_system}, {format_size(free)} free{parts}"
    facts: Facts = {
        "path": path,
        "file_system": file_system,
        "free_bytes": free,
        **{f"budget_{tier}_bytes": size for tier, size in (budgets or {}).items()},
    }
    if room <= 0:
        return Finding(
            check, "problem", f"{message}: no room", f"Free space, or name a larger disk in {setting}.", facts
        )
    if file_system in _NOT_LOCAL:
        advice = f"Name a directory on a local disk in {setting}."
        return Finding(check, "note", f"{message}: not a local disk", advice, facts)
    if file_system == "tmpfs":
        advice = f"Name a directory on a disk in {setting}."
        return Finding(check, "note", f"{message}: its files take memory, and a reboot deletes them", advice, facts)
    if room < _FEW_BYTES:
        advice = f"Free space, or name a larger disk in {setting}."
        return Finding(check, "note", f"{message}: room for few models", advice, facts)
    return Finding(check, "ok", message, None, facts)


def judge_direct(reason: str | None, *, is_known: bool) -> Finding:
    if not is_known:
        advice = "Free space on the disk of the cache, and run bdn doctor again."
        return Finding("direct I/O", "note", "unknown: no block could be written", advice, {"direct": None})
    if reason is None:
        return Finding("direct I/O", "ok", "files are written past the page cache", None, {"direct": True})
    advice = "Put the cache on ext4, xfs or btrfs of a local disk: writes through the page cache are slower."
    return Finding("direct I/O", "note", f"refused: {reason}", advice, {"direct": False})


def judge_reflinks(*, works: bool) -> Finding:
    if works:
        return Finding("reflinks", "ok", "pulled files share blocks with the cache", None, {"reflinks": True})
    advice = "Use --link, or put cache and DEST on one xfs or btrfs."
    return Finding(
        "reflinks", "note", "none: pulled files are copies, and take their space twice", advice, {"reflinks": False}
    )


def judge_group_sync(*, is_trusted: bool) -> Finding:
    if is_trusted:
        return Finding("group sync", "ok", "many small files are synced at once", None, {"group_sync": True})
    advice = "Put the cache on ext4, xfs or btrfs, with Linux 5.8 or newer."
    return Finding(
        "group sync", "note", "none: small files are synced one by one, which is slower", advice, {"group_sync": False}
    )


def judge_exposure(wanted: str, *, can_bind: bool) -> Finding:
    """``wanted`` is the setting ``BDN_AGENT_EXPOSURE``, as the operator wrote it."""
    result = ("bind" if can_bind else "symlink") if wanted == "auto" else wanted
    facts: Facts = {"setting": wanted, "can_bind": can_bind, "exposure": result}
    if result == "bind" and not can_bind:
        advice = "Run the agent as root with CAP_SYS_ADMIN, or set BDN_AGENT_EXPOSURE=auto."
        return Finding("mounts", "problem", "refused, and BDN_AGENT_EXPOSURE=bind needs them", advice, facts)
    if wanted != "auto" or can_bind:
        return Finding("mounts", "ok", f"stages appear as {result}", None, facts)
    advice = "Run the agent as root with CAP_SYS_ADMIN for read-only mounts."
    return Finding(
        "mounts",
        "note",
        "refused to this user: stages are symbolic links, without write protection from root",
        advice,
        facts,
    )


def judge_volumes(*, are_bounded: bool) -> Finding:
    if are_bounded:
        return Finding(
            "job volumes", "ok", "bounded: file systems of their own on loop devices", None, {"bound": "image"}
        )
    advice = "Run the agent as root with loop devices and mkfs.ext4 for volumes that cannot exceed their size."
    return Finding(
        "job volumes",
        "note",
        "watched: a job may write more than its volume's size for a while",
        advice,
        {"bound": "watch"},
    )


# --- where the bottleneck is ---


def judge_rates(write: Measured, read: Measured, network: Measured) -> Finding:
    """The slowest of the known rates. With one unknown rate, it may be slower."""
    rates = {"disk writes": write, "disk reads": read, "network to the mirror": network}
    known = {name: rate.bytes_per_second for name, rate in rates.items() if rate.bytes_per_second is not None}
    all_of_them = ", ".join(f"{name} {rate}" for name, rate in rates.items())
    facts: Facts = {
        "write_bytes_per_second": write.bytes_per_second,
        "read_bytes_per_second": read.bytes_per_second,
        "network_bytes_per_second": network.bytes_per_second,
        "slowest": min(known, key=lambda name: known[name]) if known else None,
    }
    unknown = [name for name in rates if name not in known]
    if not unknown:
        return Finding("bottleneck", "ok", f"{facts['slowest']}: {all_of_them}", None, facts)
    message = f"unknown: {all_of_them}" if not known else f"{facts['slowest']}, of the known rates: {all_of_them}"
    advice = "Mend what the parentheses name, and run bdn doctor again."
    return Finding("bottleneck", "note", message, advice, facts)
