"""A file system in memory that knows which part of it would survive a power loss.

Every file and folder has two states: what programs see, and what is durable. A file's bytes, size and mode become durable with
an fsync of the file, names with an fsync of their folder, and nothing else does. ``forget`` lets the power fail: in the strictest
way, or so that any part of what was not durable survives, in any order, as POSIX allows.
"""

import errno
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final

ROOT: Final = 1
PAGE: Final = 4096


class Refused(Exception):  # noqa: N818 - an answer of the file system, which is no error of ours
    """The call fails with this number."""

    def __init__(self, number: int) -> None:
        super().__init__(errno.errorcode[number])
        self.number = number


@dataclass
class Node:
    """A file, folder or symbolic link. ``kept_*`` is what a power loss leaves of it."""

    number: int
    mode: int
    content: bytearray = field(default_factory=bytearray)  # of a link: where it leads
    names: dict[bytes, int] = field(default_factory=dict)
    links: int = 0
    parent: int = ROOT
    name: bytes = b""
    opened: int = 0
    changed: int = field(default_factory=time.time_ns)
    used: int = field(default_factory=time.time_ns)
    unsynced: list[tuple[int, int]] = field(default_factory=list)  # ranges
    kept_content: bytearray = field(default_factory=bytearray)
    kept_mode: int = 0
    kept_changed: int = 0
    kept_names: dict[bytes, int] = field(default_factory=dict)

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_open_or_named(self) -> bool:
        return bool(self.links or self.opened)

    def sync(self) -> None:
        """Bytes, size, mode and time are durable."""
        for start, stop in self.unsynced:
            self._keep(start, stop)
        self._cut(len(self.content))
        self.unsynced.clear()
        self.kept_mode, self.kept_changed = self.mode, self.changed

    def lose_pages(self) -> None:
        """The disk refused to take them: Linux tells it once, and takes the pages for clean from then on."""
        self.unsynced.clear()

    def forget(self, random: Random | None, likely: float) -> None:
        """Back to what is durable; with ``random``, each page and each other change survives with a likelihood."""
        if random is not None:
            size = len(self.content if random.random() < likely else self.kept_content)
            for start, stop in self.unsynced:
                for page in range(start - start % PAGE, stop, PAGE):
                    if random.random() < likely:
                        self._keep(max(page, start), min(page + PAGE, stop))
            self._cut(size)
            if random.random() < likely:
                self.kept_mode, self.kept_changed = self.mode, self.changed
        self.content = bytearray(self.kept_content)
        self.mode, self.changed = self.kept_mode or self.mode, self.kept_changed or self.changed
        self.unsynced.clear()
        self.opened = 0

    def _keep(self, start: int, stop: int) -> None:
        self.kept_content.extend(bytes(max(0, start - len(self.kept_content))))
        self.kept_content[start:stop] = self.content[start:stop]

    def _cut(self, size: int) -> None:
        del self.kept_content[size:]
        self.kept_content.extend(bytes(size - len(self.kept_content)))


@dataclass(frozen=True)
class Name:
    """One name of a folder that comes to mean another node, or none."""

    folder: int
    name: bytes
    node: int | None


class Nodes:
    """All nodes, and the changes of names that are not durable yet, in order. Raises ``Refused``."""

    def __init__(self) -> None:
        self._next = ROOT
        self._all: dict[int, Node] = {}
        self._unsynced: list[list[Name]] = []
        root = self._new(stat.S_IFDIR | 0o755)
        root.links, root.kept_mode = 1, root.mode

    def __getitem__(self, number: int) -> Node:
        try:
            return self._all[number]
        except KeyError:
            raise Refused(errno.ESTALE) from None

    def find(self, folder: int, name: bytes) -> Node:
        number = self[folder].names.get(name)
        if number is None:
            raise Refused(errno.ENOENT)
        return self._all[number]

    def path(self, node: Node) -> str:
        """Where it was linked last, for fault rules."""
        names = [node.name]
        while ROOT not in (node.number, node.parent):
            node = self._all[node.parent]
            names.append(node.name)
        return b"/".join(reversed(names)).decode(errors="surrogateescape")

    def sizes(self, folder: str) -> dict[str, int]:
        """Of all files below a folder, by path. None of a folder that is not there."""
        node = self._all[ROOT]
        for name in folder.encode().split(b"/"):
            if name not in node.names:
                return {}
            node = self._all[node.names[name]]
        return dict(self._sizes(node, folder))

    def _sizes(self, folder: Node, path: str) -> Iterator[tuple[str, int]]:
        for name, number in folder.names.items():
            node, inside = self._all[number], f"{path}/{name.decode(errors='surrogateescape')}"
            if stat.S_ISDIR(node.mode):
                yield from self._sizes(node, inside)
            elif stat.S_ISREG(node.mode):
                yield inside, len(node.content)

    @property
    def used(self) -> int:
        return sum(len(node.content) for node in self._all.values() if node.is_open_or_named)

    # --- names ---

    def create(self, folder: int, name: bytes, mode: int, content: bytes = b"") -> Node:
        if name in self[folder].names:
            raise Refused(errno.EEXIST)
        node = self._new(mode)
        node.content = bytearray(content)
        node.kept_content = bytearray(content) if stat.S_ISLNK(mode) else bytearray()
        node.kept_mode = mode if stat.S_ISLNK(mode) or node.is_folder else 0
        self._change([Name(folder, name, node.number)])
        return node

    def link(self, number: int, folder: int, name: bytes) -> Node:
        if name in self[folder].names:
            raise Refused(errno.EEXIST)
        self._change([Name(folder, name, number)])
        return self[number]

    def unlink(self, folder: int, name: bytes) -> None:
        if self.find(folder, name).is_folder:
            raise Refused(errno.EISDIR)
        self._change([Name(folder, name, None)])

    def rmdir(self, folder: int, name: bytes) -> None:
        node = self.find(folder, name)
        if not node.is_folder:
            raise Refused(errno.ENOTDIR)
        if node.names:
            raise Refused(errno.ENOTEMPTY)
        self._change([Name(folder, name, None)])

    def rename(self, source: tuple[int, bytes], target: tuple[int, bytes], flags: int = 0) -> None:
        node = self.find(*source)
        there = self[target[0]].names.get(target[1])
        if flags & 2:  # RENAME_EXCHANGE
            self._change([Name(*target, node.number), Name(*source, self.find(*target).number)])
            return
        if there is not None:
            if flags & 1:
                raise Refused(errno.EEXIST)
            if there == node.number:
                return
            old = self._all[there]
            if old.is_folder and not node.is_folder:
                raise Refused(errno.EISDIR)
            if node.is_folder and not old.is_folder:
                raise Refused(errno.ENOTDIR)
            if old.names:
                raise Refused(errno.ENOTEMPTY)
        self._change([Name(*target, node.number), Name(*source, None)])

    def _change(self, names: list[Name]) -> None:
        for one in names:
            folder = self[one.folder]
            old = folder.names.pop(one.name, None)
            if old is not None:
                self._all[old].links -= 1
            if one.node is not None:
                node = self._all[one.node]
                folder.names[one.name] = one.node
                node.links += 1
                node.parent, node.name = one.folder, one.name
            folder.changed = time.time_ns()
        self._unsynced.append(names)

    # --- content ---

    def write(self, number: int, offset: int, content: memoryview) -> int:
        node = self[number]
        stop = offset + len(content)
        if len(node.content) < offset:
            node.content.extend(bytes(offset - len(node.content)))
        node.content[offset:stop] = content
        node.unsynced.append((offset, stop))
        node.changed = time.time_ns()
        return len(content)

    def resize(self, number: int, size: int) -> None:
        node = self[number]
        if size < len(node.content):
            del node.content[size:]
            node.unsynced = [(start, min(stop, size)) for start, stop in node.unsynced if start < size]
        elif size > len(node.content):
            node.unsynced.append((len(node.content), size))
            node.content.extend(bytes(size - len(node.content)))
        node.changed = time.time_ns()

    # --- durability ---

    def sync_folder(self, number: int) -> None:
        """Its names are durable. A file that was renamed into it from elsewhere may have both names after a power loss."""
        left: list[list[Name]] = []
        for names in self._unsynced:
            others = [one for one in names if one.folder != number]
            if len(others) < len(names) and any(one.node is not None for one in others):
                self._keep(others)  # the old name goes, the new one is elsewhere: nowhere does a file vanish by that
                newer = {(one.folder, one.name) for one in others}
                left = [[one for one in older if (one.folder, one.name) not in newer] for older in left]
            elif others:
                left.append(others)
        self._unsynced = [names for names in left if names]
        node = self[number]
        node.kept_names = dict(node.names)
        node.kept_mode, node.kept_changed = node.mode, node.changed

    def sync_all(self) -> None:
        for names in self._unsynced:
            self._keep(names)
        self._unsynced = []
        for node in self._all.values():
            node.sync()

    def _keep(self, names: list[Name]) -> None:
        for one in names:
            kept = self._all[one.folder].kept_names
            if one.node is None:
                kept.pop(one.name, None)
            else:
                kept[one.name] = one.node

    def forget(self, random: Random | None) -> None:
        """The power fails. With ``random``, any part of what is not durable survives; without, nothing of it."""
        likely = random.choice((0.1, 0.5, 0.9)) if random else 0.0
        for names in self._unsynced:
            if random is not None and random.random() < likely:
                self._keep(names)
        self._unsynced = []
        for node in self._all.values():
            node.forget(random, likely)
            node.names = dict(node.kept_names)
            node.links = 0
        reached = dict(self._reach(ROOT, set()))
        self._all = reached
        for node in reached.values():
            for name, number in list(node.names.items()):
                reached[number].links += 1
                reached[number].parent, reached[number].name = node.number, name
        reached[ROOT].links = 1

    def _reach(self, number: int, seen: set[int]) -> Iterator[tuple[int, Node]]:
        if number in seen:
            return
        seen.add(number)
        node = self._all[number]
        yield number, node
        for child in node.names.values():
            yield from self._reach(child, seen)

    def drop_unused(self, number: int) -> None:
        """Bytes of a file that nobody can reach any more, not even after a power loss, are let go."""
        node = self._all.get(number)
        if node is not None and not node.is_open_or_named and not node.is_folder:
            held = {one.node for names in self._unsynced for one in names}
            if number not in held and not any(number in other.kept_names.values() for other in self._all.values()):
                del self._all[number]

    def _new(self, mode: int) -> Node:
        node = Node(self._next, mode)
        self._all[self._next] = node
        self._next += 1
        return node
