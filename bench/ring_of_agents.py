"""A mirror and several agents, each in a host of its own on one network whose links have a rate."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import blake3

from tests.support.network.fault_proxy import ByteProxy
from tests.support.network.network import Host, Network
from tests.support.services import services
from tests.support.services.commands import wait_until
from tests.support.services.services import Agent, Mirror


@dataclass(frozen=True)
class Content:
    """What a mirror's data directory holds before it gets onto the network, and the digests of the source's files.

    ``store`` are settings of a store that is elsewhere.
    """

    data: Path
    mirror_id: str
    size: int
    digests: dict[str, str]
    store: Mapping[str, str]

    def check(self, stage: Any) -> None:
        """Every file of the stage has the source's bytes."""
        folder = Path(stage["mounts"][0]["path"])
        assert {name: file_digest(folder / name) for name in self.digests} == self.digests, folder


def planted(
    folder: Path, root: Path, source: str, store: Mapping[str, str] = MappingProxyType({}), **environment: str
) -> Content:
    """Mirror ``source``, whose files lie in ``folder``, into a data directory below ``root``, on loopback."""
    with services.mirror(root, **environment, **store) as mirror:
        ready = mirror.ready(source)
    digests = {path.name: file_digest(path) for path in folder.iterdir()}
    return Content(root / "data", ready["id"], ready["bytes_total"], digests, store)


def file_digest(path: Path) -> str:
    """BLAKE3 of a file, by another way than the programs under test."""
    return blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(path).hexdigest()


@dataclass(frozen=True)
class Member:
    """An agent and where it is."""

    agent: Agent
    host: Host


@dataclass(frozen=True)
class Ring:
    """Everybody is up and known to the mirror."""

    mirror: Mirror
    host: Host  # of the mirror
    members: Sequence[Member]
    grant: str

    def begin(self) -> list[str]:
        """All members are asked for the same content at once; the stages' names."""
        with ThreadPoolExecutor(len(self.members)) as threads:
            return list(threads.map(lambda member: member.agent.begin(self.grant, "job"), self.members))


@contextmanager
def ring(
    network: Network,
    root: Path,
    content: Content,
    count: int,
    rate: int,
    mirror_delay_seconds: float = 0,
) -> Iterator[Ring]:
    """``count`` agents behind links of ``rate`` bits per second. With a delay, the mirror is far away and loses connections."""
    with ExitStack() as stack:
        place = network.host()
        shutil.copytree(content.data, root / "mirror" / "data", copy_function=_link)
        mirror = stack.enter_context(services.mirror(root / "mirror", place, **content.store))
        url = mirror.url
        if mirror_delay_seconds:
            for port in mirror.ports:
                far = ByteProxy(
                    (place.address, port), host=network.address, port=port, delay_seconds=mirror_delay_seconds
                )
                far.cut_after = 256 * 1024**2
                stack.enter_context(far.running())
            url = url.replace(place.address, network.address)
        hosts = [network.host() for _ in range(count)]
        agents = [
            stack.enter_context(services.starting_agent(root / f"node-{number}", url, host))
            for number, host in enumerate(hosts, 1)
        ]
        wait_until(lambda: all(map(_is_up, agents)), seconds=120, what="the start of all agents")
        wait_until(lambda: all(len(_known_to(one)) == count for one in agents), seconds=120, what="word of all members")
        for host in (place, *hosts):
            host.shape(rate)
        grant = mirror.http.get(f"/mirror/{content.mirror_id}").raise_for_status().json()["grant"]
        yield Ring(mirror, place, [Member(*pair) for pair in zip(agents, hosts, strict=True)], grant)


def span(stages: Sequence[Any]) -> float:
    """Seconds from the first request to the last READY."""
    began = min(datetime.fromisoformat(stage["created_at"]) for stage in stages)
    ended = max(datetime.fromisoformat(stage["ready_at"]) for stage in stages)
    return (ended - began).total_seconds()


def _is_up(agent: Agent) -> bool:
    assert agent.process.poll() is None, "an agent did not start"
    return (agent.shell.data / "agent.sock").exists() and services.answers(agent.http)


def _known_to(agent: Agent) -> Sequence[Any]:
    """The members it has heard of. Who has not heard of all would read from the mirror what others own."""
    path = agent.shell.data / "cache" / "members.json"
    return json.loads(path.read_bytes())["members"] if path.exists() else []


def _link(source: str, target: str) -> str:
    """Chunks are never changed, so that they need no second copy; the database is."""
    path = Path(source)
    if "store" in path.parts:
        Path(target).hardlink_to(path)
        return target
    return str(shutil.copy2(source, target))
