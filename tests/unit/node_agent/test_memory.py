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


def test_a_tenth_of_the_machine_stays_free(kernel: tuple[Path, Path]) -> None:
    assert memory_left(*kernel) == 50 * GIB


def test_the_groups_own_files_do_not_count_against_its_limit(kernel: tuple[Path, Path]) -> None:
    limit(kernel[1] / "jobs/agent", str(20 * GIB), 12 * GIB, 8 * GIB)
    assert memory_left(*kernel) == 14 * GIB


def test_a_limit_further_up_holds_as_well(kernel: tuple[Path, Path]) -> None:
    limit(kernel[1] / "jobs/agent", "max", 12 * GIB, 8 * GIB)
    limit(kernel[1] / "jobs", str(10 * GIB), 12 * GIB, 2 * GIB)
    assert memory_left(*kernel) == -GIB


def test_groups_of_version_one_say_nothing(kernel: tuple[Path, Path]) -> None:
    (kernel[0] / "self/cgroup").write_text("8:memory:/jobs/agent\n")
    limit(kernel[1] / "jobs/agent", "0", 0, 0)
    assert memory_left(*kernel) == 50 * GIB


def test_this_machine_has_an_answer() -> None:
    assert isinstance(memory_left(), int)
