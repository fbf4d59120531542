"""What ``bdn doctor`` concludes from measured facts."""

from typing import Any

import pytest

from bdn.core.findings import (
    Finding,
    Level,
    Measured,
    judge_certificate,
    judge_clock,
    judge_descriptors,
    judge_direct,
    judge_directory,
    judge_exposure,
    judge_group_sync,
    judge_kernel,
    judge_memory,
    judge_rates,
    judge_reflinks,
    judge_volumes,
    worst,
)

GB = 10**9
DAY = 86400


def directory(file_system: str = "xfs", free: int = 100 * GB, **budgets: int) -> Finding:
    return judge_directory(
        "cache", "/c", file_system=file_system, free=free, budgets=budgets or None, setting="BDN_AGENT_CACHE_DIR"
    )


CASES: list[tuple[str, Finding, Level, str]] = [
    ("new kernel", judge_kernel("6.8.0", (6, 8)), "ok", "Linux 6.8.0"),
    ("first kernel with mounts in one step", judge_kernel("5.12.0", (5, 12)), "ok", "5.12"),
    ("kernel without them", judge_kernel("5.11.0", (5, 11)), "note", "four steps"),
    ("kernel without errors of syncfs", judge_kernel("5.7.0", (5, 7)), "note", "one by one"),
    ("kernel of another form", judge_kernel("odd", (0, 0)), "note", "odd"),
    ("memory", judge_memory(16 * GB, None, 16), "ok", "no cgroup limit"),
    ("memory with a cgroup that suffices", judge_memory(16 * GB, 2 * GB, 16), "ok", "cgroup limit 2 GB"),
    ("memory with a cgroup that does not", judge_memory(16 * GB, GB // 2, 16), "note", "may need"),
    ("little memory, few threads", judge_memory(GB, None, 1), "ok", "1 GB"),
    ("open files", judge_descriptors(20_000, 4096), "ok", "20000"),
    ("few open files", judge_descriptors(1024, 192), "note", "192 connections"),
    ("clock", judge_clock(0.4), "ok", "agrees"),
    ("clock ahead", judge_clock(6.0), "note", "6s ahead of"),
    ("clock behind", judge_clock(-6.0), "note", "6s behind"),
    ("clock far behind", judge_clock(-61.0), "problem", "1m 1s behind"),
    ("clock without a mirror", judge_clock(None), "note", "no mirror answers"),
    ("certificate", judge_certificate("BDN_TLS_CERT", "/t", 31 * DAY), "ok", "31d"),
    ("certificate near its end", judge_certificate("BDN_TLS_CERT", "/t", 29 * DAY), "note", "ends in 29d"),
    ("directory", directory(), "ok", "/c on xfs, 100 GB free"),
    ("directory with tiers", directory(node=50 * GB, cluster=GB), "ok", "50 GB for tier node, 1 GB for tier cluster"),
    ("full disk", directory(free=0), "problem", "no room"),
    ("free disk without a budget", directory(node=0, cluster=0), "problem", "no room"),
    ("little room", directory(node=10 * GB), "note", "few models"),
    ("directory in memory", directory("tmpfs"), "note", "reboot"),
    ("directory on a network", directory("nfs"), "note", "not a local disk"),
    ("full directory on a network", directory("nfs", 0), "problem", "no room"),
    ("direct I/O", judge_direct(None, is_known=True), "ok", "past the page cache"),
    ("no direct I/O", judge_direct("EINVAL", is_known=True), "note", "EINVAL"),
    ("direct I/O that could not be tried", judge_direct(None, is_known=False), "note", "unknown"),
    ("reflinks", judge_reflinks(works=True), "ok", "share"),
    ("no reflinks", judge_reflinks(works=False), "note", "copies"),
    ("group sync", judge_group_sync(is_trusted=True), "ok", "at once"),
    ("no group sync", judge_group_sync(is_trusted=False), "note", "one by one"),
    ("mounts", judge_exposure("auto", can_bind=True), "ok", "bind"),
    ("no mounts", judge_exposure("auto", can_bind=False), "note", "symbolic links"),
    ("no mounts, and none wanted", judge_exposure("symlink", can_bind=False), "ok", "symlink"),
    ("no mounts, which are demanded", judge_exposure("bind", can_bind=False), "problem", "needs them"),
    ("bounded volumes", judge_volumes(are_bounded=True), "ok", "bounded"),
    ("watched volumes", judge_volumes(are_bounded=False), "note", "watched"),
    ("writes are slowest", judge_rates(Measured(1e9), Measured(3e9), Measured(2e9)), "ok", "disk writes: "),
    ("reads are slowest", judge_rates(Measured(3e9), Measured(1e9), Measured(2e9)), "ok", "disk reads: "),
    ("network is slowest", judge_rates(Measured(3e9), Measured(2e9), Measured(1e9)), "ok", "network to the mirror: "),
    (
        "network is unknown",
        judge_rates(Measured(1e9), Measured(2e9), Measured(reason="no mirror answers")),
        "note",
        "disk writes, of the known rates: disk writes 1 GB/s, disk reads 2 GB/s, network to the mirror unknown (no mirror",
    ),
    (
        "all is unknown",
        judge_rates(Measured(reason="a"), Measured(reason="b"), Measured(reason="c")),
        "note",
        "unknown: disk writes unknown (a)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("finding", "level", "said"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_judgement__of_facts__has_level_and_reason(finding: Finding, level: Level, said: str) -> None:
    assert (finding.level, said in finding.message) == (level, True), finding
    assert (finding.advice or "").count(". ") == 0  # one sentence


@pytest.mark.parametrize(("level", "advice"), [("ok", "do it"), ("note", None), ("problem", None)])
def test_finding__advice_does_not_fit_level__is_refused(level: Any, advice: str | None) -> None:
    with pytest.raises(ValueError, match="advice"):
        Finding("disk", level, "x", advice)


@pytest.mark.parametrize(
    ("levels", "expected"),
    [([], "ok"), (["ok"], "ok"), (["ok", "note"], "note"), (["problem", "note", "ok"], "problem")],
)
def test_worst__of_findings__decides_about_the_exit_code(levels: list[Level], expected: Level) -> None:
    assert worst(Finding("x", level, "", None if level == "ok" else "y") for level in levels) == expected
