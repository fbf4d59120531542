"""Qwen3 from Hugging Face and a dataset from S3, both on the node before the first command runs."""

from truss_train import (
    CacheConfig,
    CheckpointingConfig,
    Compute,
    Image,
    Runtime,
    TrainingJob,
    TrainingProject,
    WeightsSource,
)

training_job = TrainingJob(
    image=Image(base_image="python:3.11-slim"),
    compute=Compute(cpu_count=2, memory="4Gi"),
    runtime=Runtime(
        start_commands=["python3 prepare.py", "python3 train.py"],
        cache_config=CacheConfig(enabled=True),
        checkpointing_config=CheckpointingConfig(enabled=True),
    ),
    weights=[
        WeightsSource(
            source="hf://Qwen/Qwen3-0.6B",
            mount_location="/app/models/Qwen/Qwen3-0.6B",
            allow_patterns=["*.safetensors", "*.json"],
        ),
        WeightsSource(
            source="s3://my-bucket/training-data",
            mount_location="/app/data/training-data",
        ),
    ],
)

training_project = TrainingProject(name="qwen3-finetune", job=training_job)
