"""How much may lie in the page cache, told from the kernel's files."""

from pathlib import Path

import pytest

from node_agent.stage.warm import memory_left

KIB, GIB = 1024, 1024**3
MEMINFO = "MemTotal: {} kB\nMemFree: 5 kB\nMemAvailable: {} kB\nHugePages_Total: 0\n"


@pytest.fixture
def kernel(tmp_path: Path) -> tuple[Path, Path]:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(MEMINFO.format(100 * GIB // KIB, 60 * GIB // KIB))
    (proc / "self/cgroup").write_text("3:cpu:/else\n0::/jobs/agent\n")
    (groups / "jobs/agent").mkdir(parents=True)
    return proc, groups


def limit(group: Path, maximum: str, used: int, files: int) -> None:
    (group / "memory.max").write_text(f"{maximum}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\nactive_file {files // 2}\ninactive_file {files // 2}\n")


Limits = dict[str, tuple[str, int, int]]


@pytest.mark.parametrize(("limits", "groups", "left"), [
    ({}, "", 50 * GIB),  # a tenth of the machine stays free
    ({"jobs/agent": (str(20 * GIB), 12 * GIB, 8 * GIB)}, "", 14 * GIB),  # the group's own files do not count
    ({"jobs/agent": ("max", 12 * GIB, 8 * GIB), "jobs": (str(10 * GIB), 12 * GIB, 2 * GIB)}, "", -GIB),  # further up
    ({"jobs/agent": ("0", 0, 0)}, "8:memory:/jobs/agent\n", 50 * GIB),  # groups of version one say nothing
])  # fmt: skip
def test_memory_that_is_left_is_the_machine_s_within_the_limits_of_all_groups(
    kernel: tuple[Path, Path], limits: Limits, groups: str, left: int
) -> None:
    for group, of_group in limits.items():
        limit(kernel[1] / group, *of_group)
    if groups:
        (kernel[0] / "self/cgroup").write_text(groups)
    assert memory_left(*kernel) == left
    assert isinstance(memory_left(), int)  # this machine has an answer
