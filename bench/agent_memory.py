"""What an agent takes to stage a manifest of a million files: fetched, parsed, verified, filled and linked by ``bdn-node-agent``.

Its mirror has root, pages and slabs in memory, in a process of its own: ``python -m … FILES`` prints where it is, and a grant.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bdn.core.chunk import FileLayout
from bdn.core.layout import Manifest
from bdn.wire.grants import Grant, GrantedMount
from bench.report import Figure, scaled
from tests.support.agent.mirror import AgentMirror
from tests.support.content.layouts import packed
from tests.support.services import services
from tests.support.services.commands import wait_until

_SIZE: Final = 100  # of a file
_IN_SLAB: Final = 8000  # files


def measure() -> Sequence[Figure]:
    """A cold stage of files of 100 bytes, and what is left of it in memory."""
    files = scaled(1_000_000)
    command = [sys.executable, "-m", __name__, str(files)]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, text=True, stdout=subprocess.PIPE) as mirror,
    ):
        assert mirror.stdout
        url, grant = mirror.stdout.readline().split()
        try:
            with services.starting_agent(Path(folder) / "node", url) as agent:
                wait_until(lambda: services.answers(agent.http), what="the agent")
                before = agent.cpu_seconds
                agent.stage(grant, "job")
                return [
                    Figure(f"agent, {files} files staged: memory", "MB", (agent.peak_megabytes,), "<= 1200"),
                    Figure(f"agent, {files} files staged: CPU", "s CPU", (agent.cpu_seconds - before,)),
                ]
        finally:
            mirror.terminate()


class ManyFiles(AgentMirror):
    """A mirror of one manifest of many small files."""

    def make(self, count: int) -> Manifest:
        """Publish it."""
        files: dict[str, FileLayout] = {}
        for first in range(0, count, _IN_SLAB):
            numbers = range(first, min(count, first + _IN_SLAB))
            slab, content, layouts = packed([f"{number:08}".encode().ljust(_SIZE) for number in numbers])
            self.store.put(slab, bytearray(content))
            paths = (f"train-{number // 1000:05}/sample-{number:08}.json" for number in numbers)
            files |= zip(paths, layouts, strict=True)
        return self.publish_as(files)


def main() -> None:
    """Serve until somebody ends it."""
    mirror = ManyFiles()
    with mirror.running():
        manifest = mirror.make(int(sys.argv[1]))
        mount = GrantedMount("/m", manifest.digest, "hf://org/model")
        print(mirror.url, mirror.signer.sign(Grant("org", (mount,), time.time() + 1e5)), flush=True)
        time.sleep(1e5)


if __name__ == "__main__":
    main()
