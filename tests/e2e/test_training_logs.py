"""What a training job prints and uses, by the unmodified truss: each line once and in order, while the job runs and later."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.agent.mounts import needs_mounts, unmounting
from tests.support.agent.runs import needs_bwrap
from tests.support.services.cluster import Cluster
from tests.support.services.training import CLIENTS, User, agent, ended

pytestmark = [
    pytest.mark.skipif(not CLIENTS.exists(), reason="truss is not installed; make test installs it"),
    needs_bwrap,
    needs_mounts,
]
LINES: Final = 5000
EQUAL: Final = 1000
LONG: Final = "".join(f"{number:05}" for number in range(20_000))  # 100 KB
PRINTS: Final = f"""
import os, time
rank = os.environ["BT_NODE_RANK"]
for number in range({LINES}):
    print("line", number, "of", rank, flush=True)
    if number % 50 == 0:
        time.sleep(0.02)
print("equal\\n" * {EQUAL}, end="", flush=True)
print("".join(f"{{number:05}}" for number in range(20_000)))
print("the end of", rank)
"""
_LINE: Final = re.compile(r"^\[[0-9: -]{19}\]: \((r\d)\) (.*)$", re.MULTILINE)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with unmounting(tmp_path):
        cluster = Cluster(tmp_path, {})
        with cluster.mirror():
            yield cluster


def printed(shown: str, replica: str) -> list[str]:
    """The lines of a rank as truss shows them, without the agent's notes."""
    texts = [text for one, text in _LINE.findall(shown) if one == replica]
    return [text for text in texts if not text.startswith("bdn: ")]


@pytest.mark.production
def test_lines__many_equal_and_long__are_shown_once_and_in_order_of_each_rank(cluster: Cluster) -> None:
    with agent(cluster) as shell, agent(cluster, "node-2"):
        user = User(cluster, shell)
        job = user.start("prints", "python3 script.py", files={"script.py": PRINTS}, nodes=2)
        wide = {"COLUMNS": str(2 * len(LONG))}  # truss breaks lines at the width of the terminal
        followed = user.truss("logs", "--job-id", job, "--tail", **wide)
        assert "completed successfully" in followed.out
        assert ended(user, job) == ("COMPLETED", "")
        later = user.truss("logs", "--job-id", job, **wide)
        for shown in (followed.out, later.out):
            for rank in range(2):
                *lines, one, two, last = printed(shown, f"r{rank}")  # the mirror keeps lines of 64 KiB
                assert lines == [*(f"line {number} of {rank}" for number in range(LINES)), *(EQUAL * ["equal"])]
                assert (one + two, last) == (LONG, f"the end of {rank}")


def test_metrics__show_how_much_scratch_a_job_used(cluster: Cluster) -> None:
    with agent(cluster) as shell:
        user = User(cluster, shell)
        job = user.push("writes", 'head -c 30000000 /dev/zero >"$BT_SCRATCH_DIR/file"')
        assert ended(user, job) == ("COMPLETED", "")
        shown = user.truss("metrics", "--job-id", job)
        assert shown.code == 0, shown.out + shown.err
        used = re.search(r"Eph\. storage usage\W+([\d.]+) MB", shown.out)
        assert used is not None, shown.out
        assert 30 <= float(used[1]) < 31
