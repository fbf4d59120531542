"""The demo's model repository: real safetensors in shards, nested folders, small files. About 1.1 GB of random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

SHARDS: Final = 16
SHARD_BYTES: Final = 64 * 1024 * 1024  # moto reads a whole object for every range, so objects stay small
_SMALL_FILES: Final = 40


def make_model(folder: Path) -> None:
    """Write the repository below ``folder``."""
    import numpy as np  # noqa: PLC0415 - an extra that only the demo needs
    from safetensors.numpy import save_file  # noqa: PLC0415

    random = np.random.default_rng()
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number in range(SHARDS):
        name = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        tensor = f"model.layers.{number}.mlp.weight"
        weights = np.frombuffer(random.bytes(SHARD_BYTES), dtype=np.float16).reshape(-1, 4096)
        save_file({tensor: weights}, folder / name, {"format": "pt"})
        weight_map[tensor] = name
    _write(folder / "config.json", {"architectures": ["DemoForCausalLM"], "num_hidden_layers": SHARDS})
    _write(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    _write(
        folder / "tokenizer" / "tokenizer.json", {"model": {"type": "BPE", "vocab": {f"t{n}": n for n in range(5000)}}}
    )
    (folder / "README.md").write_text("# A model that was made for the demo of BDN\n")
    (folder / "tokenizer" / "added_tokens.json").touch()
    for number in range(_SMALL_FILES):
        _write(folder / "eval" / f"task {number % 4}" / f"results-{number}.json", {"task": number, "score": number / 7})


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2))
