"""What an agent gives to whom: chunks, manifests and layouts on its data plane, stages on its control API.

An agent asks nobody: a grant is its own proof. The oracle is a table of which grant names what, and the files of each manifest.
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx2
import jwt
import pytest

from bdn.core.chunk import Digest, digest_of
from bdn.core.layout import Manifest
from bdn.wire.grants import ISSUER, Grant, GrantedMount, GrantSigner, new_signing_key
from node_agent.api import build_app
from node_agent.app import Agent
from tests.support.agent.mirror import FORMS, AgentMirror
from tests.support.agent.rig import Rig, staged
from tests.support.content.noise import MIB, noise
from tests.support.mirror.access_world import STATUS, UNKNOWN, shape
from tests.support.promises.tally import FULL, Tally

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = pytest.mark.promise("access")

NOTHING: Final = Digest("1" * 64)  # a manifest that was never mirrored, or was evicted since
LARGE: Final = noise(9 * MIB + 1, 2)
TREES: Final[dict[str, dict[str, bytes]]] = {
    "a": {"large": LARGE, "a1": b"a one", "a2": b"a two"},
    "b": {"large": LARGE, "b1": b"b one", "b2": b"b two"},
    "cold": {"c1": b"c one", "c2": b"c two"},  # mirrored, and never staged here
}
CHUNKS: Final[dict[str, set[str]]] = {  # the manifests that hold it
    "large 0": {"a", "b"},
    "large 1": {"a", "b"},
    "a 0": {"a"},
    "b 0": {"b"},
    "cold 0": {"cold"},
    "cold page": {"cold"},
    "unknown": set(),
}
READS: Final[dict[str, set[str] | str]] = {
    "none": "UNAUTHENTICATED",
    "malformed": "GRANT_INVALID",
    "a token": "GRANT_INVALID",  # tokens are the mirror's: an agent knows none
    "grant a": {"a"},
    "grant b": {"b"},
    "grant cold": {"cold"},
    "grant a and cold": {"a", "cold"},
    "grant of nothing": set(),
    "expired": "GRANT_EXPIRED",
    "another key": "GRANT_INVALID",
    "alg none": "GRANT_INVALID",
    "another audience": "GRANT_INVALID",
    "another issuer": "GRANT_INVALID",
}


@dataclass
class Node:
    """An agent that staged a and b."""

    agent: Agent
    mirror: AgentMirror
    manifests: dict[str, Manifest]
    bearers: dict[str, str]
    chunks: dict[str, Digest] = field(default_factory=dict)

    def digest(self, manifest: str) -> Digest:
        return self.manifests[manifest].digest if manifest in self.manifests else NOTHING


@pytest.fixture(params=FORMS)
async def node(server: AgentMirror, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Node]:
    mirror = server.renewed(is_packed=request.param == "packed")
    manifests = {name: mirror.publish(files) for name, files in TREES.items()}
    async with Rig(mirror, tmp_path, {"auth": "token", "cluster_cache_bytes": 40 * MIB}).agent() as agent:
        for name in ("a", "b"):
            await staged(agent, mirror, manifests[name], job=name)
        node = Node(agent, mirror, manifests, _bearers(mirror, manifests))
        node.chunks |= {f"large {number}": chunk for number, chunk in enumerate(mirror.chunks(manifests["a"], "large"))}
        node.chunks |= {f"{name} 0": digest_of(TREES[name][f"{name[0]}1"]) for name in ("a", "b")}
        node.chunks["cold 0"] = mirror.chunks(manifests["cold"], "c1")[0]  # as it travels: with its slab, or by itself
        node.chunks["cold page"] = mirror.trees[node.digest("cold")].root.pages[0].digest
        yield Node(agent, mirror, manifests, node.bearers, node.chunks | {"unknown": UNKNOWN})


def _bearers(mirror: AgentMirror, manifests: dict[str, Manifest]) -> dict[str, str]:
    every = tuple(GrantedMount(f"/{name}", manifest.digest, name) for name, manifest in manifests.items())
    claims = {"iss": ISSUER, "aud": Grant.audience, "org": "org", "exp": int(time.time() + 3600)}
    claims |= {"mounts": [[mount.mount_location, str(mount.manifest), mount.source] for mount in every]}
    head, key = {"kid": mirror.signer.key_id}, mirror.signer._key
    return {
        "malformed": "let-me-in",
        "a token": "bdn_" + "x" * 43,
        **{f"grant {name}": mirror.grant(manifest) for name, manifest in manifests.items()},
        "grant a and cold": mirror.grant(manifests["a"], manifests["cold"]),
        "grant of nothing": mirror.signer.sign(Grant("org", (GrantedMount("/m", NOTHING, "x"),), time.time() + 3600)),
        "expired": mirror.grant(*manifests.values(), expires_in=-1),
        "another key": GrantSigner(new_signing_key()).sign(Grant("org", every, time.time() + 3600)),
        "alg none": jwt.encode(claims, "", algorithm="none", headers=head),
        "another audience": jwt.encode(claims | {"aud": "sts.amazonaws.com"}, key, algorithm="EdDSA", headers=head),
        "another issuer": jwt.encode(claims | {"iss": "https://x"}, key, algorithm="EdDSA", headers=head),
    }


def expected_chunk(bearer: str, chunk: str, named: str | None, held: set[str]) -> str:
    """``named`` is the manifest in the header: then the owner obtains what it has not got."""
    reads = READS[bearer]
    if isinstance(reads, str):
        return reads
    if named is not None:
        return "OK" if named in reads & CHUNKS[chunk] else "NOT_FOUND"
    return "OK" if reads & CHUNKS[chunk] & held else "NOT_FOUND"


async def test_an_agent_gives_chunks_to_grants_that_name_them_alone(node: Node, tally: Tally) -> None:
    held, has_read_cold = {"a", "b"}, False
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{node.agent.data_port}", trust_env=False) as plane:
        for named in (None, "a", "b", "nothing", "cold"):
            for bearer in READS:
                has_read_cold |= "cold" in READS[bearer]
                for verb in ("GET", "HEAD") if FULL else ("GET",):
                    headers = {} if bearer == "none" else {"Authorization": f"Bearer {node.bearers[bearer]}"}
                    headers |= {} if named is None else {"BDN-Manifest": str(node.digest(named))}
                    nothing = shape(await plane.request(verb, f"/chunks/{UNKNOWN}", headers=headers), UNKNOWN)
                    for chunk, digest in node.chunks.items():
                        expected = expected_chunk(bearer, chunk, named, held)
                        answer = await plane.request(verb, f"/chunks/{digest}", headers=headers)
                        assert answer.status_code == STATUS[expected], (bearer, chunk, named, answer.content[:300])
                        if expected == "OK":
                            assert verb == "HEAD" or digest_of(answer.content) == digest
                            held |= {named} if named else set()
                        else:
                            assert shape(answer, digest) == nothing, (bearer, chunk, named)
                            assert has_read_cold or not node.mirror.documents[f"/chunks/{node.chunks['cold page']}"]
                        tally.add(scenarios=1, refused=expected != "OK")


async def test_an_agent_gives_roots_and_pages_to_grants_that_name_them_alone(node: Node, tally: Tally) -> None:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{node.agent.data_port}", trust_env=False) as plane:
        for bearer, reads in READS.items():
            headers = {} if bearer == "none" else {"Authorization": f"Bearer {node.bearers[bearer]}"}
            nothing = shape(await plane.get(f"/chunks/{UNKNOWN}", headers=headers), UNKNOWN)
            for name, manifest in node.manifests.items():
                for document in node.mirror.pages_of[manifest.digest]:
                    answer = await plane.get(f"/chunks/{document}", headers=headers)
                    may = reads if isinstance(reads, str) else "OK" if name in reads - {"cold"} else "NOT_FOUND"
                    assert answer.status_code == STATUS[may], (bearer, name, answer.content[:300])
                    assert may == "OK" or shape(answer, document) == nothing, (bearer, name)
                    tally.add(scenarios=1, refused=may != "OK")


async def test_a_stage_takes_a_whole_signed_and_living_grant(node: Node, tally: Tally) -> None:
    transport = httpx2.ASGITransport(app=build_app(node.agent), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://agent") as control:
        before = (await control.get("/stages")).json()
        for name, token in node.bearers.items():
            if not isinstance(READS[name], str):
                continue
            answer = await control.post("/stages", json={"job_id": "thief", "grant": token})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, READS[name]), name
            tally.add(scenarios=1, refused=1)
        assert (await control.get("/stages")).json() == before
