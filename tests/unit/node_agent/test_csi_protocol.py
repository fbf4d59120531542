"""The generated messages are those of the ``.proto`` files, and the kubelet reads and writes their fields by these numbers."""

import subprocess
import sys
from pathlib import Path

import pytest

from node_agent.csi.protocol import csi_pb2, registration_pb2

ROOT = Path(__file__).parents[3]
FOLDER = Path("node_agent/csi/protocol")


def test_generated_code__is_what_the_compiler_makes_of_the_proto_files(tmp_path: Path) -> None:
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / FOLDER).glob("*.proto"))
    options = (f"--proto_path={ROOT}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}")
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, *protos], check=True, cwd=ROOT)

    made = {path.name: path.read_text() for path in (tmp_path / FOLDER).iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / FOLDER).glob("*_pb2.py*")}
    assert kept == made, f"run: python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. {FOLDER}/*.proto"


@pytest.mark.parametrize(
    ("message", "numbers"),
    [  # container-storage-interface/spec, csi.proto of v1.11; k8s.io/kubelet, pluginregistration/v1/api.proto
        (csi_pb2.GetPluginInfoResponse, {"name": 1, "vendor_version": 2}),
        (csi_pb2.NodeGetInfoResponse, {"node_id": 1}),
        (csi_pb2.NodeUnpublishVolumeRequest, {"volume_id": 1, "target_path": 2}),
        (
            csi_pb2.NodePublishVolumeRequest,
            {
                "volume_id": 1,
                "target_path": 4,
                "volume_capability": 5,
                "readonly": 6,
                "secrets": 7,
                "volume_context": 8,
            },
        ),
        (csi_pb2.VolumeCapability, {"block": 1, "mount": 2, "access_mode": 3}),
        (csi_pb2.VolumeCapability.MountVolume, {"mount_flags": 2}),
        (csi_pb2.VolumeCapability.AccessMode, {"mode": 1}),
        (registration_pb2.PluginInfo, {"type": 1, "name": 2, "endpoint": 3, "supported_versions": 4}),
        (registration_pb2.RegistrationStatus, {"plugin_registered": 1, "error": 2}),
    ],
)
def test_message__has_the_fields_numbers_of_the_specification(message: type, numbers: dict[str, int]) -> None:
    assert {field.name: field.number for field in message.DESCRIPTOR.fields} == numbers  # type: ignore[attr-defined]
