"""Rules of checkpoints: which files of a directory belong to which checkpoint, its type, and the order of names."""

import json
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn

from bdn.core.chunk import UnsafePathError, normalise_path
from bdn.core.errors import InvalidRequestError, LimitExceededError
from bdn.core.json_bounds import check_json

CheckpointType = Literal["lora", "whisper", "full", "other"]

LOOSE: Final = "."  # the checkpoint of files outside of folders
ARCHIVE: Final = ".archive"  # the name under which a job has its uploaded archive
UNFINISHED: Final = ".bdn-open"  # a job creates this file while it still writes
CONFIG: Final = "config.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
INDEX: Final = ".index.json"  # suffix of files that name a model's shards
READ: Final = (CONFIG, ADAPTER_CONFIG)  # read in each checkpoint, for ``describe``
_DEEPEST: Final = 100  # levels of JSON that is stored; its serialiser fails at 255
# Bytes and elements of a file that is parsed; larger files are ignored. The index of DeepSeek-V3 has 9 MB and 92,000
# elements.
LONGEST_READ: Final = 24 * 1024**2
MOST_ELEMENTS: Final = 400_000
LONGEST_DESCRIBED: Final = 1024**2  # of each file in ``READ``: it goes into the record of a checkpoint
ADAPTER_CONFIG_BYTES: Final = 64 * 1024  # JSON of an adapter_config.json that is stored with its checkpoint
LONGEST_NAME: Final = 4096  # characters of a base model


def is_looked_at(name: str) -> bool:
    """Whether a file or folder directly below the checkpoint directory counts: temporary and hidden ones do not."""
    return not (name.startswith((".", "tmp-")) or name.endswith(".tmp"))


def is_reserved(name: str) -> bool:
    """Whether the name is not a checkpoint's: jobs cannot push it, and lists and ``latest`` leave it out."""
    return name.startswith(".") and name != LOOSE


def place_of(path: str) -> tuple[str, str] | None:
    """Split a file's path below the directory into its checkpoint and the path inside; None: ignored."""
    first, _, rest = path.partition("/")
    if not is_looked_at(first):
        return None
    return (first, rest) if rest else (LOOSE, first)


def by_number(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key with numbers compared as numbers: ``checkpoint-900`` before ``checkpoint-1000``. Injective."""
    parts = enumerate(re.split(r"([0-9]+)", name))
    return (*((int(part), "") if index % 2 else (-1, part) for index, part in parts), (-1, name))


@dataclass(frozen=True, slots=True)
class Description:
    """A checkpoint's type; for an adapter, also its configuration and base model."""

    type: CheckpointType
    base_model: str | None = None
    lora_adapter_config: Mapping[str, Any] | None = field(default=None, hash=False)


def describe(paths: Iterable[str], read: Mapping[str, bytes | bytearray]) -> Description:
    """Describe a checkpoint with these files; ``read`` has contents of ``READ`` at its root.

    Invalid JSON is ignored.

    Whatever a job wrote, the result can be stored: as JSON, in UTF-8, in a database.
    """
    names = set(paths)
    if ADAPTER_CONFIG in names:
        adapter = _object(read.get(ADAPTER_CONFIG))
        base = (adapter or {}).get("base_model_name_or_path")
        if adapter is not None and len(json.dumps(adapter)) > ADAPTER_CONFIG_BYTES:
            adapter = None
        return Description("lora", base if isinstance(base, str) and len(base) <= LONGEST_NAME else None, adapter)
    if (_object(read.get(CONFIG)) or {}).get("model_type") == "whisper":
        return Description("whisper")
    has_weights = any(posixpath.dirname(name) == "" and name.endswith(".safetensors") for name in names)
    return Description("full" if CONFIG in names or has_weights else "other")


_WEIGHTS: Final = (
    *(".safetensors", ".distcp", ".pt", ".pth", ".ckpt", ".bin"),
    *(".gguf", ".h5", ".keras", ".msgpack", ".nemo", ".npz"),
)
# Files beside weights: states of optimizers, random generators and arguments, from Trainer and accelerate.
_BESIDE: Final = re.compile(r"(optimizer|scheduler|scaler|sampler|rng_state|random_states|training_args)[^/]*")


def is_weights(path: str) -> bool:
    """Whether a file holds weights or a training state, by its name."""
    name = posixpath.basename(path)
    return name.endswith(_WEIGHTS) and _BESIDE.fullmatch(name) is None


def is_loadable(kind: CheckpointType, paths: Iterable[str]) -> bool:
    """Whether a job can resume from a checkpoint of this type with these files.

    Not from logs and markers, nor from one rank's part of a ``torch.distributed.checkpoint`` without the ``.metadata``
    that another rank holds.
    """
    names = set(paths)
    parts = {posixpath.dirname(name) for name in names if name.endswith(".distcp")}
    if parts and not any(posixpath.join(folder, ".metadata") in names for folder in parts):
        return False
    return kind != "other" or any(is_weights(name) for name in names)


def shards_of(index: bytes | bytearray) -> set[str]:
    """The files that an index names, relative to it; empty for an invalid index. Skips names that no file can have."""
    named = (_parsed(index) or {}).get("weight_map")
    texts = {name for name in named.values() if isinstance(name, str)} if isinstance(named, dict) else set()
    return {path for name in texts if (path := _path(name)) is not None}


def _path(name: str) -> str | None:
    try:
        return normalise_path(name)
    except UnsafePathError:
        return None


def _parsed(content: bytes | bytearray | None) -> dict[str, Any] | None:
    """None for anything but a JSON object, and, without parsing, for implausibly deep or large ones."""
    if content is None or len(content) > LONGEST_READ:
        return None
    try:
        check_json(bytes(content), MOST_ELEMENTS)
        found = json.loads(content, parse_constant=_refuse)
    except (InvalidRequestError, LimitExceededError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and _is_shallow(found, _DEEPEST) else None


def _object(content: bytes | bytearray | None) -> dict[str, Any] | None:
    """None also for an object with a NUL or a lone surrogate, which databases refuse."""
    found = _parsed(content)
    try:
        written = json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return None
    return None if rb"\u0000" in written else found


def _is_shallow(value: Any, depth: int) -> bool:  # noqa: ANN401 - any JSON
    if not isinstance(value, dict | list):
        return True
    inside = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(one, depth - 1) for one in inside)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
