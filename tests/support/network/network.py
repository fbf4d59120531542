"""A network of Linux namespaces on this machine: hosts on one switch, each behind a link whose rate is set.

Needs root, ``ip`` and ``tc`` (iproute2). Everything it makes is named after this process and is gone when the context ends.
"""

import ipaddress
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_PACKET_BYTES = (
    16 * 1024
)  # not the 64 KiB of the kernel, a few of which fill a queue, so that some connections get nothing
_BURST_BYTES = 128 * 1024
_QUEUE = "50ms"  # longer queues only hide what a slow link is


def unavailable() -> str:
    """Why there can be no network here; empty when there can."""
    if os.geteuid() != 0:
        return "network namespaces are made by root"
    if absent := [name for name in ("ip", "tc") if not shutil.which(name)]:
        return f"{' and '.join(absent)} of iproute2 not installed"
    probe = f"bdn{os.getpid()}-probe"
    added = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if added.returncode:
        return f"no network namespaces here: {added.stderr.strip()}"
    _run("ip", "netns", "del", probe)
    return ""


@dataclass(frozen=True)
class Host:
    """A namespace with one address. ``link`` is the switch's end of its cable."""

    namespace: str
    address: str
    link: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to write before a command so that it runs there. The process is the command itself."""
        return ("ip", "netns", "exec", self.namespace)

    def shape(self, bits_per_second: int) -> None:
        """Both directions of its link at this rate, from now on."""
        shaped = ("root", "tbf", "rate", f"{bits_per_second}bit", "burst", str(_BURST_BYTES), "latency", _QUEUE)
        _run(*self.prefix, "tc", "qdisc", "replace", "dev", "eth0", *shaped)
        _run("tc", "qdisc", "replace", "dev", self.link, *shaped)

    @property
    def sent_bytes(self) -> int:
        """What it has put on its link, headers included."""
        return int(Path(f"/sys/class/net/{self.link}/statistics/rx_bytes").read_text())


@dataclass
class Network:
    """The switch, which has an address too: this process talks to the hosts from there."""

    name: str
    net: ipaddress.IPv4Network
    _stack: ExitStack = field(repr=False)
    _hosts: int = 0

    @property
    def address(self) -> str:
        return str(self.net[-2])

    def host(self) -> Host:
        """One more host, its link as fast as the machine."""
        self._hosts += 1
        host = Host(f"{self.name}-{self._hosts}", str(self.net[self._hosts]), f"{self.name}h{self._hosts}")
        _run("ip", "netns", "add", host.namespace)
        self._stack.callback(_run, "ip", "netns", "del", host.namespace)
        _run("ip", "link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        self._stack.callback(_run, "ip", "link", "del", host.link)  # else it stays until the kernel has cleaned up
        _run("ip", "link", "set", host.link, "master", self.name, "up")
        _run(*host.prefix, "ip", "address", "add", f"{host.address}/{self.net.prefixlen}", "dev", "eth0")
        _run(*host.prefix, "ip", "link", "set", "eth0", "gso_max_size", str(_PACKET_BYTES))
        for device in ("lo", "eth0"):
            _run(*host.prefix, "ip", "link", "set", device, "up")
        return host


@contextmanager
def network() -> Iterator[Network]:
    """A switch without hosts. Processes in its hosts must have ended before the context does."""
    name = f"bdn{os.getpid()}"
    net = ipaddress.ip_network(f"10.{64 + os.getpid() // 250 % 64}.{os.getpid() % 250}.0/24")
    assert isinstance(net, ipaddress.IPv4Network)
    with ExitStack() as stack:
        _run("ip", "link", "add", name, "type", "bridge")
        stack.callback(_run, "ip", "link", "del", name)
        built = Network(name, net, stack)
        _run("ip", "address", "add", f"{built.address}/{net.prefixlen}", "dev", name)
        _run("ip", "link", "set", name, "up")
        yield built


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
