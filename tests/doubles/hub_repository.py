"""A repository of the hub double: commits, what names them, and what a listing says about their files."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import Literal

from tests.doubles.content import Content, git_blob_of, lfs_pointer_of, sha256_of, size_of

Kind = Literal["model", "dataset", "space", "kernel"]
Json = Mapping[str, "Json"] | Sequence["Json"] | str | int | bool | None

LFS_SUFFIXES = frozenset({".bin", ".gguf", ".h5", ".onnx", ".parquet", ".pt", ".safetensors"})
LFS_FROM_BYTES = 10 * 1024 * 1024  # the hub refuses larger files in git itself
COMMITTED_AT = "2026-01-02T03:04:05.000Z"


@dataclass(frozen=True)
class HubFile:
    """``oid`` is git's name of what git holds, which for an LFS file is its pointer."""

    path: str
    content: Content
    is_xet: bool = False

    @property
    def size(self) -> int:
        return size_of(self.content)

    @property
    def is_lfs(self) -> bool:
        suffix = PurePosixPath(self.path).suffix
        return not isinstance(self.content, bytes) or suffix in LFS_SUFFIXES or self.size >= LFS_FROM_BYTES

    @cached_property
    def sha256(self) -> str:
        return sha256_of(self.content)

    @cached_property
    def oid(self) -> str:
        return git_blob_of(lfs_pointer_of(self.content) if self.is_lfs else _literal(self.content))

    @property
    def etag(self) -> str:
        return f'"{self.sha256 if self.is_lfs else self.oid}"'

    @property
    def xet_name(self) -> str:
        """The name under which xet has these bytes: a digest of another kind, which tells nothing about them."""
        return hashlib.blake2s(self.sha256.encode()).hexdigest()

    @property
    def xet_hash(self) -> str:
        return self.xet_name if self.is_lfs and self.is_xet else ""

    @property
    def entry(self) -> dict[str, Json]:
        entry: dict[str, Json] = {"type": "file", "path": self.path, "size": self.size, "oid": self.oid}
        if self.is_lfs:
            pointer_size = len(lfs_pointer_of(self.content))
            entry["lfs"] = {"oid": self.sha256, "size": self.size, "pointerSize": pointer_size}
        if self.xet_hash:
            entry["xetHash"] = self.xet_hash
        return entry


@dataclass(frozen=True)
class Commit:
    sha: str
    files: Mapping[str, HubFile]
    parent: "Commit | None" = None
    title: str = ""

    @property
    def history(self) -> Iterator["Commit"]:
        """This commit and those before it, newest first."""
        commit: Commit | None = self
        while commit:
            yield commit
            commit = commit.parent

    def last_change(self, path: str) -> "Commit":
        """The newest commit in which a file, or the files below a folder, became what they are here."""
        at = self
        while at.parent and at.parent.below(path) == self.below(path):
            at = at.parent
        return at

    def below(self, path: str) -> dict[str, HubFile]:
        return {name: file for name, file in self.files.items() if f"{name}/".startswith(f"{path}/")}

    @property
    def brief(self) -> dict[str, Json]:
        return {"id": self.sha, "title": self.title, "date": COMMITTED_AT}

    @cached_property
    def tree(self) -> tuple[dict[str, Json], ...]:
        """Files and folders, recursively, by path."""
        folders = {str(parent) for path in self.files for parent in PurePosixPath(path).parents} - {"."}
        entries: dict[str, dict[str, Json]] = {path: file.entry for path, file in self.files.items()}
        for folder in folders:
            oid = hashlib.sha1(folder.encode(), usedforsecurity=False).hexdigest()
            entries.setdefault(folder, {"type": "directory", "path": folder, "size": 0, "oid": oid})
        return tuple(entries[path] for path in sorted(entries))


@dataclass
class HubRepository:
    """Filled by a test. ``readers`` are the tokens, besides the owner's, that may read it where it is not open."""

    repo_id: str
    kind: Kind = "model"
    private: bool = False
    gated: Literal["auto", "manual", False] = False
    disabled: bool = False
    is_xet: bool = False
    readers: set[str] = field(default_factory=set)
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)

    def commit(self, files: Mapping[str, Content | None], branch: str = "main") -> str:
        """Add, replace or (None) delete files on a branch, or on a full ref such as ``refs/pr/1``; returns the SHA.

        A new branch starts at what ``main`` is.
        """
        ref = branch if branch.startswith("refs/") else f"refs/heads/{branch}"
        parent = self.commits.get(self.refs.get(ref) or self.refs.get("refs/heads/main") or "")
        tree = dict(parent.files) if parent else {}
        for path, content in files.items():
            if content is None:
                del tree[path]
            else:
                tree[path] = HubFile(path, content, self.is_xet)
        name = f"{self.kind} {self.repo_id} {len(self.commits)}"
        sha = hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
        self.commits[sha] = Commit(sha, tree, parent, f"Commit {len(self.commits)}")
        self.refs[ref] = sha
        return sha

    def tag(self, name: str, sha: str | None = None) -> str:
        """Name a commit, by default the newest of ``main``."""
        self.refs[f"refs/tags/{name}"] = sha or self.refs["refs/heads/main"]
        return self.refs[f"refs/tags/{name}"]

    def allow(self, token: str) -> None:
        """Let the holder of this token read the repository although it is private or gated."""
        self.readers.add(token)

    def find(self, revision: str) -> Commit | None:
        """By branch, tag, full ref or full SHA; the hub does not take shortened SHAs."""
        sha = next((self.refs[ref] for ref in _refs_of(revision) if ref in self.refs), revision)
        return self.commits.get(sha)


def _refs_of(revision: str) -> tuple[str, ...]:
    return (revision,) if revision.startswith("refs/") else (f"refs/heads/{revision}", f"refs/tags/{revision}")


def _literal(content: Content) -> bytes:
    if not isinstance(content, bytes):
        msg = "only LFS files are generated"
        raise TypeError(msg)
    return content
