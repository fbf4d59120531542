"""Who owns chunks in this cluster, as the mirror last said. Kept on disk: the mirror may be down when this agent starts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from bdn.disk.durable import disk_errors, write_durably
from bdn.wire import agent_schema


@dataclass(frozen=True, slots=True)
class RingMember:
    """An owner of chunks: an agent with the role ``cluster``, and the address at which its peers read from it."""

    node: str
    advertise: str


@dataclass(frozen=True, slots=True)
class View:
    """The owners at one epoch, in the order of their names. The same members make the same placement at any epoch."""

    epoch: int
    members: tuple[RingMember, ...]


class Members:
    """The newest view. ``me`` is this node's own name. May be used from any thread.

    A view that the mirror asked about later is never undone by an answer to an earlier question: A asks, and waits with
    its question open; B asks, is answered with epoch 7, and then A's answer comes with epoch 6. Otherwise the mirror is
    believed, even when its epoch is an older one: then its database is another, or was set back.
    """

    def __init__(self, me: str, path: Path) -> None:
        self.me = me
        self._path = path
        self._view = View(0, ())
        self._taken = 0  # answers taken up
        self._lock = threading.Lock()

    def current(self) -> View:
        """The newest view; without members until a mirror was heard of."""
        return self._view

    def load(self) -> None:
        """The view of the last run. Blocking. A damaged file is as good as none: the next heartbeat brings the members."""
        try:
            content = json.loads(self._path.read_bytes())
            self._view = View(int(content["epoch"]), tuple(RingMember(**member) for member in content["members"]))
        except (OSError, ValueError, KeyError, TypeError):
            self._view = View(0, ())

    def ask(self) -> int:
        """To be called before the mirror is asked; ``take`` wants the result with the answer."""
        return self._taken

    def take(self, epoch: int, members: Iterable[agent_schema.MemberDocument], asked: int) -> bool:
        """Believe an answer, unless a newer one came while it was on its way. Blocking when the members are others.

        Returns:
            Whether the view is another now.

        Raises:
            DiskFailedError: the view is believed, but could not be kept for the next start.
        """
        owners = sorted(
            (RingMember(member.node, member.advertise) for member in members if _owns(member) and member.advertise),
            key=lambda member: member.node,
        )
        view = View(epoch, tuple(owners))
        with self._lock:
            if view == self._view or (epoch < self._view.epoch and asked != self._taken):
                return False
            self._view, self._taken = view, self._taken + 1
            with disk_errors(self._path):
                write_durably(self._path, json.dumps(asdict(view)).encode())
        return True


def _owns(member: agent_schema.MemberDocument) -> bool:
    return "cluster" in member.roles
