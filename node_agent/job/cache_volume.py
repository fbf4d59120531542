"""The directories of training caches on a volume that all nodes of a cluster share.

``<root>/<organisation>/projects/<id>`` holds what a job mounts of its project, ``user_artifacts`` and ``huggingface``; ``…/teams/<id>`` is
mounted itself. So all that leads to a mount is ours, and no job can put a link there. Names are ids; an organisation's may be anything, and is
named by its digest.
"""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bdn.core.chunk import UnsafePathError, digest_of, normalise_path
from bdn.core.errors import DiskFailedError, InvalidRequestError, NotFoundError
from bdn.disk.durable import disk_errors, kept_key, make_folder, open_folder, opened
from bdn.wire.grants import CacheGrant
from node_agent.disk.trash import Trash

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_PASSABLE: Final = 0o711  # who knows an id may pass; nobody may list
_OPEN: Final = 0o777
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_ID_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class CachePaths:
    """What a job mounts, read-write."""

    project: Path
    team: Path
    huggingface: Path | None


@dataclass(frozen=True)
class CacheVolume:
    """A volume, whose rubbish goes into ``trash``. Blocking. Nothing is made there before the first use."""

    root: Path
    trash: Trash

    def id(self) -> str:
        """Which volume this is: whoever uses it first writes a random id. Of two nodes that do so at once, one's stays. Raises ``DiskFailedError``."""
        with disk_errors(self.root):
            make_folder(self.root, _PASSABLE, is_durable=True)
        found = kept_key(self._id_file, lambda: secrets.token_hex(_ID_BYTES).encode())
        if (name := self._name_in(found)) is None:
            raise DiskFailedError(str(self._id_file), "it holds no id of a volume")
        return name

    def known_id(self) -> str | None:
        """The id, where somebody has used the volume and it can be read."""
        try:
            return self._name_in(self._id_file.read_bytes())
        except OSError:
            return None

    def open(self, grant: CacheGrant, *, huggingface: bool) -> CachePaths:
        """The directories of a grant, which are made where they are absent. Raises ``DiskFailedError``."""
        home = self.root / name_on_disk(grant.organisation)
        project, team = home / "projects" / grant.project, home / "teams" / grant.team
        named = ["user_artifacts", *(["huggingface"] if huggingface else [])]
        with disk_errors(home):
            for name in named:
                self._make(*project.relative_to(self.root).parts, name)
            self._make(*team.relative_to(self.root).parts)
        return CachePaths(project / "user_artifacts", team, project / "huggingface" if huggingface else None)

    def project(self, project: str) -> Path:
        """The folder of a project's caches, by its id. Raises ``NotFoundError``: it has none here."""
        with disk_errors(self.root), suppress(FileNotFoundError), os.scandir(self.root) as homes:
            for home in homes:
                path = Path(home.path, "projects", project)
                if not home.name.startswith(".") and home.is_dir(follow_symlinks=False) and path.is_dir():
                    return path
        raise NotFoundError(f"a training cache of project {project} on this volume")

    def remove_project(self, organisation: str, project: str) -> bool:
        """Everything of a project; whether there was anything. Raises ``DiskFailedError``."""
        return self.trash.discard(self.root / name_on_disk(organisation) / "projects" / project)

    def remove(self, project: str, path: str) -> None:
        """A file, link or folder below a project's caches.

        Raises ``InvalidRequestError``, ``DiskFailedError``; ``NotFoundError``: there is none, or a link leads there.
        """
        try:
            *folders, name = normalise_path(path).split("/")
        except UnsafePathError as error:
            raise InvalidRequestError(f"{path!r} is no path below a training cache: {error}") from None
        with ExitStack() as stack:
            try:
                folder = stack.enter_context(opened(self.project(project), _FOLDER))
                for one in folders:
                    folder = stack.enter_context(opened(one, _FOLDER, folder))
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise DiskFailedError(path, error.strerror or str(error)) from error
            else:
                if self.trash.discard_in(folder, name):
                    return
        raise NotFoundError(f"{path} in the training cache of project {project}")

    @property
    def _id_file(self) -> Path:
        return self.root / "volume_id"

    @staticmethod
    def _name_in(content: bytes) -> str | None:
        name = content.decode("ascii", "replace").strip()
        is_one = len(name) == 2 * _ID_BYTES and set(name) <= set("0123456789abcdef")
        return name if is_one else None

    def _make(self, *names: str) -> None:
        with ExitStack() as stack:
            folder = stack.enter_context(open_folder(self.root))
            for name in names[:-1]:
                folder = stack.enter_context(_made(folder, name, _PASSABLE))
            stack.enter_context(_made(folder, names[-1], _OPEN))


def name_on_disk(organisation: str) -> str:
    """How an organisation's folder is called, for ever."""
    return digest_of(organisation.encode()).hex[:32]


@contextmanager
def _made(folder: int, name: str, mode: int) -> Iterator[int]:
    """A folder in an open one, durably. One with something in it keeps its mode: a job may have set it."""
    with suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=folder)
        os.fsync(folder)
    with opened(name, _FOLDER, folder) as made:
        if os.fstat(made).st_mode & mode != mode and (mode != _OPEN or _is_empty(made)):
            os.fchmod(made, mode)  # a umask took some of it away
        yield made


def _is_empty(folder: int) -> bool:
    with os.scandir(folder) as entries:
        return next(entries, None) is None
