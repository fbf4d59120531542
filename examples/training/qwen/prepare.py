"""Tokenize the dataset into the project's cache, once: later jobs of the project find the tokens there."""

import json
import os
from hashlib import sha256
from pathlib import Path

TOKENIZER = Path("/app/models/Qwen/Qwen3-0.6B/tokenizer.json")
DATA = Path("/app/data/training-data")
CACHE = Path(os.environ["BT_PROJECT_CACHE_DIR"])


def tokenized(text: str, vocabulary: dict[str, int]) -> list[int]:
    """The longest known token first, from left to right. Characters without a token are left out."""
    rest = text.replace(" ", "\u0120")  # as byte-level tokenizers write a space
    longest = max(map(len, vocabulary))
    tokens = []
    while rest:
        sizes = range(min(len(rest), longest), 0, -1)
        size = next((size for size in sizes if rest[:size] in vocabulary), 0)
        if size:
            tokens.append(vocabulary[rest[:size]])
        rest = rest[size or 1 :]
    return tokens


def main() -> None:
    """Write the examples under the digest of what they are made from, whole by one rename."""
    files = sorted(DATA.rglob("*.jsonl"))
    digest = sha256(b"".join(path.read_bytes() for path in (TOKENIZER, *files))).hexdigest()
    prepared = CACHE / f"tokens-{digest[:16]}.json"
    if prepared.exists():
        print(f"an earlier job left {prepared.name} in the cache")
    else:
        vocabulary = json.loads(TOKENIZER.read_bytes())["model"]["vocab"]
        lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        examples = [(tokenized(line["text"], vocabulary), line["label"]) for line in lines]
        written = prepared.with_suffix(f".{os.environ['BT_TRAINING_JOB_ID']}")
        written.write_text(json.dumps(examples))
        written.rename(prepared)
        print(f"tokenized {len(examples)} examples into {prepared.name}")
    (Path(os.environ["BT_SCRATCH_DIR"]) / "tokens.json").symlink_to(prepared)


main()
