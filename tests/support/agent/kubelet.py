"""What a kubelet does to a CSI driver: it finds the registration, and calls over a unix socket with deadlines."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import grpc
import grpc.aio
from google.protobuf.message import Message

from node_agent.csi.protocol import csi_pb2, registration_pb2

DRIVER = "csi.bdn.dev"
CONTEXT = "csi.storage.k8s.io/"
LONGEST_SECONDS = 120.0  # the deadline of a kubelet's call


@dataclass(frozen=True)
class Answer:
    """How a call ended. ``status`` is None after a success."""

    status: grpc.StatusCode | None = None
    text: str = ""


OK = Answer()


@dataclass(frozen=True)
class Pod:
    """A pod with one volume, as the kubelet knows it."""

    kubelet: "Kubelet"
    name: str = "pod-0"
    namespace: str = "default"
    volume: str = "weights"
    uid: str = field(default_factory=lambda: str(uuid4()))

    @property
    def folder(self) -> Path:
        return self.kubelet.root / "pods" / self.uid

    @property
    def target(self) -> Path:
        return self.folder / "volumes" / "kubernetes.io~csi" / self.volume / "mount"

    def made(self) -> Self:
        """The kubelet makes the folder of the target, and leaves the target to the driver."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        return self

    def request(
        self, attributes: Mapping[str, str], token: str | None = None, **given: Any
    ) -> csi_pb2.NodePublishVolumeRequest:
        tokens = {} if token is None else {f"{CONTEXT}serviceAccount.tokens": json.dumps({"bdn": {"token": token}})}
        of_pod = {
            f"{CONTEXT}pod.name": self.name,
            f"{CONTEXT}pod.namespace": self.namespace,
            f"{CONTEXT}pod.uid": self.uid,
        }
        mode = csi_pb2.VolumeCapability.AccessMode(mode=csi_pb2.VolumeCapability.AccessMode.SINGLE_NODE_WRITER)
        capability = csi_pb2.VolumeCapability(mount=csi_pb2.VolumeCapability.MountVolume(), access_mode=mode)
        fields: dict[str, Any] = {
            "volume_id": f"csi-{self.uid}",
            "target_path": str(self.target),
            "volume_capability": capability,
            "readonly": True,
            "volume_context": {**attributes, **of_pod, f"{CONTEXT}ephemeral": "true", **tokens},
        }
        return csi_pb2.NodePublishVolumeRequest(**fields | given)

    async def publish(
        self, attributes: Mapping[str, str], seconds: float = LONGEST_SECONDS, token: str | None = None, **given: Any
    ) -> Answer:
        self.made()
        return await self.kubelet.call("NodePublishVolume", self.request(attributes, token, **given), seconds)

    async def unpublish(self, seconds: float = LONGEST_SECONDS) -> Answer:
        request = csi_pb2.NodeUnpublishVolumeRequest(volume_id=f"csi-{self.uid}", target_path=str(self.target))
        return await self.kubelet.call("NodeUnpublishVolume", request, seconds)


@dataclass(frozen=True)
class Kubelet:
    """``root`` is its ``--root-dir``. Its path is short: a socket's path has 107 bytes at most."""

    root: Path

    @property
    def registration(self) -> Path:
        return self.root / "plugins_registry" / f"{DRIVER}-reg.sock"

    async def register(self) -> registration_pb2.PluginInfo:
        """As the kubelet's plugin watcher does it, once the socket appears."""
        info: registration_pb2.PluginInfo
        info = await _call(
            self.registration,
            "/pluginregistration.Registration/GetInfo",
            registration_pb2.InfoRequest(),
            registration_pb2.PluginInfo,
        )
        await _call(
            self.registration,
            "/pluginregistration.Registration/NotifyRegistrationStatus",
            registration_pb2.RegistrationStatus(plugin_registered=True),
            registration_pb2.RegistrationStatusResponse,
        )
        return info

    async def ask(self, method: str, request: Message, answer: type[Message]) -> Any:
        """A call that has an answer, such as ``Identity/Probe``."""
        return await _call(self._socket, f"/csi.v1.{method}", request, answer)

    async def call(self, method: str, request: Message, seconds: float) -> Answer:
        answer = csi_pb2.NodePublishVolumeResponse  # without fields, as the other
        try:
            await _call(self._socket, f"/csi.v1.Node/{method}", request, answer, seconds)
        except grpc.aio.AioRpcError as error:
            return Answer(error.code(), error.details() or "")
        return OK

    @property
    def _socket(self) -> Path:
        return self.root / "plugins" / DRIVER / "csi.sock"


async def _call(
    socket: Path, method: str, request: Message, answer: type[Message], seconds: float = LONGEST_SECONDS
) -> Any:
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        call = channel.unary_unary(
            method, request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString
        )
        # A driver that was killed leaves its sockets, at which the next one is not there yet.
        return await call(request, timeout=seconds, wait_for_ready=True)
