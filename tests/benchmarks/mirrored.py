"""Content that a mirror holds: what most benchmarks begin with."""

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks import altered_agent, page_cache, s3_origin
from tests.support.services import services

PREFIX = "model"
_REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mirrored:
    """A mirror in a process of its own, the server that the content came from, and a folder on the same disk."""

    mirror: services.Mirror
    origin: s3_origin.Origin
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
        page_cache.keep(page_cache.files_below(self.mirror.store))

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
        s3_origin.serving({PREFIX: (files, size)}) as origin,
        services.mirror(Path(name) / "mirror", AWS_ENDPOINT_URL_S3=origin.url) as mirror,
    ):
        grant = mirror.ready(f"s3://{s3_origin.BUCKET}/{PREFIX}/")["grant"]
        yield Mirrored(mirror, origin, grant, files, size, Path(name))
