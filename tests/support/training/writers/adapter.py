"""A PEFT adapter of a base model that lies elsewhere."""

import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from tests.support.training.writers.reporting import complete
from tests.support.training.writers.states import digest_of, model

BASE = "acme/tiny-gpt2"


def adapted(seed: int) -> Any:
    base = model(seed)
    base.name_or_path = base.config.name_or_path = BASE
    torch.manual_seed(seed)
    return get_peft_model(
        base, LoraConfig(r=4, target_modules=["c_attn"], init_lora_weights=False, task_type="CAUSAL_LM")
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1]) / "adapter-1"
    model_with_adapter = adapted(7)
    model_with_adapter.save_pretrained(folder)
    complete(folder, digest_of(model_with_adapter.state_dict()))
