"""What a checkpoint is: which files of a directory belong to which one, of what type it is, and how names are ordered."""

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

LOOSE: Final = "."  # the checkpoint of files that lie in no folder
UNFINISHED: Final = ".bdn-open"  # a file by which a job says: not yet
CONFIG: Final = "config.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
INDEX: Final = ".index.json"  # how a file ends that names the shards of a model
READ: Final = (CONFIG, ADAPTER_CONFIG)  # of each checkpoint, for ``describe``
_DEEPEST: Final = 100  # of JSON that is kept: what writes it out again ends at 255
# Bytes and elements of a file that is looked into; larger ones say nothing. The index of DeepSeek-V3 has 9 MB and 92,000 elements.
LONGEST_READ: Final = 24 * 1024**2
MOST_ELEMENTS: Final = 400_000
LONGEST_DESCRIBED: Final = 1024**2  # of one of ``READ``: it goes into the record of a checkpoint
ADAPTER_CONFIG_BYTES: Final = 64 * 1024  # of JSON, of an adapter_config.json that is kept beside its checkpoint
LONGEST_NAME: Final = 4096  # characters of a base model


def is_looked_at(name: str) -> bool:
    """Whether a file or folder directly below the checkpoint directory counts: temporary and hidden ones do not."""
    return not (name.startswith((".", "tmp-")) or name.endswith(".tmp"))


def place_of(path: str) -> tuple[str, str] | None:
    """The checkpoint of a file, by its path below the directory, and its path in there; None: it is not looked at."""
    first, _, rest = path.partition("/")
    if not is_looked_at(first):
        return None
    return (first, rest) if rest else (LOOSE, first)


def by_number(name: str) -> tuple[tuple[int, str], ...]:
    """Sorts names with numbers compared as numbers: ``checkpoint-900`` before ``checkpoint-1000``. No two names are equal."""
    parts = enumerate(re.split(r"([0-9]+)", name))
    return (*((int(part), "") if index % 2 else (-1, part) for index, part in parts), (-1, name))


@dataclass(frozen=True, slots=True)
class Description:
    """The type of a checkpoint, and of an adapter its own configuration and the model that it is for."""

    type: CheckpointType
    base_model: str | None = None
    lora_adapter_config: Mapping[str, Any] | None = field(default=None, hash=False)


def describe(paths: Iterable[str], read: Mapping[str, bytes | bytearray]) -> Description:
    """Of a checkpoint with these files; ``read`` has the contents of those of ``READ`` that lie at its root. What is no JSON says nothing.

    Whatever a job wrote there, the result can be written down: as JSON, in UTF-8, in a database.
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
# Beside weights: what Trainer and accelerate keep of optimizers, random states and arguments.
_BESIDE: Final = re.compile(r"(optimizer|scheduler|scaler|sampler|rng_state|random_states|training_args)[^/]*")


def is_weights(path: str) -> bool:
    """Whether a file holds weights or a training state, by its name."""
    name = posixpath.basename(path)
    return name.endswith(_WEIGHTS) and _BESIDE.fullmatch(name) is None


def is_loadable(kind: CheckpointType, paths: Iterable[str]) -> bool:
    """Whether a checkpoint of this type with these files is one that a job resumes from.

    Logs and markers are not, nor one rank's part of what ``torch.distributed.checkpoint`` wrote, without the ``.metadata`` of the rank that holds it.
    """
    names = set(paths)
    parts = {posixpath.dirname(name) for name in names if name.endswith(".distcp")}
    if parts and not any(posixpath.join(folder, ".metadata") in names for folder in parts):
        return False
    return kind != "other" or any(is_weights(name) for name in names)


def shards_of(index: bytes | bytearray) -> set[str]:
    """The files that an index names, relative to it; none where it is no index. What no file can be named is not waited for."""
    named = (_parsed(index) or {}).get("weight_map")
    texts = {name for name in named.values() if isinstance(name, str)} if isinstance(named, dict) else set()
    return {path for name in texts if (path := _path(name)) is not None}


def _path(name: str) -> str | None:
    try:
        return normalise_path(name)
    except UnsafePathError:
        return None


def _parsed(content: bytes | bytearray | None) -> dict[str, Any] | None:
    """None for what is not a JSON object, and for one that is nested deeper, or has more elements, than anybody writes: those are not parsed."""
    if content is None or len(content) > LONGEST_READ:
        return None
    try:
        check_json(bytes(content), MOST_ELEMENTS)
        found = json.loads(content, parse_constant=_refuse)
    except (InvalidRequestError, LimitExceededError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and _is_shallow(found, _DEEPEST) else None


def _object(content: bytes | bytearray | None) -> dict[str, Any] | None:
    """None also for an object with a NUL or half a surrogate pair, which databases refuse."""
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
    raise ValueError(f"{constant} is no JSON")
