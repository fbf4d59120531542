"""Whether a checkpoint is complete by its own format: a killed writer leaves files that no loader can read.

No rule trusts its input: a header is scanned in windows and never parsed, no pickle is loaded, no archive is unpacked,
and names from files are only looked up among the checkpoint's files. A file whose content does not match the format of
its name is not judged.
"""

import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Final

from bdn.core.training.checkpoints import ADAPTER_CONFIG, is_weights

Part = Callable[[str, int, int], bytes | bytearray | None]  # of a file, by path, start and stop; None: unreadable

_LONGEST_HEADER: Final = 100_000_000  # bytes, the limit of the safetensors library
_WINDOW: Final = 1024**2  # bytes of a header read at once
_OVERLAP: Final = 128  # bytes; longer than any match of ``_OFFSETS``
_OFFSETS: Final = re.compile(rb'"data_offsets"\s{0,8}:\s{0,8}\[\s{0,8}\d{1,19}\s{0,8},\s{0,8}(\d{1,19})\s{0,8}\]')
_ZIP: Final = b"PK\x03\x04"
_ZIPPED: Final = (".pt", ".pth", ".bin", ".ckpt", ".npz", ".keras")
# End of central directory, APPNOTE.TXT 4.3.16: 22 bytes and a comment, whose length is in the last two.
_END: Final = b"PK\x05\x06"
_END_SIZE: Final = 22
_LONGEST_COMMENT: Final = 65535
_DEEPSPEED: Final = "latest"
_MEGATRON: Final = "latest_checkpointed_iteration.txt"
_TAG: Final = re.compile(r"[A-Za-z][\w.=-]{0,254}")
_LONGEST_TAG: Final = 256  # bytes


def why_not_whole(
    sizes: Mapping[str, int], part: Part, *, is_first_rank: bool = True, is_loose: bool = False
) -> str | None:
    """The missing part of a checkpoint with files of these sizes, in bytes; None: complete as far as its format shows.

    ``part`` is called for at most 1 MiB at a time. Only the first rank has to hold what one rank writes for all, such
    as ``.metadata``. Names in loose marker files refer to other checkpoints and are not checked.
    """
    markers = set() if is_loose else {_DEEPSPEED, _MEGATRON}
    return next(_missing(sizes, part, markers, is_first_rank=is_first_rank), None)


def _missing(sizes: Mapping[str, int], part: Part, markers: Collection[str], *, is_first_rank: bool) -> Iterator[str]:
    folders = {posixpath.dirname(path) for path in sizes if path.endswith(".distcp")} if is_first_rank else set()
    for folder in sorted(folders):
        if not sizes.get(metadata := posixpath.join(folder, ".metadata")):
            yield f"{metadata} is missing, which torch.distributed.checkpoint writes last"
    for path, size in sizes.items():
        name = posixpath.basename(path)
        if name.endswith(".safetensors"):
            why = _of_safetensors(size, partial(part, path))
        elif name.endswith(_ZIPPED):
            why = _of_zip(size, partial(part, path))
        elif name == ADAPTER_CONFIG:
            why = _of_adapter(path, sizes)
        elif name in markers:
            why = _of_marker(path, sizes, part)
        else:
            continue
        if why is not None:
            yield f"{path} {why}"


_OfFile = Callable[[int, int], bytes | bytearray | None]
_UNREAD: Final = "cannot be read"


def _of_safetensors(size: int, part: _OfFile) -> str | None:
    """The first eight bytes are the header's length; the header contains each tensor's end."""
    if not size:
        return "is empty"
    head = part(0, min(size, 9))
    if head is None:
        return _UNREAD
    length = int.from_bytes(head[:8], "little")
    if size >= 8 and (length > _LONGEST_HEADER or (head[8:] not in (b"", b"{") and length)):
        return None
    end = 8 + length
    if size < 8 or not length or size < end:
        return f"is cut off in its header: it has {size} bytes"
    last = 0
    for start in range(8, end, _WINDOW - _OVERLAP):
        window = part(start, min(start + _WINDOW, end))
        if window is None:
            return _UNREAD
        last = max([last, *(int(found[1]) for found in _OFFSETS.finditer(window))])
    return f"is cut off: it has {size} of {end + last} bytes" if size < end + last else None


def _of_zip(size: int, part: _OfFile) -> str | None:
    if not size:
        return "is empty"
    head = part(0, min(size, len(_ZIP)))
    if head is None:
        return _UNREAD
    if not _ZIP.startswith(head):
        return None
    start = max(0, size - _END_SIZE - _LONGEST_COMMENT)
    tail = part(start, size)
    if tail is None:
        return _UNREAD
    at = tail.rfind(_END)
    while at >= 0:
        comment = int.from_bytes(tail[at + 20 : at + _END_SIZE], "little")
        if at + _END_SIZE + comment == len(tail):
            return None
        at = tail.rfind(_END, 0, at)
    return f"is cut off: it is a zip archive of {size} bytes without its directory"


def _of_adapter(path: str, sizes: Mapping[str, int]) -> str | None:
    folder = path.removesuffix(ADAPTER_CONFIG)
    has_weights = any(other.startswith(folder) and is_weights(other) for other in sizes)
    return None if has_weights else "has no adapter_model beside it"


def _of_marker(path: str, sizes: Mapping[str, int], part: Part) -> str | None:
    """Markers of DeepSpeed and Megatron, which name the folder written before."""
    folder, _, name = path.rpartition("/")
    if not 0 < sizes[path] <= _LONGEST_TAG:
        return None
    content = part(path, 0, sizes[path])
    if content is None:
        return _UNREAD
    tag = content.decode(errors="replace").strip()
    if name == _MEGATRON and tag.isascii() and tag.isdecimal():
        tag = f"iter_{int(tag):07}"
    if not _TAG.fullmatch(tag):
        return None
    named = posixpath.join(folder, tag)
    below = [other for other in sizes if other.startswith(f"{named}/")]
    if named in sizes or any(is_weights(other) for other in below):
        return None
    return f"names {tag}, which {'holds no weights' if below else 'does not exist'}"
