"""Two organisations on one mirror, and everything that somebody could show to it: what the access matrix is made of."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2
import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

from bdn.core.chunk import Digest, digest_of
from bdn.wire.grants import ISSUER, Grant, GrantedMount, GrantSigner, new_signing_key
from tests.doubles.hub import Hub
from tests.doubles.kubernetes import Issuer, write_clusters
from tests.support.mirror.service import LONGEST_SECONDS, Json, MirrorUnderTest, mirror_under_test, source, with_secret

OPERATOR: Final = "the-operator-of-the-settings"
BIG: Final = bytes(range(256)) * (8 * 1024 * 4) + b"tail!"  # two chunks
FILES: Final[dict[str, dict[str, bytes]]] = {
    "shared": {"big.bin": BIG, "s1": b"shared one", "s2": b"shared two"},
    "a-public": {"big.bin": BIG, "p1": b"public one", "p2": b"public two"},
    "a-private": {"x": b"the same in both", "y": b"private to a"},
    "b-private": {"x": b"the same in both", "y": b"private to b"},
    "gone": {"big.bin": BIG, "g1": b"gone one", "g2": b"gone two"},
}
MIRRORED: Final = [
    ("a", "shared"),
    ("b", "shared"),
    ("a", "a-public"),
    ("a", "a-private"),
    ("b", "b-private"),
    ("a", "gone"),
]
UNKNOWN: Final = Digest("0" * 64)
STATUS: Final = {"NOT_FOUND": 404, "UNAUTHENTICATED": 401, "GRANT_INVALID": 403, "GRANT_EXPIRED": 403, "OK": 200}
CLUSTER: Final = "c"  # of Kubernetes; its namespaces one and two are of organisation a, and three is of b
_NAMESPACES: Final = "".join(
    f'[namespaces.{namespace}]\norganisation = "{organisation}"\n'
    for namespace, organisation in (("one", "a"), ("two", "a"), ("three", "b"))
)
_EPOCH: Final = 4_000_000_000.0  # when grants expire, unless they have


@dataclass
class World:
    """``bearers`` by what they are; ``names`` of manifests and chunks; ``mirrors`` by organisation and name."""

    mirror: MirrorUnderTest
    bearers: dict[str, dict[str, str]] = field(default_factory=dict)
    manifests: dict[str, Digest] = field(default_factory=lambda: {"unknown": UNKNOWN})
    chunks: dict[str, Digest] = field(
        default_factory=lambda: {"unknown": UNKNOWN, "a small file": digest_of(FILES["a-private"]["y"])}
    )
    mirrors: dict[tuple[str, str], Json] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    plane: httpx2.AsyncClient = field(init=False)  # of the data plane
    data_port: int = 0

    async def ask(self, bearer: str, method: str, path: str, **more: Any) -> httpx2.Response:
        """One request of somebody: ``bearer`` is a name."""
        headers = {"Authorization": "", **self.bearers[bearer], **more.pop("headers", {})}
        return await self.mirror.http.request(method, path, headers={k: v for k, v in headers.items() if v}, **more)

    async def done(self, organisation: str, body: Json) -> Json:
        """A mirror of an organisation in its terminal state."""
        bearer = f"controller {organisation}"
        begun = (await self.ask(bearer, "POST", "/mirror", json=body)).json()
        ended = await self.ask(bearer, "GET", f"/mirror/{begun['id']}", params={"wait": LONGEST_SECONDS})
        assert ended.json()["status"] == "READY", ended.text
        return dict(ended.json())


@asynccontextmanager
async def access_world(folder: Path, hub: Hub, **settings: Any) -> AsyncIterator[World]:
    """Everything mirrored; ``gone`` evicted again; every bearer made."""
    for name, files in FILES.items():
        hub.repo(f"org/{name}", private="private" in name).commit(files)
    settings.setdefault("secrets_organisations", "a,b")
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    with Issuer() as issuer:
        clusters = write_clusters(
            folder / "kubernetes.toml", **{CLUSTER: issuer.cluster(agents="bdn/agent") + _NAMESPACES}
        )
        settings |= {"auth": "token", "token": OPERATOR, "kubernetes": clusters}
        async with _world(folder, issuer, settings) as world:
            yield world


@asynccontextmanager
async def _world(folder: Path, issuer: Issuer, settings: dict[str, Any]) -> AsyncIterator[World]:
    async with mirror_under_test(folder, serve=True, **settings) as mirror:
        world = World(mirror)
        world.bearers |= {name: _bearing(token) for name, token in _pods(issuer).items()}
        world.bearers |= {"none": {}, "operator": _bearing(OPERATOR), "malformed": _bearing("let-me-in")}
        world.bearers["unknown token"] = _bearing("bdn_" + "x" * 43)
        world.bearers["operator for a"] = _bearing(OPERATOR) | {"BDN-Organisation": "a"}
        await _make_tokens(world)
        for organisation, name in MIRRORED:
            auth = with_secret("hub-token") if "private" in name else {}
            document = await world.done(organisation, {"weights": [source(f"hf://org/{name}", **auth)]})
            world.mirrors[organisation, name] = document
            world.manifests[name] = Digest.parse(document["sources"][0]["manifest"])
            world.bearers[f"grant {organisation} {name}"] = _bearing(document["grant"])
            await _name_chunks(world, organisation, name)
        gone = {"manifest": str(world.manifests["gone"]), "tier": "mirror"}
        answer = await world.ask("controller a", "POST", "/evictions", json=gone, params={"wait": LONGEST_SECONDS})
        assert answer.json()["status"] == "DONE", answer.text
        _forge(world)
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{world.data_port}", trust_env=False) as world.plane:
            yield world


def _pods(issuer: Issuer) -> dict[str, str]:
    stranger = Issuer(issuer.issuer)  # never opened: it only signs
    return {
        "pod of a": issuer.token("one"),
        "pod of another namespace of a": issuer.token("two"),
        "pod of b": issuer.token("three"),
        "pod of no organisation": issuer.token("four"),
        "pod expired": issuer.token("one", exp=1),
        "pod for another audience": issuer.token("one", aud="https://kubernetes.default.svc"),
        "pod of another key under this name": stranger.token("one"),
        "pod of another issuer": issuer.token("one", iss="https://elsewhere.example"),
        "agent of Kubernetes": issuer.token("bdn", "agent"),
    }


async def _make_tokens(world: World) -> None:
    for organisation in ("a", "b"):
        headers = {"BDN-Organisation": organisation}
        await world.ask("operator", "POST", "/teams", json={"name": "research"}, headers=headers)
    for name, role, organisation, team in (
        ("controller a", "controller", "a", None),
        ("controller b", "controller", "b", None),
        ("team Default of a", "controller", "a", "Default"),
        ("team research of a", "controller", "a", "research"),
        ("team research of b", "controller", "b", "research"),
        ("agent", "agent", "a", None),
        ("operator token", "operator", "default", None),
        ("revoked token", "controller", "a", None),
        ("expired token", "controller", "a", None),
    ):
        body: Json = {"name": name, "organisation": organisation, "role": role, "team": team}
        made = (await world.ask("operator", "POST", "/tokens", json=body)).json()
        world.bearers[name], world.tokens[name] = _bearing(made["token"]), made["id"]
    await world.ask("operator", "DELETE", f"/tokens/{world.tokens['revoked token']}")
    async with world.mirror.service.requests.database.write() as session:
        connection = await session.connection()
        await connection.exec_driver_sql("UPDATE tokens SET expires_at = 1 WHERE name = 'expired token'")
    world.bearers["controller b for a"] = world.bearers["controller b"] | {"BDN-Organisation": "a"}


async def _name_chunks(world: World, organisation: str, name: str) -> None:
    """``big 0``, and for each manifest its root, page and slab, as ``a-private slab``."""
    bearer = world.bearers[f"grant {organisation} {name}"]["Authorization"].removeprefix("Bearer ")
    manifest = str(world.manifests[name])
    root = await world.ask(f"grant {organisation} {name}", "GET", f"/manifests/{manifest}")
    world.data_port = int(root.headers["bdn-data-port"])
    (page,) = await world.mirror.pages(manifest, bearer)
    world.chunks |= {f"{name} root": world.manifests[name], f"{name} page": page.digest}
    for file in (await world.mirror.files(manifest, bearer)).values():
        if file.layout.slice is not None:
            world.chunks[f"{name} slab"] = file.layout.slice.slab
        else:
            world.chunks |= {f"big {number}": chunk for number, chunk in enumerate(file.layout.chunks)}


def _forge(world: World) -> None:
    """Bearers that nobody should have, or that should be worth nothing; all of them would open a-private."""
    signer = GrantSigner(world.mirror.behind.grant_keys.read_bytes())
    stranger = GrantSigner(new_signing_key())
    mounts = (GrantedMount("/m", world.manifests["a-private"], "hf://org/a-private"),)
    every = tuple(GrantedMount(f"/m/{name}", digest, name) for name, digest in world.manifests.items())
    good = Grant("a", mounts, _EPOCH)
    claims = {"iss": ISSUER, "aud": Grant.audience, "org": "a", "exp": int(_EPOCH)}
    claims |= {"mounts": [["/m", str(world.manifests["a-private"]), "hf://org/a-private"]]}
    head = {"kid": signer.key_id}
    public = base64.urlsafe_b64decode(signer.public_keys[0]["x"] + "==")
    pem = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    forged = {
        "grant expired": signer.sign(Grant("a", mounts, time.time() - 1)),
        "grant of another key": stranger.sign(good),
        "grant of another key under this name": jwt.encode(claims, stranger._key, algorithm="EdDSA", headers=head),
        "grant alg none": jwt.encode(claims, "", algorithm="none", headers=head),
        "grant signed with the public key": jwt.encode(claims, public, algorithm="HS256", headers=head),
        "grant signed as RS256": jwt.encode(claims, pem, algorithm="RS256", headers=head),
        "grant without an expiry": _signed(signer, {k: v for k, v in claims.items() if k != "exp"}),
        "grant for another audience": _signed(signer, {**claims, "aud": "sts.amazonaws.com"}),
        "grant of another issuer": _signed(signer, {**claims, "iss": "https://bdn.example.com"}),
        # An identity token as a cloud gets it, but for the key: its audience and issuer are never a grant's.
        "identity token": _signed(
            signer, {"iss": "https://bdn.example.com", "aud": "x", "sub": "v=1:org=a", "exp": 4e9}
        ),
        "grant of b for all": signer.sign(Grant("b", every, _EPOCH)),  # nobody would sign it
        "grant of nobody for all": signer.sign(Grant("nobody", every, _EPOCH)),
        "grant of a for all": signer.sign(Grant("a", every, _EPOCH)),
    }
    world.bearers |= {name: _bearing(token) for name, token in forged.items()}


def shape(answer: httpx2.Response, asked: Digest) -> tuple[object, ...]:
    """The whole answer, but for the name that was asked for."""
    headers = {name: value for name, value in answer.headers.items() if name != "date"}
    return answer.status_code, headers, answer.content.replace(asked.hex.encode(), b"X" * 64)


def _signed(signer: GrantSigner, claims: Json) -> str:
    return jwt.encode(json.loads(json.dumps(claims)), signer._key, algorithm="EdDSA", headers={"kid": signer.key_id})


def _bearing(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}
