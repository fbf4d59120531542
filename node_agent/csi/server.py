"""The two sockets of the driver: CSI for the kubelet's calls, and the registration by which it finds that one."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import Message

from bdn import __version__
from bdn.core.errors import InternalError, InvalidRequestError
from bdn.disk.durable import disk_errors, make_folder
from node_agent.csi.node import NodeVolumes
from node_agent.csi.protocol import csi_pb2, registration_pb2
from node_agent.csi.refusal import Refusal
from node_agent.csi.volume import DRIVER

logger = logging.getLogger(__name__)
_STOP_SECONDS: Final = 10.0  # for calls that have been stopped: they answer with their figures
_Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # grpc's class takes no parameters when it runs
_Services = dict[str, dict[str, _Handler]]  # handlers by service and method


@asynccontextmanager
async def serving(volumes: NodeVolumes, work: asyncio.TaskGroup) -> AsyncIterator[None]:
    """Serve on both sockets, the one for the kubelet's calls first. At the end calls at work are answered."""
    kubelet = volumes.settings.kubelet_dir
    path, found_at = kubelet / "plugins" / DRIVER / "csi.sock", kubelet / "plugins_registry" / f"{DRIVER}-reg.sock"
    async with _listening(path, _plugin(volumes, work)) as csi, _listening(found_at, _registration(path)):
        logger.info("driver started", extra={"version": __version__, "node": volumes.settings.node})
        try:
            yield
        finally:
            volumes.calls.stop()
            await csi.stop(_STOP_SECONDS)


def _plugin(volumes: NodeVolumes, work: asyncio.TaskGroup) -> _Services:
    async def publish(request: csi_pb2.NodePublishVolumeRequest, context: _Context) -> Message:
        await _answered(work, volumes.publish(request, context.time_remaining()), context)
        return csi_pb2.NodePublishVolumeResponse()

    async def unpublish(request: csi_pb2.NodeUnpublishVolumeRequest, context: _Context) -> Message:
        await _answered(work, volumes.unpublish(request), context)
        return csi_pb2.NodeUnpublishVolumeResponse()

    identity = {
        "GetPluginInfo": _always(csi_pb2.GetPluginInfoResponse(name=DRIVER, vendor_version=__version__)),
        "GetPluginCapabilities": _always(csi_pb2.GetPluginCapabilitiesResponse()),
        "Probe": _always(csi_pb2.ProbeResponse()),
    }
    node = {
        "NodeGetInfo": _always(csi_pb2.NodeGetInfoResponse(node_id=volumes.settings.node)),
        "NodeGetCapabilities": _always(csi_pb2.NodeGetCapabilitiesResponse()),
        "NodePublishVolume": _handler(csi_pb2.NodePublishVolumeRequest, publish),
        "NodeUnpublishVolume": _handler(csi_pb2.NodeUnpublishVolumeRequest, unpublish),
    }
    return {"csi.v1.Identity": identity, "csi.v1.Node": node}


def _registration(csi: Path) -> _Services:
    async def note(status: registration_pb2.RegistrationStatus, _: _Context) -> Message:
        if status.plugin_registered:
            logger.info("the kubelet has registered the driver")
        else:
            logger.error("the kubelet refused the driver, and retries: %s", status.error)
        return registration_pb2.RegistrationStatusResponse()

    plugin = registration_pb2.PluginInfo(type="CSIPlugin", name=DRIVER, endpoint=str(csi), supported_versions=["1.0.0"])
    calls = {
        "GetInfo": _always(plugin),
        "NotifyRegistrationStatus": _handler(registration_pb2.RegistrationStatus, note),
    }
    return {"pluginregistration.Registration": calls}


def _always(answer: Message) -> _Handler:
    """A call whose request says nothing."""

    async def same(_: Message, __: _Context) -> Message:
        return answer

    return _handler(csi_pb2.ProbeRequest, same)


def _handler(request: type[Message], answering: Callable[[Any, _Context], Awaitable[Message]]) -> _Handler:
    return grpc.unary_unary_rpc_method_handler(
        answering,
        request_deserializer=request.FromString,
        response_serializer=lambda answer: answer.SerializeToString(),
    )


async def _answered(work: asyncio.TaskGroup, calling: Coroutine[Any, Any, Refusal | None], context: _Context) -> None:
    """Run a call to its end, also if its connection ends, and then answer."""
    refusal = await asyncio.shield(work.create_task(_without_bugs(calling)))
    if refusal is not None:
        await context.abort(refusal.status, refusal.text)


async def _without_bugs(calling: Coroutine[Any, Any, Refusal | None]) -> Refusal | None:
    try:
        return await calling
    except Exception as error:
        logger.exception("a call failed because of a bug")
        reason = Refusal.of(InternalError(f"{type(error).__name__}: {error}"))
        return Refusal(grpc.StatusCode.UNAVAILABLE, reason.text)  # not final: something may be left behind


@asynccontextmanager
async def _listening(path: Path, services: _Services) -> AsyncIterator[grpc.aio.Server]:
    """A server at a socket for root alone. It replaces the socket of a driver that was killed."""
    _make_way(path)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(name, methods) for name, methods in services.items()]
    )
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise InvalidRequestError(f"BDN_CSI_KUBELET_DIR: cannot listen at {path}: {error}") from error
    await server.start()
    try:
        yield server
    finally:
        await server.stop(None)  # removes the socket


def _make_way(path: Path) -> None:
    with disk_errors(path):
        make_folder(path.parent, 0o750)
        path.unlink(missing_ok=True)
