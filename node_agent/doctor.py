"""What this machine offers an agent, for ``bdn doctor`` (entry point ``doctor`` of ``bdn.embedded``).

Runs the agent's own probes in a private folder beside the cache, which is removed before the disk is measured. The
measured file has no name when its first byte is written: nothing is left, however this process ends. A folder that a
kill left during the short probes is removed by the next run.
"""

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from bdn.core.errors import BdnError
from bdn.core.findings import (
    Examination,
    Finding,
    Measured,
    judge_descriptors,
    judge_direct,
    judge_directory,
    judge_exposure,
    judge_group_sync,
    judge_kernel,
    judge_memory,
    judge_reflinks,
    judge_settings,
    judge_volumes,
)
from bdn.disk.binding import can_bind, mounts_below, unbind
from bdn.disk.direct import DirectFile, DirectWrites, UncachedFile
from bdn.disk.durable import nearest_folder, opened, remove_tree, try_lock
from bdn.disk.syscalls import file_system_name
from bdn.local.doctor import certificate_findings
from bdn.net.descriptors import connection_limit, raise_descriptor_limit
from bdn.settings import SettingsError
from node_agent.cache.space import check_fitness, new_budgets
from node_agent.disk.cache_format import check_format
from node_agent.disk.group_sync import is_trusted, kernel_version
from node_agent.disk.places import Places
from node_agent.job.bounds import can_make_images
from node_agent.run.launchers import answering_launcher
from node_agent.settings import AgentSettings, load_settings
from node_agent.stage.view.build import can_clone

_PREFIX: Final = ".bdn-doctor-"
_MOST_BYTES: Final = 256 * 1024**2
_PIECE: Final = 8 * 1024**2
_LEAST_BYTES: Final = 4 * _PIECE
_PART_OF_FREE: Final = 10  # the probe takes at most a tenth of the free space
_LONGEST_SECONDS: Final = 2.0  # of each direction
_CGROUPS: Final = Path("/sys/fs/cgroup")


def examine(*, measure: bool) -> Examination:
    """Examine this machine with the agent's settings of the environment. Blocking.

    Without ``measure`` no disk rate is measured. With wrong settings only the machine itself is examined.
    """
    try:
        settings = load_settings()
    except SettingsError as error:
        unknown = Measured(reason="the settings are wrong")
        byte_threads = AgentSettings.model_fields["byte_threads"].default
        return Examination((*judge_settings(str(error)), *_machine(byte_threads)), unknown, unknown)
    findings = [
        *_machine(settings.byte_threads),
        *certificate_findings("BDN_AGENT_TLS", settings.tls_cert, settings.tls_key, "agent"),
    ]
    write = read = Measured(reason="not measured")
    try:
        root = settings.effective_cache_dir.absolute()
        place = nearest_folder(root)
        findings += _cache(settings, root, place)
        with ExitStack() as stack:
            with _probe_folder(place) as folder:
                findings += _probes(settings, folder)
                pair = stack.enter_context(_unnamed(folder)) if measure else None
            if pair is not None:
                write, read = _rates(pair[0], pair[1], _probe_size(place))
    except (OSError, BdnError) as error:
        reason = _reason_of(error)
        findings.append(_unwritable(settings, error))
        write, read = Measured(reason=reason), Measured(reason=reason)
    return Examination((*findings, _launcher(settings)), write, read)


# --- the machine ---


def _machine(byte_threads: int) -> Iterator[Finding]:
    yield judge_kernel(os.uname().release, kernel_version())
    yield judge_memory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _memory_limit(), byte_threads)
    yield judge_descriptors(raise_descriptor_limit(), connection_limit())


def _memory_limit() -> int | None:
    """The smallest limit of this process's cgroup and its parents, of version 2 or 1; None: no limit is visible."""
    found: list[int] = []
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top, name = (_CGROUPS, "memory.max") if not controllers else (_CGROUPS / "memory", "memory.limit_in_bytes")
            own = top / path.lstrip("/")
            for folder in (own, *own.parents):
                with suppress(OSError, ValueError):  # "max" is not a number
                    found.append(int((folder / name).read_text(encoding="ascii")))
                if folder == top:
                    break
    limit = min(found, default=None)
    return None if limit is None or limit >= 1 << 60 else limit  # version 1 says "no limit" as LONG_MAX


def _launcher(settings: AgentSettings) -> Finding:
    try:
        launcher = answering_launcher(settings.job_launcher)
    except SettingsError as error:
        needed = "job" in settings.roles or settings.job_launcher is not None
        advice = "Install podman, docker or bubblewrap; only training jobs need one."
        return Finding("launcher", "problem" if needed else "note", str(error), advice, {"launcher": None})
    return Finding("launcher", "ok", f"{launcher} starts training jobs", None, {"launcher": launcher})


# --- the cache directory ---


def _cache(settings: AgentSettings, root: Path, place: Path) -> Iterator[Finding]:
    """``place`` is ``root``, or its nearest parent that exists."""
    with opened(place, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        name, trusted = file_system_name(descriptor), is_trusted(descriptor)
    disk = os.statvfs(place)
    budgets = new_budgets(settings, disk)
    free, roles = disk.f_bavail * disk.f_frsize, settings.roles
    tiers: dict[str, int] = {"node": budgets.node} if "node" in roles else {}
    tiers |= {"cluster": budgets.cluster} if "cluster" in roles else {}
    yield judge_directory("cache", str(root), file_system=name, free=free, budgets=tiers, setting="BDN_AGENT_CACHE_DIR")
    try:
        check_format(Places(root))
        check_fitness(place)
    except BdnError as error:
        advice = "Name another directory in BDN_AGENT_CACHE_DIR, or mend the disk: the agent cannot store files there."
        yield Finding("cache directory", "problem", str(error), advice)
    yield judge_group_sync(is_trusted=trusted)


def _probes(settings: AgentSettings, folder: Path) -> Iterator[Finding]:
    writes = DirectWrites()
    writes.probe(folder)
    yield judge_direct(writes.reason, is_known=writes.is_known)
    yield judge_reflinks(works=can_clone(folder, folder))
    if "node" in settings.roles:
        mounts = can_bind(folder)
        yield judge_exposure(settings.exposure, can_bind=mounts)
        is_bind = mounts and settings.exposure in ("auto", "bind")
        yield judge_volumes(are_bounded=is_bind and can_make_images(folder))


def _unwritable(settings: AgentSettings, error: OSError | BdnError) -> Finding:
    """Another user's agent may have the directory, which only a note says; without a directory nothing can work."""
    root = settings.effective_cache_dir.absolute()
    number = error.errno if isinstance(error, OSError) else getattr(error.__cause__, "errno", None)
    message = f"user {os.geteuid()} cannot write below {nearest_folder(root)}: {_reason_of(error)}"
    if number in (errno.EACCES, errno.EPERM) and root.is_dir():
        advice = "Run bdn doctor as the user of the agent to examine the disk."
        return Finding("disk probes", "note", message, advice)
    advice = "Name a directory that this user may write to in BDN_AGENT_CACHE_DIR or BDN_DATA_DIR, or free space."
    return Finding("disk probes", "problem", message, advice)


def _reason_of(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


@contextmanager
def _probe_folder(place: Path) -> Iterator[Path]:
    """A private, locked folder in ``place``. Raises ``OSError``, or ``DiskFailedError``: without locks no agent starts."""
    _sweep(place)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    try:
        with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
            try_lock(descriptor, folder)
            yield folder
    finally:
        _remove(folder)


def _sweep(place: Path) -> None:
    """Remove this user's probe folders that a kill left: the kernel has released their locks."""
    for folder in place.glob(f"{_PREFIX}*"):
        with suppress(OSError, BdnError):
            if folder.lstat().st_uid != os.geteuid():
                continue
            with opened(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as descriptor:
                if try_lock(descriptor, folder):
                    _remove(folder)


def _remove(folder: Path) -> None:
    for mounted in mounts_below(folder):
        unbind(mounted)
    remove_tree(folder)


# --- the disk's rates ---


@contextmanager
def _unnamed(folder: Path) -> Iterator[tuple[DirectFile, UncachedFile]]:
    """A file without a name, for writing and for reading: the kernel removes it with its last descriptor."""
    file = DirectFile(folder / "rate", DirectWrites())
    try:
        file.open()
        with UncachedFile(file.path) as reader:
            file.path.unlink()
            yield file, reader
    finally:
        file.close()


def _probe_size(place: Path) -> int:
    """Zero if the disk has too little free space for a measurement."""
    disk = os.statvfs(place)
    size = min(_MOST_BYTES, disk.f_bavail * disk.f_frsize // _PART_OF_FREE) // _PIECE * _PIECE
    return size if size >= _LEAST_BYTES else 0


def _rates(file: DirectFile, reader: UncachedFile, size: int) -> tuple[Measured, Measured]:
    if not size:
        full = Measured(reason="the disk has too little free space for a measurement")
        return full, full
    with mmap.mmap(-1, _PIECE) as area, memoryview(area) as buffer:
        buffer[:] = os.urandom(_PIECE)  # file systems that compress or deduplicate would not write zeros

        def write(offset: int) -> int:
            file.write(buffer, offset)
            return _PIECE

        try:
            written, write_seconds = _timed(write, size, lambda: os.fdatasync(file.descriptor))
            read, read_seconds = _timed(lambda offset: reader.read(buffer, offset, _PIECE), written)
        except OSError as error:
            failed = Measured(reason=_reason_of(error))
            return failed, failed
    return Measured(written / write_seconds), Measured(read / read_seconds)


def _timed(step: Callable[[int], int], size: int, finish: Callable[[], object] = lambda: None) -> tuple[int, float]:
    """Bytes done, and seconds with ``finish``. Begins no step after ``_LONGEST_SECONDS``."""
    began, done = time.monotonic(), 0
    while done < size and (not done or time.monotonic() - began < _LONGEST_SECONDS):
        count = step(done)
        done += count
        if not count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
    finish()
    return done, max(time.monotonic() - began, 1e-6)
