"""The directories of training caches on a volume that all nodes of a cluster share.

A job mounts ``user_artifacts`` and ``huggingface`` below ``<root>/<organisation>/projects/<id>``; ``…/teams/<id>``
is mounted itself. ``…/projects/<id>.gone``, an empty file, marks a deleted project. The agent owns every directory
above a mount, so no job can put a link there. Projects and teams are named by their ids. An organisation's name may be
any text, so its folder is named by a digest.
"""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bdn.core.chunk import UnsafePathError, normalise_path
from bdn.core.errors import DiskFailedError, GrantInvalidError, InvalidRequestError, NotFoundError
from bdn.core.training.cache_layout import HUGGINGFACE, USER_ARTIFACTS, home_of, project_folder, team_folder
from bdn.disk.durable import disk_errors, kept_key, make_folder, open_folder, opened
from bdn.wire.grants import CacheGrant
from bdn.wire.job_schema import CacheFolders
from node_agent.disk.trash import Trash

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_PASSABLE: Final = 0o711  # search without list: only a process that knows the id gets in
_OPEN: Final = 0o777
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_ID_BYTES: Final = 16


@dataclass(frozen=True)
class CacheVolume:
    """A volume; removed directories go into ``trash``. Blocking. Nothing is created before the first use."""

    root: Path
    trash: Trash

    def id(self) -> str:
        """The random id of the volume, written at the first use. Raises ``DiskFailedError``.

        If two nodes write an id at once, one id wins and both nodes return it.
        """
        with disk_errors(self.root):
            make_folder(self.root, _PASSABLE, is_durable=True)
        found = kept_key(self._id_file, lambda: secrets.token_hex(_ID_BYTES).encode())
        if (name := self._name_in(found)) is None:
            raise DiskFailedError(str(self._id_file), "the file does not contain a volume id")
        return name

    def known_id(self) -> str | None:
        """The id, or None if the volume was never used or cannot be read."""
        try:
            return self._name_in(self._id_file.read_bytes())
        except OSError:
            return None

    def open(self, grant: CacheGrant, *, huggingface: bool) -> CacheFolders:
        """Create the directories of a grant where missing.

        Raises ``GrantInvalidError`` if the project was deleted; ``DiskFailedError``.
        """
        home = self.root / home_of(grant.organisation)
        project = self.root / project_folder(grant.organisation, grant.project)
        team = self.root / team_folder(grant.organisation, grant.team)
        named = [USER_ARTIFACTS, *([HUGGINGFACE] if huggingface else [])]
        with disk_errors(home):
            self._check_not_gone(home, grant.project)
            for name in named:
                self._make(*project.relative_to(self.root).parts, name)
            self._make(*team.relative_to(self.root).parts)
        return CacheFolders(
            project_id=grant.project,
            project=str(project / USER_ARTIFACTS),
            team=str(team),
            huggingface=str(project / HUGGINGFACE) if huggingface else None,
        )

    def project(self, project: str) -> Path:
        """Raises ``NotFoundError`` if the project has no cache on this volume."""
        with disk_errors(self.root), suppress(FileNotFoundError), os.scandir(self.root) as homes:
            for home in homes:
                path = Path(home.path, "projects", project)
                if not home.name.startswith(".") and home.is_dir(follow_symlinks=False) and path.is_dir():
                    return path
        raise NotFoundError(f"a training cache of project {project} on this volume")

    def close_project(self, organisation: str, project: str) -> None:
        """Write the marker after which no agent opens the project's cache again, durably. Raises ``DiskFailedError``."""
        home = self.root / home_of(organisation)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        with disk_errors(home), self._folder(home.name, "projects") as folder, opened(_marker(project), flags, folder):
            os.fsync(folder)

    def _check_not_gone(self, home: Path, project: str) -> None:
        """The folder is opened for this look-up: NFS then asks the server for names that other nodes made (nfs(5))."""
        with self._folder(home.name, "projects") as folder, suppress(FileNotFoundError):
            os.stat(_marker(project), dir_fd=folder, follow_symlinks=False)
            raise GrantInvalidError(f"project {project} was deleted")

    def remove_project(self, organisation: str, project: str) -> bool:
        """Returns False if nothing existed. Raises ``DiskFailedError``."""
        return self.trash.discard(self.root / project_folder(organisation, project))

    def remove(self, project: str, path: str) -> None:
        """Remove a file, link or folder below a project's caches.

        Raises ``InvalidRequestError``; ``DiskFailedError``; ``NotFoundError`` if the path is missing or leads
        through a link.
        """
        try:
            *folders, name = normalise_path(path).split("/")
        except UnsafePathError as error:
            raise InvalidRequestError(f"{path!r} is not a path below a training cache: {error}") from None
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
        with self._folder(*names[:-1]) as folder, _made(folder, names[-1], _OPEN):
            pass

    @contextmanager
    def _folder(self, *names: str) -> Iterator[int]:
        """An open folder below the root. Creates it and its parents where missing."""
        with ExitStack() as stack:
            folder = stack.enter_context(open_folder(self.root))
            for name in names:
                folder = stack.enter_context(_made(folder, name, _PASSABLE))
            yield folder


def _marker(project: str) -> str:
    """Beside the project's directory. Stays for ever; no project has this name as its id."""
    return f"{project}.gone"


@contextmanager
def _made(folder: int, name: str, mode: int) -> Iterator[int]:
    """Create the folder ``name`` in an open folder, durably.

    A folder that is not empty keeps its mode, because a job may have set the mode.
    """
    with suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=folder)
        os.fsync(folder)
    with opened(name, _FOLDER, folder) as made:
        if os.fstat(made).st_mode & mode != mode and (mode != _OPEN or _is_empty(made)):
            os.fchmod(made, mode)  # the umask removed some bits
        yield made


def _is_empty(folder: int) -> bool:
    with os.scandir(folder) as entries:
        return next(entries, None) is None
