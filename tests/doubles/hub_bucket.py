"""A bucket of the hub double: files without commits, kept by xet alone.

What the real hub does was read from the client's source and its issues: it compares a prefix as text, not as a folder
(huggingface_hub#4630), its entries have no ``oid`` (Daft#7218), and ``paths-info`` answers nothing for what is no file.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import unquote

from tests.doubles.content import Content
from tests.doubles.hub_repository import HubFile, Json

UPLOADED_AT = "2026-01-02T03:04:05.000Z"


@dataclass
class HubBucket:
    """Filled by a test. Only the hub's owner may read a private one.

    With ``sends_bytes`` the hub answers with bytes instead of a redirect, as a mirror of the hub may.
    """

    bucket_id: str
    private: bool = False
    sends_bytes: bool = False
    files: dict[str, HubFile] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.bucket_id

    def put(self, files: Mapping[str, Content | None]) -> None:
        """Add, replace or (None) delete files, by name, exactly as named."""
        for name, content in files.items():
            if content is None:
                del self.files[name]
            else:
                self.files[name] = HubFile(name, content)

    @property
    def description(self) -> Json:
        size = sum(file.size for file in self.files.values())
        return {
            "id": self.bucket_id,
            "private": self.private,
            "createdAt": UPLOADED_AT,
            "updatedAt": UPLOADED_AT,
            "size": size,
            "totalFiles": len(self.files),
        }

    def tree(self, prefix: str, *, recursive: bool) -> list[Json]:
        """The entries whose names begin with ``prefix``: files alone if recursive, or what is directly below it."""
        names = sorted(name for name in self.files if name.startswith(prefix))
        if recursive:
            return [self.entry(name) for name in names]
        return list(self._direct(prefix, names))

    def _direct(self, prefix: str, names: Iterable[str]) -> Iterator[Json]:
        folders: set[str] = set()
        for name in names:
            below = prefix + "/" if name.startswith(f"{prefix}/") and prefix else prefix
            child, slash, _ = name.removeprefix(below).partition("/")
            if not slash:
                yield self.entry(name)
            elif (folder := below + child) not in folders:
                folders.add(folder)
                yield {"type": "directory", "path": folder, "uploadedAt": UPLOADED_AT}

    def paths_info(self, paths: Iterable[str]) -> list[Json]:
        return [self.entry(path) for path in paths if path in self.files]

    def entry(self, name: str) -> Json:
        file = self.files[name]
        times: dict[str, Json] = {"mtime": UPLOADED_AT, "uploadedAt": UPLOADED_AT}
        return {"type": "file", "path": name, "size": file.size, "xetHash": file.xet_name, **times}


@dataclass(frozen=True, slots=True)
class BucketCall:
    """A request about one bucket, as its path tells; a client quotes a name or a prefix whole, or each segment of it."""

    bucket_id: str
    operation: str
    path: str

    @classmethod
    def of(cls, path: str) -> Self | None:
        segments = [unquote(segment) for segment in path.removeprefix("/").split("/")]
        if segments[:2] == ["api", "buckets"] and len(segments) >= 4:
            return cls("/".join(segments[2:4]), (*segments[4:], "")[0], "/".join(segments[5:]))
        if segments[0] == "buckets" and segments[3:4] == ["resolve"]:
            return cls("/".join(segments[1:3]), "resolve", "/".join(segments[4:]))
        return None
