"""Request bodies as ``truss`` 0.18.36 sends them, unset fields as null."""

from typing import Any

QWEN: dict[str, Any] = {
    "source": "hf://Qwen/Qwen3-0.6B",
    "mount_location": "/app/models/q",
    "auth": None,
    "auth_secret_name": None,
    "allow_patterns": None,
    "ignore_patterns": None,
}
TRAINING_DATA: dict[str, Any] = {
    "source": "s3://my-bucket/training-data",
    "mount_location": "/app/data",
    "auth": {
        "aws_oidc_role_arn": None,
        "aws_oidc_region": None,
        "gcp_oidc_service_account": None,
        "gcp_oidc_workload_id_provider": None,
        "aws_assume_role_arn": None,
        "aws_assume_role_region": None,
        "auth_method": "CUSTOM_SECRET",
        "auth_secret_name": "aws_credentials",
    },
    "auth_secret_name": None,
    "allow_patterns": ["*.safetensors"],
    "ignore_patterns": ["*.md"],
}
TRAINING_JOB: dict[str, Any] = {
    "image": {"base_image": "pytorch/pytorch:2.9.0", "docker_auth": None},
    "compute": {
        "node_count": 1,
        "cpu_count": 1,
        "memory": "2Gi",
        "accelerator": {"accelerator": "H200", "count": 1},
        "availability_model": "dedicated",
    },
    "runtime": {
        "start_commands": ["python train.py"],
        "environment_variables": {"HF_TOKEN": {"name": "hf_access_token"}, "MODE": "full"},
        "enable_cache": None,
        "checkpointing_config": {"enabled": False, "checkpoint_path": None, "volume_size_gib": None},
        "load_checkpoint_config": None,
        "cache_config": None,
        "artifacts": [{"s3_bucket": "uploads", "s3_key": "work.tgz"}],
    },
    "interactive_session": None,
    "name": None,
    "priority": None,
    "workspace": None,
    "weights": [QWEN, TRAINING_DATA],
    "enable_baseten_workdir": True,
    "truss_user_env": {"truss_client_version": "0.18.36", "python_version": "3.11.7"},
}


def source(**changes: Any) -> dict[str, Any]:
    """One public source, with these fields instead."""
    return {"source": "hf://o/r", "mount_location": "/m"} | changes
