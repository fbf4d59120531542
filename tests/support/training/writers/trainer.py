"""``Trainer`` that saves at every step and keeps two checkpoints. After each it waits.

With a third argument it says of each checkpoint that it is open, and hangs in the middle of the last one.
"""

import signal
import sys
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.support.training.writers.reporting import complete, report, wait
from tests.support.training.writers.states import digest_of, model

WORDS = [
    {"input_ids": row, "labels": row} for row in ([(seed * place) % 500 for place in range(16)] for seed in range(64))
]


def trainer(out: Path, steps: int) -> Any:
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=4,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    return Trainer(model=model(0), args=arguments, train_dataset=WORDS)


class Told(TrainerCallback):  # type: ignore[misc]  # of a library without types here
    def on_save(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        complete(Path(args.output_dir) / f"checkpoint-{state.global_step}", digest_of(facts["model"].state_dict()))
        wait()


class Open(TrainerCallback):  # type: ignore[misc]
    """Keeps a file ``.bdn-open`` in a checkpoint while the trainer writes it, as docs/operations.md has it."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_save:
            self.mark(args, state).parent.mkdir(parents=True, exist_ok=True)
            self.mark(args, state).touch()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.mark(args, state).unlink()

    def mark(self, args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / ".bdn-open"


def hang_in(training: Any, step: int) -> None:
    """Between the model and what else belongs to a checkpoint."""
    save = training._save_optimizer_and_scheduler

    def hang(folder: str) -> None:
        if training.state.global_step == step:
            report(hanging=step)
            signal.pause()
        save(folder)

    training._save_optimizer_and_scheduler = hang


if __name__ == "__main__":
    _, out, steps, *is_hanging = sys.argv
    training = trainer(Path(out), int(steps))
    if is_hanging:
        training.add_callback(Open())
        hang_in(training, int(steps))
    training.add_callback(Told())
    training.train()
