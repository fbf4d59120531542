"""Train a classifier of texts on Qwen's frozen embeddings, with the standard library alone."""

import json
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path

MODEL = Path("/app/models/Qwen/Qwen3-0.6B")
EMBEDDINGS = "model.embed_tokens.weight"
STEPS, SAVE_EVERY, RATE = 30, 10, 4.0

Vector = list[float]


def embeddings_of(tokens: set[int]) -> dict[int, Vector]:
    """These rows of the embeddings, which are bfloat16: the upper half of a float."""
    for path in sorted(MODEL.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            if EMBEDDINGS not in header:
                continue
            _, width = header[EMBEDDINGS]["shape"]
            start = 8 + length + header[EMBEDDINGS]["data_offsets"][0]
            rows = {}
            for token in tokens:
                file.seek(start + token * width * 2)
                row = file.read(width * 2)
                floats = b"".join(b"\0\0" + row[at : at + 2] for at in range(0, len(row), 2))
                rows[token] = list(struct.unpack(f"<{width}f", floats))
            print(f"read {len(rows)} embeddings of {width} values from {path.name}")
            return rows
    raise SystemExit(f"no file below {MODEL} has {EMBEDDINGS}")


def features_of(tokens: Sequence[int], rows: dict[int, Vector]) -> Vector:
    """The mean of the tokens' embeddings, at length 1."""
    mean = [sum(column) for column in zip(*(rows[token] for token in tokens), strict=True)]
    length = math.hypot(*mean) or 1.0
    return [value / length for value in mean]


def step(head: Vector, examples: Sequence[tuple[Vector, int]]) -> float:
    """One step of gradient descent on the logistic loss, which is returned as it was before."""
    loss, gradient = 0.0, [0.0] * len(head)
    for features, label in examples:
        score = sum(weight * value for weight, value in zip(head, features, strict=True))
        guess = 1 / (1 + math.exp(-score))
        loss += math.log1p(math.exp(-score if label else score))
        for column, value in enumerate(features):
            gradient[column] += (guess - label) * value
    for column, slope in enumerate(gradient):
        head[column] -= RATE * slope / len(examples)
    return loss / len(examples)


def save(head: Vector, number: int, loss: float) -> None:
    """A checkpoint, in the format of safetensors. Complete at once, by the rename."""
    folder = Path(os.environ["BT_CHECKPOINT_DIR"], f"checkpoint-{number}")
    new = folder.with_name(f"tmp-{folder.name}")
    new.mkdir()
    values = struct.pack(f"<{len(head)}f", *head)
    tensor = {"dtype": "F32", "shape": [1, len(head)], "data_offsets": [0, len(values)]}
    header = json.dumps({"score.weight": tensor}).encode()
    header += b" " * (-len(header) % 8)
    (new / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + values)
    (new / "trainer_state.json").write_text(json.dumps({"global_step": number, "loss": loss}))
    new.rename(folder)


def main() -> None:
    """Train on what ``prepare.py`` left in scratch."""
    prepared = json.loads(Path(os.environ["BT_SCRATCH_DIR"], "tokens.json").read_bytes())
    rows = embeddings_of({token for tokens, _ in prepared for token in tokens})
    examples = [(features_of(tokens, rows), label) for tokens, label in prepared if tokens]
    head = [0.0] * len(examples[0][0])
    for number in range(1, STEPS + 1):
        loss = step(head, examples)
        if number % SAVE_EVERY == 0:
            print(f"step {number}: loss {loss:.4f}", flush=True)
            save(head, number, loss)


main()
