"""A job on two nodes, whose ranks average their gradients."""

from truss_train import Compute, Image, Runtime, TrainingJob, TrainingProject

training_job = TrainingJob(
    image=Image(base_image="python:3.11-slim"),
    compute=Compute(node_count=2),
    runtime=Runtime(start_commands=["python3 train.py"]),
)

training_project = TrainingProject(name="two-nodes", job=training_job)
