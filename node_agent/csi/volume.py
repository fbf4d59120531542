"""What a pod asks for: the attributes of one volume, the same for inline volumes and persistent ones."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from pydantic import ValidationError

from bdn.core.errors import InvalidRequestError, NotSupportedError
from bdn.wire.mirror_schema import MirrorRequestBody, WeightsSourceBody
from bdn.wire.stage_schema import StageView
from node_agent.csi.protocol.csi_pb2 import NodePublishVolumeRequest, VolumeCapability
from node_agent.csi.target import Target

DRIVER: Final = "csi.bdn.dev"
MOUNT_LOCATION: Final = "/volume"  # of the source in its mirror; the volume itself is the source's tree
ATTRIBUTES: Final = ("source", "mirror", "mountLocation", "allowPatterns", "ignorePatterns", "secretName", "hubCache")
_OF_KUBELET: Final = "csi.storage.k8s.io/"
_OF_PROVISIONER: Final = "storage.kubernetes.io/"
_TOKENS: Final = f"{_OF_KUBELET}serviceAccount.tokens"
_MIRROR_ID: Final = re.compile(r"mir_[0-9a-f]{1,64}")
_POD_NAME: Final = re.compile(r"[a-z0-9][-a-z0-9.]{0,252}")  # RFC 1123, as Kubernetes' names of namespaces and pods
_READERS: Final = (
    VolumeCapability.AccessMode.SINGLE_NODE_READER_ONLY,
    VolumeCapability.AccessMode.MULTI_NODE_READER_ONLY,
)


@dataclass(frozen=True, slots=True)
class PodVolume:
    """One volume of one pod. Either ``request`` says what is mirrored, or ``mirror_id`` names a mirror, and ``mount`` its source.

    ``token`` is the pod's own service-account token, good for minutes; it is sent to the mirror and kept nowhere.
    """

    target: Target
    job_id: str
    request: MirrorRequestBody | None
    mirror_id: str
    mount: str | None
    view: StageView
    is_read_only: bool  # else by its access mode alone, and the kubelet has containers mount it rw
    token: str | None = field(repr=False)

    @property
    def named(self) -> str:
        weights = self.request.weights if self.request else None
        return weights[0].source if weights else self.mirror_id

    @classmethod
    def parse(cls, call: NodePublishVolumeRequest, target: Target, *, needs_token: bool) -> Self:
        """Raises ``InvalidRequestError``, ``NotSupportedError``: the message names what to change."""
        _check_access(call)
        context = dict(call.volume_context)
        own = {name: text for name, text in context.items() if not name.startswith((_OF_KUBELET, _OF_PROVISIONER))}
        if unknown := sorted(own.keys() - set(ATTRIBUTES)):
            shown = ", ".join(f"{name[:60]!a}" for name in unknown[:5])
            raise InvalidRequestError(f"unknown volume attribute {shown}; there are {', '.join(ATTRIBUTES)}")
        namespace, pod = (context.get(f"{_OF_KUBELET}pod.{part}", "") for part in ("namespace", "name"))
        if not _POD_NAME.fullmatch(namespace) or not _POD_NAME.fullmatch(pod):
            remedy = f"set podInfoOnMount: true in the CSIDriver {DRIVER}"
            raise NotSupportedError("a volume without its pod's name and namespace", remedy)
        token = _token({**context, **call.secrets}.get(_TOKENS, ""))
        if token is None and needs_token:
            raise NotSupportedError(
                "a volume without a token of its pod's service account",
                f"set tokenRequests with the mirror's audience in the CSIDriver {DRIVER}; Kubernetes has them since 1.22, and in 1.20 and "
                "1.21 behind the feature gate CSIServiceAccountToken",
            )
        if (hub_cache := own.get("hubCache", "false")) not in ("true", "false"):
            raise InvalidRequestError(f'hubCache {hub_cache[:60]!a} must be "true" or "false"')
        view: StageView = "hub" if hub_cache == "true" else "files"
        named = own.get("mirror", ""), own.get("mountLocation")
        return cls(target, target.job_id(namespace, pod), _request(own), *named, view, call.readonly, token)


def _check_access(call: NodePublishVolumeRequest) -> None:
    capability = call.volume_capability
    if secrets := sorted(call.secrets.keys() - {_TOKENS}):
        raise InvalidRequestError(
            f"nodePublishSecretRef is not used (it has {', '.join(secrets)[:100]!a}): store the credentials with 'bdn-admin secrets set "
            "NAME', and name them by the volume attribute secretName"
        )
    if capability.WhichOneof("access_type") == "block":
        raise InvalidRequestError("volumeMode: Block is not offered; use volumeMode: Filesystem")
    if flags := [flag for flag in capability.mount.mount_flags if flag != "ro"]:
        raise InvalidRequestError(f"mountOptions {', '.join(flags)[:100]!a} are not used; remove them")
    if not call.readonly and capability.access_mode.mode not in _READERS:
        raise InvalidRequestError(
            "volumes are read-only: set readOnly: true in the pod's csi or persistentVolumeClaim volume, or give the PersistentVolume the "
            "access mode ReadOnlyMany"
        )


def _request(own: Mapping[str, str]) -> MirrorRequestBody | None:
    """The request of a ``source``; None for a ``mirror``, which has its selection already."""
    if ("source" in own) == ("mirror" in own):
        raise InvalidRequestError("give exactly one of the volume attributes source and mirror")
    if "mirror" in own:
        if surplus := sorted(own.keys() & {"allowPatterns", "ignorePatterns", "secretName"}):
            raise InvalidRequestError(f"a mirror has its files already: remove {', '.join(surplus)}, or give source")
        if not _MIRROR_ID.fullmatch(own["mirror"]):
            raise InvalidRequestError(
                f"mirror {own['mirror'][:100]!a} is not the id of a mirror, such as mir_0123456789ab"
            )
        return None
    if "mountLocation" in own:
        raise InvalidRequestError("mountLocation is for a mirror: give mirror instead of source, or remove it")
    try:
        weights = WeightsSourceBody(
            source=own["source"],
            mount_location=MOUNT_LOCATION,
            auth_secret_name=own.get("secretName"),
            allow_patterns=_patterns(own, "allowPatterns"),
            ignore_patterns=_patterns(own, "ignorePatterns"),
        )
    except ValidationError as error:
        problem = error.errors()[0]
        raise InvalidRequestError(f"volume attribute {problem['loc'][0]}: {problem['msg']}") from None
    weights.to_core()  # what makes no sense is refused before the mirror is asked
    return MirrorRequestBody(weights=[weights])


def _patterns(own: Mapping[str, str], name: str) -> list[str] | None:
    """A JSON list, or one pattern: ``[ab]*`` is one."""
    text = own.get(name)
    if text is None:
        return None
    try:
        patterns = json.loads(text) if re.match(r'\s*\[\s*["\]]', text) else [text]
    except (ValueError, RecursionError):
        patterns = None
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise InvalidRequestError(
            f'{name} {text[:100]!a} must be one pattern, or a JSON list of patterns such as ["*.safetensors", "*.json"]'
        )
    return list(patterns)


def _token(text: str) -> str | None:
    """The token of the only audience that the CSIDriver requests: which one is right, the mirror decides."""
    if not text:
        return None
    try:
        (token,) = (one["token"] for one in json.loads(text).values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        token = None
    if not isinstance(token, str) or not token.isascii() or not token.isprintable() or " " in token:
        raise NotSupportedError(
            "a volume with another number of service-account tokens than one",
            f"list one audience, the mirror's, in tokenRequests of the CSIDriver {DRIVER}",
        )
    return token
