"""``save_pretrained`` in shards, on a disk that takes a second for each; the first checkpoint is saved twice."""

import sys
import time
from pathlib import Path
from typing import Any

import transformers.modeling_utils
from safetensors.torch import save_file

from tests.support.training.writers.reporting import complete, wait
from tests.support.training.writers.states import digest_of, model

SHARD_SECONDS = 1.0


def slow(tensors: Any, path: str, **options: Any) -> None:
    save_file(tensors, path, **options)
    time.sleep(SHARD_SECONDS)


def save(folder: Path, seed: int) -> None:
    written = model(seed, width=256, words=4000)
    written.save_pretrained(folder, max_shard_size="2MB")
    complete(folder, digest_of(written.state_dict()))


if __name__ == "__main__":
    out = Path(sys.argv[1])
    transformers.modeling_utils.safe_save_file = slow
    save(out / "step-1", 1)
    save(out / "step-2", 2)
    wait()
    save(out / "step-1", 3)
