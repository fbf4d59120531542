"""A Kubernetes API server as an issuer: it signs service-account tokens and publishes the keys."""

import json
import ssl
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tests.doubles.faults import Fault
from tests.doubles.http_origin import Answer, Origin, Request
from tests.doubles.request_log import RequestLog

KEYS_PATH: Final = "/openid/v1/jwks"
POD_UID: Final = "8f5e7c9e-0d6f-4b0e-8a55-0f4b2a6c8d10"  # of a pod for which a test gives no uid
Json = dict[str, Any]
PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey


class Issuer(AbstractContextManager["Issuer"]):
    """``publishes`` are the ids of the keys in the document; ``sign`` uses the newest key unless told otherwise.

    It signs also before it is opened.
    """

    def __init__(
        self,
        issuer: str = "https://kubernetes.default.svc",
        *,
        audience: str = "bdn",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.issuer = issuer
        self.audience = audience
        self.keys: dict[str, PrivateKey] = {}
        self.publishes: list[str] = []
        self.needs: str | None = None  # the token that a reader of the keys has to send
        self.document: bytes | None = None  # instead of the right one
        self.log = RequestLog()
        self.rotate()
        self._tls = tls

    def __enter__(self) -> Self:
        self._origin = Origin("issuer", self._respond, log=self.log, tls=self._tls).__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._origin.__exit__(kind, error, trace)

    @property
    def keys_url(self) -> str:
        return f"{self._origin.url}{KEYS_PATH}"

    @property
    def reads(self) -> int:
        return len(self.log.find(KEYS_PATH))

    def fail(self, fault: Fault, *, times: int | None = None) -> None:
        self._origin.fail(fault, times=times)

    def mend(self) -> None:
        self._origin.script.clear()

    def rotate(self, *, elliptic: bool = False) -> str:
        """A new key beside the old ones, which signs from now on."""
        key_id = f"key-{len(self.keys)}"
        self.keys[key_id] = (
            ec.generate_private_key(ec.SECP256R1())
            if elliptic
            else rsa.generate_private_key(public_exponent=65537, key_size=2048)
        )
        self.publishes.append(key_id)
        return key_id

    def claims(self, namespace: str = "research", account: str = "default", pod: str = POD_UID, **changes: Any) -> Json:
        """What the kubelet's token says. A change to None removes a claim."""
        now = int(time.time())
        claims: Json = {
            "iss": self.issuer,
            "aud": [self.audience],
            "sub": f"system:serviceaccount:{namespace}:{account}",
            "iat": now,
            "nbf": now,
            "exp": now + 3600,
            "kubernetes.io": {
                "namespace": namespace,
                "pod": {"name": "trainer-0", "uid": pod},
                "serviceaccount": {"name": account, "uid": "0a8d52f1-3a1c-4a5a-9e4d-7d6f5b1c2e3f"},
            },
        } | changes
        return {name: value for name, value in claims.items() if value is not None}

    def sign(self, claims: Json, key_id: str | None = None, **header: Any) -> str:
        key_id = key_id or list(self.keys)[-1]
        key = self.keys[key_id]
        algorithm = "RS256" if isinstance(key, rsa.RSAPrivateKey) else "ES256"
        return jwt.encode(claims, key, algorithm=algorithm, headers={"kid": key_id, **header})

    def token(self, namespace: str = "research", account: str = "default", **changes: Any) -> str:
        return self.sign(self.claims(namespace, account, **changes))

    def public_pem(self, key_id: str) -> bytes:
        kind = serialization.PublicFormat.SubjectPublicKeyInfo
        return self.keys[key_id].public_key().public_bytes(serialization.Encoding.PEM, kind)

    def key_set(self) -> bytes:
        return json.dumps({"keys": [_public(key_id, self.keys[key_id]) for key_id in self.publishes]}).encode()

    def cluster(self, **more: str) -> str:
        """Lines of a table of ``BDN_KUBERNETES`` that trusts this issuer."""
        given = {"issuer": self.issuer, "audience": self.audience, "keys": self.keys_url, **more}
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items())

    def _respond(self, request: Request) -> Answer:
        if request.url.path != KEYS_PATH:
            return Answer(404, {}, b"{}")
        if (
            self.needs is not None
            and {name.lower(): value for name, value in request.headers.items()}.get("authorization")
            != f"Bearer {self.needs}"
        ):
            return Answer(401, {}, b"{}")
        return Answer(
            200,
            {"Content-Type": "application/jwk-set+json"},
            self.key_set() if self.document is None else self.document,
        )


def _public(key_id: str, key: PrivateKey) -> Json:
    if isinstance(key, rsa.RSAPrivateKey):
        found, algorithm = jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True), "RS256"
    else:
        found, algorithm = jwt.algorithms.ECAlgorithm.to_jwk(key.public_key(), as_dict=True), "ES256"
    return {**found, "kid": key_id, "use": "sig", "alg": algorithm}


def write_clusters(file: Path, **clusters: str) -> Path:
    """The file ``BDN_KUBERNETES`` of these tables; a ``[namespaces.X]`` or ``[jobs]`` in one is below its cluster."""
    text = ""
    for name, lines in clusters.items():
        below = lines.replace("[namespaces.", f"[clusters.{name}.namespaces.").replace(
            "[jobs", f"[clusters.{name}.jobs"
        )
        text += f"[clusters.{name}]\n{below}\n"
    file.write_text(text)
    return file
