"""``Trainer`` that saves at every step and keeps two checkpoints. After each it waits."""

import sys
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.support.training.writers.reporting import complete, wait
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


if __name__ == "__main__":
    training = trainer(Path(sys.argv[1]), int(sys.argv[2]))
    training.add_callback(Told())
    training.train()
