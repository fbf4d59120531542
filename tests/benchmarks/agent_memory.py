"""What an agent takes to stage a manifest of a million files: fetched, parsed, verified, filled and linked by ``bdn-node-agent``.

Its mirror has manifest, layout and slabs in memory, in a process of its own: ``python -m … FILES`` prints where it is, and a grant.
"""

import gzip
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bdn.wire.layout_form import write_file, write_layout

from bdn.core.chunk import FileEntry, ManifestDocument, ManifestWriter, digest_of
from bdn.core.store import PARCEL_FILES
from bdn.wire.grants import Grant, GrantedMount
from tests.benchmarks.report import Figure, scaled
from tests.doubles.http_origin import Answer, Request
from tests.support.agent.mirror import AgentMirror
from tests.support.services import services
from tests.support.services.commands import wait_until

_SIZE: Final = 100  # of a file
_IN_SLAB: Final = PARCEL_FILES


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

    def make(self, count: int) -> ManifestDocument:
        """Publish it."""
        writer, files = ManifestWriter(), list[str]()
        for first in range(0, count, _IN_SLAB):
            numbers = range(first, min(count, first + _IN_SLAB))
            contents = [f"{number:08}".encode().ljust(_SIZE) for number in numbers]
            slab = b"".join(contents)
            name, digests = digest_of(slab), [digest_of(one) for one in contents]
            self.store.put(name, bytearray(slab))
            paths = [f"train-{number // 1000:05}/sample-{number:08}.json" for number in numbers]
            writer.add([FileEntry(path, _SIZE, one) for path, one in zip(paths, digests, strict=True)])
            files += [
                write_file(one.hex, _SIZE, [one.hex], (name.hex, len(slab), _SIZE * at))
                for at, one in enumerate(digests)
            ]
        document = writer.finish()
        self.canonical = document.canonical
        self.chunks_of[document.digest] = {one.digest for one in self.store.stored()}
        self.layout = gzip.compress(b"".join(write_layout(document.digest, self.data_port, files)), 1)
        return document

    def _respond(self, request: Request) -> Answer:
        if request.target.endswith("/layout"):
            return Answer(200, {"content-encoding": "gzip"}, self.layout)
        if request.target.startswith("/manifests/"):
            return Answer(200, content=self.canonical)
        return super()._respond(request)


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
