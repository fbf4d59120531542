"""The target of a volume: the path below the kubelet's directory at which one pod sees one volume."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Self

from bdn.core.chunk import digest_of
from bdn.core.errors import InvalidRequestError, MountFailedError, NotSupportedError
from bdn.disk.binding import bind_read_only, bind_unwritable, is_bound, unbind
from bdn.disk.syscalls import open_without_links

_BELOW: Final = re.compile(
    r"pods/([0-9A-Za-z-]{1,64})/volumes/kubernetes\.io~csi/([A-Za-z0-9][A-Za-z0-9.~_-]{0,254})/mount"
)
_JOB: Final = re.compile(r"[^/@]+/[^/@]+/[^/@]+@(?P<uid>[0-9A-Za-z-]+)\.(?P<digest>[0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class Target:
    """``<kubelet>/pods/<uid>/volumes/kubernetes.io~csi/<volume>/mount``, unique among all volumes of a node."""

    kubelet: Path
    uid: str
    volume: str

    @classmethod
    def parse(cls, text: str, kubelet: Path) -> Self:
        """Raises ``InvalidRequestError`` for a path of another form: nothing else is ever mounted or removed."""
        found = _BELOW.fullmatch(text.removeprefix(f"{kubelet}/")) if text.startswith(f"{kubelet}/") else None
        if found:
            return cls(kubelet, *found.groups())
        raise InvalidRequestError(
            f"the target path {text[:300]!a} is not {kubelet}/pods/UID/volumes/kubernetes.io~csi/NAME/mount: BDN_CSI_KUBELET_DIR has "
            "to be the kubelet's --root-dir"
        )

    @property
    def path(self) -> Path:
        return self.kubelet / "pods" / self.uid / "volumes" / "kubernetes.io~csi" / self.volume / "mount"

    @property
    def _mark(self) -> str:
        return f"{self.uid}.{digest_of(f'{self.uid}/{self.volume}'.encode()).hex[:16]}"

    def job_id(self, namespace: str, pod: str) -> str:
        """``namespace/pod/volume@mark``. Long names are cut; the mark, of the pod's uid and the volume, is unique."""
        return f"{namespace[:63]}/{pod[:60]}/{self.volume[:45]}@{self._mark}"  # 256 characters at most

    def has(self, job_id: str) -> bool:
        """Whether the job is of this volume: unpublishing names the target alone, without namespace and pod."""
        return _JOB.fullmatch(job_id) is not None and job_id.endswith(f"@{self._mark}")

    def shows(self, view: Path) -> bool:
        """Whether the view is mounted here, and read-only."""
        try:
            return is_bound(view, self.path)
        except OSError:  # such as a mount of a file system that failed
            return False

    def make(self) -> None:
        """Create the target, unless something is there. Raises ``MountFailedError``.

        Without it the kubelet never unpublishes a pod that is deleted while its volume waits (getPodVolumePathListFromDisk).
        """
        try:
            with suppress(FileExistsError):
                self.path.mkdir(mode=0o755)
        except OSError as error:
            raise MountFailedError(str(self.path), error.strerror or str(error)) from error

    def empty(self) -> str | None:
        """Unmount the target and make it an empty directory. Returns and raises what ``clear`` does."""
        note = self.clear()
        self.make()
        return note

    def show(self, view: Path, *, is_read_only: bool) -> None:
        """Mount the view read-only. Idempotent. ``is_read_only`` is what the kubelet requests of container runtimes.

        Raises ``MountFailedError``, ``NotSupportedError``.
        """
        self.make()
        try:
            (bind_read_only if is_read_only else bind_unwritable)(view, self.path)
        except OSError as error:
            if is_read_only:
                raise MountFailedError(str(self.path), error.strerror or str(error)) from error
            raise NotSupportedError(
                f"a PersistentVolume that only its access mode makes read-only, on this node ({error.strerror})",
                "set readOnly: true in the pod's persistentVolumeClaim volume",
            ) from error

    def clear(self) -> str | None:
        """Unmount and remove the target. Returns a note if a mount was in use and is only detached.

        Raises ``MountFailedError``: it is still there. Files that lie below it are never deleted.
        """
        try:
            note = unbind(self.path)
            if self.path.is_symlink() or self.path.is_file():
                self.path.unlink()
            elif self.path.exists():
                self.path.rmdir()
        except OSError as error:
            raise MountFailedError(
                str(self.path), f"it cannot be removed ({error.strerror}); look at what is in it, and remove that"
            ) from error
        return note


def uid_of(job_id: str) -> str | None:
    """The uid of the pod whose volume the job is; None for jobs of others."""
    found = _JOB.fullmatch(job_id)
    return found["uid"] if found else None


@contextmanager
def opened_view(mounts: Path, stage_id: str, path: str) -> Iterator[Path]:
    """A name of the view's directory that leads there whatever becomes of its path. Blocking.

    The agent is not trusted with where the view is: a link, or a path elsewhere, would show the pod any directory of the node.

    Raises ``MountFailedError``.
    """
    view = PurePosixPath(path)
    if (
        ".." in view.parts
        or "\0" in path
        or not view.is_relative_to(mounts)
        or view.relative_to(mounts).parts[:1] != (stage_id,)
    ):
        raise MountFailedError(
            path[:300],
            f"the stage is not below {mounts / stage_id[:100]}; give agent and bdn-csi the same BDN_AGENT_MOUNTS_DIR",
        )
    try:
        descriptor = open_without_links(Path(view))
    except OSError as error:
        reason = "a symbolic link leads there" if error.errno == errno.ELOOP else error.strerror or str(error)
        remedy = "mount the agent's cache at the same path, and name it in BDN_AGENT_MOUNTS_DIR without links"
        raise MountFailedError(path[:300], f"{reason}; {remedy}") from error
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
