"""What the tests' forked programs promise to those that kill them: they are processes like any other."""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.services.forked import PRELOADED, Process, start

_TELLING = """
import json, os, sys
print(json.dumps({
    "pid": os.getpid(), "argv": sys.argv, "given": os.environ.get("GIVEN"), "home": os.environ.get("HOME"),
    "imported": sorted(sys.modules), "input": sys.stdin.read(), "name": __name__,
}), flush=True)
print("an error", file=sys.stderr)
sys.exit(7)
"""


async def _started(tmp_path: Path, code: str, *arguments: str, **environment: str) -> Process:
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        return await start((sys.executable, "-c", code, *arguments), environment, out.fileno(), err.fileno())


async def test_a_forked_program_has_its_own_arguments_environment_outputs_and_exit_code_and_needs_no_imports(
    tmp_path: Path,
) -> None:
    process = await _started(tmp_path, _TELLING, "one", "two", GIVEN="this")
    assert await process.wait() == 7
    assert (tmp_path / "err").read_text() == "an error\n"
    told = json.loads((tmp_path / "out").read_text())

    assert told["argv"] == ["-c", "one", "two"]
    assert (told["given"], told["home"], told["input"], told["name"]) == ("this", None, "", "__main__")
    assert told["pid"] != os.getpid()
    assert set(PRELOADED) <= set(told["imported"])


async def test_a_kill_is_seen_as_one_and_a_dead_process_is_not_sent_another(tmp_path: Path) -> None:
    process = await _started(tmp_path, "import time; time.sleep(600)")
    before = process.returncode
    process.kill()
    first, second = await asyncio.gather(process.wait(), process.wait())

    assert before is None
    assert first == second == process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        process.kill()


async def test_one_that_has_ended_and_is_not_known_to_is_sent_nothing(tmp_path: Path) -> None:
    process = await _started(tmp_path, "pass")
    while Path(f"/proc/{process.pid}").exists():  # noqa: ASYNC240 - so that this loop hears of nothing
        time.sleep(0.01)  # noqa: ASYNC251
    process.kill()

    assert process.returncode is None
    assert await process.wait() == 0
