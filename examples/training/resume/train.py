"""Descend with momentum from the newest checkpoint of the project, or from the start if there is none."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

STEPS, RATE, MOMENTUM = 20, 0.02, 0.5


@dataclass
class State:
    """All that the next step needs. A checkpoint without the velocity would continue another way."""

    step: int = 0
    position: float = -4.0
    velocity: float = 0.0

    @property
    def loss(self) -> float:
        """A parabola with its minimum at 3."""
        return (self.position - 3) ** 2

    def advance(self) -> None:
        """One step down the slope."""
        self.velocity = MOMENTUM * self.velocity - RATE * 2 * (self.position - 3)
        self.position += self.velocity
        self.step += 1

    def save(self) -> None:
        """Complete at once, by the rename."""
        folder = Path(os.environ["BT_CHECKPOINT_DIR"], f"checkpoint-{self.step}")
        new = folder.with_name(f"tmp-{folder.name}")
        new.mkdir()
        (new / "state.ckpt").write_text(json.dumps(asdict(self)))
        new.rename(folder)


def loaded() -> State | None:
    """Of the checkpoint that the job was given: it is below ``rank-0``, under its name."""
    found = list(Path(os.environ["BT_LOAD_CHECKPOINT_DIR"]).glob("rank-0/*/state.ckpt"))
    return State(**json.loads(found[0].read_bytes())) if found else None


def main() -> None:
    """Some steps further than the job before."""
    state = loaded()
    if state is None:
        state = State()
        print(f"starting with loss {state.loss:.6f}")
    else:
        print(f"resuming after step {state.step} with loss {state.loss:.6f}")
    for _ in range(STEPS):
        state.advance()
    state.save()
    print(f"saved step {state.step} with loss {state.loss:.6f}")


main()
