"""A job's archive is unpacked into its workspace and nowhere else."""

import io
import tarfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from bdn.core.errors import BdnError, CanceledError, InvalidRequestError, ScratchFullError
from node_agent.run.archive import unpack

MIB = 1024**2


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644, size: int = 0
) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode, made.size = kind, link, mode, size
    return made


def sparse_entry(name: str) -> tarfile.TarInfo:
    made = entry(name, size=512)
    made.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    return made


def packed(path: Path, entries: Sequence[tarfile.TarInfo], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for one in entries:
            tar.addfile(one, io.BytesIO(b"x" * one.size))
    return path


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


LINK, HARD, FOLDER = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE
OUT = "leads out of the workspace"


@pytest.mark.parametrize(("entries", "said"), [
    ([entry("../x")], OUT),
    ([entry("a/../../x")], OUT),
    ([entry("/etc/x")], OUT),
    ([entry("link", LINK, "../x")], "out of the workspace"),
    ([entry("link", LINK, "/etc/passwd")], "out of the workspace"),
    ([entry("d/x", LINK, ".."), entry("out", LINK, "d/x/../y")], "out of the workspace"),
    ([entry("out", LINK, "b/../y"), entry("b", LINK, ".")], "out of the workspace"),  # not yet when it is made
    ([entry("link", LINK, "."), entry("link/x")], "leads through a link"),
    ([entry("a"), entry("a/x")], "leads through a link or a file"),
    ([entry("hard", HARD, "../x")], OUT),
    ([entry("hard", HARD, "absent")], "not an earlier file"),
    ([entry("a"), entry("link", LINK, "a"), entry("hard", HARD, "link")], "not an earlier file"),
    ([entry("device", tarfile.CHRTYPE)], "is not a file"),
    ([entry("pipe", tarfile.FIFOTYPE)], "is not a file"),
    ([entry("program", mode=0o4755)], "set-user-id"),
    ([entry("pax", tarfile.XHDTYPE, size=2 * MIB), entry("a")], "is a header of 2097152 bytes"),
    ([entry("name", tarfile.GNUTYPE_LONGNAME, size=2 * MIB), entry("a")], "is a header of 2097152 bytes"),
    ([entry("sparse", tarfile.GNUTYPE_SPARSE)], "is a sparse file"),
    ([sparse_entry("sparse")], "is a sparse file"),
    ([entry("folder", FOLDER, mode=0o2755)], "set-user-id"),
    ([entry("folder", FOLDER), entry("folder")], "replaces a folder"),
])  # fmt: skip
def test_archive_that_reaches_beyond_its_folder_is_refused(
    workspace: Path, entries: list[tarfile.TarInfo], said: str
) -> None:
    archive = packed(workspace.parent / "archive", entries)

    with pytest.raises(InvalidRequestError, match=said):
        unpack(archive, workspace, MIB, threading.Event())

    assert {path.name for path in workspace.parent.iterdir()} == {"archive", "workspace"}


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_tar_of_any_compression_is_unpacked_as_it_is(workspace: Path, mode: str) -> None:
    entries = [
        entry("./"),
        entry("./deep/", FOLDER, mode=0o500),
        entry("deep/program", mode=0o755, size=5),
        entry("made/on/the/way", size=1),
        entry("link", LINK, "deep/program"),
        entry("same", HARD, "deep/program"),
        entry("twice", size=1),
        entry("a/../twice", size=2),
    ]
    unpack(packed(workspace.parent / "archive", entries, mode), workspace, MIB, threading.Event())

    assert (workspace / "link").read_bytes() == b"xxxxx"
    assert (workspace / "deep/program").stat().st_mode & 0o7777 == 0o755
    assert (workspace / "same").samefile(workspace / "deep/program")
    assert (workspace / "made/on/the/way").read_bytes() == b"x"
    assert (workspace / "twice").read_bytes() == b"xx"


GLOBALS = tarfile.TarInfo.create_pax_global_header({f"key{number}": "value" for number in range(100)})
CHAIN = 2000 * tarfile.TarInfo.create_pax_global_header({"comment": "x"})


@pytest.mark.parametrize(("archive", "stop", "error"), [
    (GLOBALS + entry("a").tobuf(), False, InvalidRequestError),
    (CHAIN + entry("a").tobuf(), False, InvalidRequestError),
    ([entry("large", size=MIB + 1)], False, ScratchFullError),
    ([entry(f"empty-{number}") for number in range(300)], False, ScratchFullError),
    ([entry("small")], True, CanceledError),
    (b"no tar", False, InvalidRequestError),
    (b"\x1f\x8b\x08\x00broken", False, InvalidRequestError),
])  # fmt: skip
def test_archive_that_cannot_be_unpacked_is_an_error_of_the_job(
    workspace: Path, archive: list[tarfile.TarInfo] | bytes, stop: bool, error: type[BdnError]
) -> None:
    path, event = workspace.parent / "archive", threading.Event()
    if isinstance(archive, bytes):
        path.write_bytes(archive)
    else:
        packed(path, archive)
    if stop:
        event.set()

    with pytest.raises(error):
        unpack(path, workspace, MIB, event)
