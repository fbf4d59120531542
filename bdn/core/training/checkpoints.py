"""What a checkpoint is: which files of a directory belong to which one, of what type it is, and how names are ordered."""

import json
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

CheckpointType = Literal["lora", "whisper", "full", "other"]

LOOSE: Final = "."  # the checkpoint of files that lie in no folder
UNFINISHED: Final = ".bdn-open"  # a file by which a job says: not yet
CONFIG: Final = "config.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
INDEX: Final = ".index.json"  # how a file ends that names the shards of a model
READ: Final = (CONFIG, ADAPTER_CONFIG)  # of each checkpoint, for ``describe``
LONGEST_READ: Final = 4 * 1024**2  # bytes of a file that is looked into; larger ones say nothing


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
    """Sorts names with numbers compared as numbers: ``checkpoint-900`` before ``checkpoint-1000``."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name))


@dataclass(frozen=True, slots=True)
class Description:
    """The type of a checkpoint, and of an adapter its own configuration and the model that it is for."""

    type: CheckpointType
    base_model: str | None = None
    lora_adapter_config: Mapping[str, Any] | None = field(default=None, hash=False)


def describe(paths: Iterable[str], read: Mapping[str, bytes]) -> Description:
    """Of a checkpoint with these files; ``read`` has the contents of those of ``READ`` that lie at its root. What is no JSON says nothing."""
    names = set(paths)
    if ADAPTER_CONFIG in names:
        adapter = _object(read.get(ADAPTER_CONFIG))
        base = (adapter or {}).get("base_model_name_or_path")
        return Description("lora", base if isinstance(base, str) else None, adapter)
    if (_object(read.get(CONFIG)) or {}).get("model_type") == "whisper":
        return Description("whisper")
    has_weights = any(posixpath.dirname(name) == "" and name.endswith(".safetensors") for name in names)
    return Description("full" if CONFIG in names or has_weights else "other")


def shards_of(index: bytes) -> set[str]:
    """The files that an index names, relative to it; none where it is no index."""
    names = (_object(index) or {}).get("weight_map")
    return {name for name in names.values() if isinstance(name, str)} if isinstance(names, dict) else set()


def _object(content: bytes | None) -> dict[str, Any] | None:
    try:
        found = json.loads(content) if content is not None else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
