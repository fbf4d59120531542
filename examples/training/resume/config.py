"""A job that continues where the last job of its project stopped."""

from truss_train import (
    BasetenCheckpoint,
    CheckpointingConfig,
    Image,
    LoadCheckpointConfig,
    Runtime,
    TrainingJob,
    TrainingProject,
)

training_job = TrainingJob(
    image=Image(base_image="python:3.11-slim"),
    runtime=Runtime(
        start_commands=["python3 train.py"],
        checkpointing_config=CheckpointingConfig(enabled=True),
        load_checkpoint_config=LoadCheckpointConfig(
            enabled=True,
            checkpoints=[BasetenCheckpoint.from_latest_checkpoint(project_name="resume")],
        ),
    ),
)

training_project = TrainingProject(name="resume", job=training_job)
