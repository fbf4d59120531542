"""Content that a mirror holds, and an agent that is asked for it: what most benchmarks begin with."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench import altered_agent, disk, nginx
from tests.support.services import services

PREFIX = "model"
_REPOSITORY = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mirrored:
    """A mirror in a process of its own, the server that the content came from, and a folder on the same disk."""

    mirror: services.Mirror
    origin: nginx.Origin
    grant: str
    files: int
    size: int  # of each file
    root: Path

    @property
    def bytes_total(self) -> int:
        return self.files * self.size

    @property
    def gigabytes(self) -> float:
        return self.bytes_total / 1e9

    @property
    def source(self) -> Path:
        """The files as they were mirrored."""
        return self.origin.folder(PREFIX)

    def keep_in_memory(self) -> None:
        """The mirror's chunks come from the page cache."""
        disk.keep(disk.files_below(self.mirror.store))

    def agent(self, name: str, alteration: str = "") -> AbstractContextManager[services.Agent]:
        """An agent alone in its cluster, below ``root/name``. It may be altered: see ``altered_agent``."""
        command = ("python", "-m", altered_agent.__name__, alteration) if alteration else services.AGENT
        environment = {"BDN_AGENT_CLUSTER": name, "PYTHONPATH": str(_REPOSITORY)}
        return services.agent(self.root / name, self.mirror.url, None, command, **environment)


@contextmanager
def mirrored(files: int, size: int) -> Iterator[Mirrored]:
    """So many files of so many bytes each."""
    with (
        tempfile.TemporaryDirectory() as name,
        nginx.serving_s3({PREFIX: (files, size)}) as origin,
        services.mirror(Path(name) / "mirror", AWS_ENDPOINT_URL_S3=origin.url) as mirror,
    ):
        grant = mirror.ready(f"s3://{nginx.BUCKET}/{PREFIX}/")["grant"]
        yield Mirrored(mirror, origin, grant, files, size, Path(name))


@dataclass
class ColdStages:
    """Rates in GB/s and CPU in seconds per GB, in the order of the runs."""

    content: Mirrored
    agent: services.Agent
    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    checked: bool = False  # whether the files have been compared with the source, or need not be

    def run(self) -> None:
        """A stage of which nothing is here yet; in the end nothing is here again."""
        self.content.keep_in_memory()
        disk.settle(self.content.root)
        before = self.agent.cpu_seconds
        stage = self.agent.stage(self.content.grant, f"job-{len(self.rates)}")
        cpu = self.agent.cpu_seconds - before
        came = stage["mounts"][0]["bytes_from"]
        assert came == {"node": 0, "cluster": 0, "mirror": self.content.bytes_total}, came
        if not self.checked:
            self._check(Path(stage["mounts"][0]["path"]))
        self.cpu.append(cpu / self.content.gigabytes)
        self.rates.append(self.content.gigabytes / services.seconds_of(stage))
        self.agent.unstage(stage)
        self.content.mirror.evict_agents()

    def _check(self, view: Path) -> None:
        """Every byte, once: the files are the source's."""
        for path in sorted(self.content.source.iterdir()):
            subprocess.run(["cmp", path, view / path.name], check=True)
        self.checked = True
