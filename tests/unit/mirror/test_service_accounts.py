"""Service-account tokens of Kubernetes: what a token must be, who its bearer is, and when its issuer is asked for keys."""

import asyncio
import base64
import json
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import jwt
import pytest

from bdn.core.errors import BdnError, StoreUnavailableError, UnauthenticatedError
from bdn.mirror.access.callers import Caller
from bdn.mirror.access.clusters import load_clusters
from bdn.mirror.access.issuer_keys import IssuerKeys
from bdn.mirror.access.service_accounts import ServiceAccounts
from bdn.wire.access_schema import Role
from tests.doubles.faults import answer, hang
from tests.doubles.kubernetes import POD_UID, Issuer, write_clusters
from tests.fakes.clock import Clock
from tests.support.network.authority import new_authority

MAPPED: Final = (
    '[namespaces.research]\norganisation = "acme"\nteam = "vision"\n[namespaces.lab]\norganisation = "acme"\n'
)
JOBS: Final = (
    '[jobs]\nimage = "bdn"\nurl = "http://mirror:8460"\n'
    '[namespaces.training]\norganisation = "acme"\njobs = true\n'
    '[namespaces.tuning]\norganisation = "acme"\nteam = "vision"\njobs = true\n'
)
HOUR: Final = 3600


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with Issuer() as issuer:
        yield issuer


@pytest.fixture
def accounts(issuer: Issuer, tmp_path: Path) -> ServiceAccounts:
    lines = issuer.cluster(agents="bdn/bdn-agent", organisation="default") + MAPPED
    return ServiceAccounts(load_clusters(write_clusters(tmp_path / "k.toml", gpu=lines)))


async def refusal(accounts: ServiceAccounts, token: str) -> str:
    with pytest.raises(UnauthenticatedError) as raised:
        await accounts.caller(token)
    return str(raised.value)


# --- who the bearer is ---


@pytest.mark.parametrize(("namespace", "organisation", "team"), [
    ("research", "acme", "vision"),
    ("lab", "acme", "gpu.lab"),
    ("other", "default", "gpu.other"),
    ("vision", "default", "gpu.vision"),  # the name of a namespace does not choose a team
])  # fmt: skip
async def test_caller__pod__acts_for_organisation_and_team_of_its_namespace(
    accounts: ServiceAccounts, issuer: Issuer, namespace: str, organisation: str, team: str
) -> None:
    assert await accounts.caller(issuer.token(namespace)) == Caller(
        organisation, Role.POD, cluster="gpu", team=team, pod=POD_UID
    )


@pytest.mark.parametrize(("namespace", "team"), [("training", None), ("tuning", "vision"), ("lab", "gpu.lab")])
async def test_caller__pod_of_jobs__acts_for_the_whole_organisation_unless_a_team_is_listed(
    issuer: Issuer, tmp_path: Path, namespace: str, team: str | None
) -> None:
    lines = issuer.cluster() + MAPPED + JOBS
    accounts = ServiceAccounts(load_clusters(write_clusters(tmp_path / "k.toml", gpu=lines)))
    caller = await accounts.caller(issuer.token(namespace))
    assert caller == Caller("acme", Role.POD, cluster="gpu", team=team, pod=POD_UID)


async def test_caller__agents_service_account__is_an_agent_of_its_cluster_alone(
    accounts: ServiceAccounts, issuer: Issuer
) -> None:
    assert await accounts.caller(issuer.token("bdn", "bdn-agent")) == Caller("default", Role.AGENT, cluster="gpu")
    for namespace, account in (("bdn", "default"), ("research", "bdn-agent")):
        found = await accounts.caller(issuer.token(namespace, account))
        assert found is not None
        assert found.role is Role.POD


async def test_caller__namespace_without_organisation__is_refused_by_name(issuer: Issuer, tmp_path: Path) -> None:
    strict = ServiceAccounts(load_clusters(write_clusters(tmp_path / "k.toml", gpu=issuer.cluster() + MAPPED)))
    assert "namespace 'other' of cluster 'gpu' belongs to no organisation" in await refusal(
        strict, issuer.token("other")
    )
    assert await strict.caller(issuer.token("research")) is not None


async def test_caller__two_clusters_of_one_issuer__each_has_its_own_keys(tmp_path: Path) -> None:
    with Issuer() as one, Issuer() as other:
        other.keys = {"other-0": other.keys["key-0"]}
        other.publishes = ["other-0"]
        clusters = {"one": one.cluster(organisation="acme"), "other": other.cluster(organisation="rival")}
        both = ServiceAccounts(load_clusters(write_clusters(tmp_path / "k.toml", **clusters)))
        assert await both.caller(one.token("lab")) == Caller("acme", Role.POD, "one", "one.lab", POD_UID)
        assert await both.caller(other.token("lab")) == Caller("rival", Role.POD, "other", "other.lab", POD_UID)


@pytest.fixture
def alike(tmp_path: Path) -> Iterator[tuple[Issuer, Issuer, Clock, ServiceAccounts]]:
    """Two clusters that were set up alike: one issuer, with different keys. The second one lists its namespaces."""
    with Issuer() as one, Issuer() as other:
        other.keys, other.publishes = {"other-0": other.keys["key-0"]}, ["other-0"]
        clusters = {"one": one.cluster(organisation="acme"), "other": other.cluster() + MAPPED}
        clock = Clock()
        yield one, other, clock, ServiceAccounts(load_clusters(write_clusters(tmp_path / "k.toml", **clusters)), clock)


async def test_caller__of_a_cluster__is_accepted_while_another_one_of_its_issuer_does_not_answer(
    alike: tuple[Issuer, Issuer, Clock, ServiceAccounts],
) -> None:
    silent, other, clock, accounts = alike
    silent.fail(answer(500))
    assert await accounts.caller(other.token("lab")) == Caller("acme", Role.POD, "other", "other.lab", POD_UID)
    with pytest.raises(StoreUnavailableError, match="'one'"):  # its key may be of this one
        await accounts.caller(silent.token("lab"))
    clock.advance(60)
    reads = silent.reads
    assert await accounts.caller(other.token("lab")) is not None
    assert "'lost' of cluster 'other' belongs to no organisation" in await refusal(accounts, other.token("lost"))
    assert "expired" in await refusal(accounts, other.token("lab", exp=NOW - HOUR))
    assert silent.reads == reads + 1, "only the token that is refused may be of the other one"


async def test_caller__elliptic_key__is_accepted(accounts: ServiceAccounts, issuer: Issuer) -> None:
    issuer.rotate(elliptic=True)
    assert await accounts.caller(issuer.token()) is not None


# --- what a token must be ---

NOW: Final = int(time.time())
POD: Final = {"name": "trainer-0", "uid": "u"}
ACCOUNT: Final = {"name": "default", "uid": "u"}


@pytest.mark.parametrize(("changes", "reason"), [
    ({"exp": NOW - HOUR}, "expired"),
    ({"nbf": NOW + HOUR}, "not yet valid"),
    ({"iat": NOW + HOUR}, "not yet valid"),
    ({"aud": ["https://kubernetes.default.svc"]}, "Audience"),
    ({"aud": "bdn2"}, "Audience"),
    ({"aud": None}, "aud"),
    ({"exp": None}, "exp"),
    ({"sub": None}, "sub"),
    ({"sub": "system:serviceaccount:lab:default"}, "subject"),
    ({"sub": "system:node:n1"}, "subject"),
    ({"kubernetes.io": None}, "kubernetes.io"),
    ({"kubernetes.io": "research"}, "not an object"),
    ({"kubernetes.io": {"namespace": "lab", "pod": POD, "serviceaccount": ACCOUNT}}, "subject"),
    ({"kubernetes.io": {"pod": POD, "serviceaccount": ACCOUNT}}, "subject"),
    ({"kubernetes.io": {"namespace": ["research"], "pod": POD, "serviceaccount": ACCOUNT}}, "subject"),
    ({"kubernetes.io": {"namespace": "research", "serviceaccount": ACCOUNT}}, "bound to no pod"),
    ({"kubernetes.io": {"namespace": "research", "pod": {"name": "x"}, "serviceaccount": ACCOUNT}}, "bound to no pod"),
    ({"kubernetes.io": {"namespace": "research", "pod": "x", "serviceaccount": ACCOUNT}}, "bound to no pod"),
    ({"kubernetes.io": {"namespace": "research", "pod": POD}}, "subject"),
    ({"exp": "soon"}, "exp"),
])  # fmt: skip
async def test_caller__claims_that_are_wrong__are_refused_with_the_reason(
    accounts: ServiceAccounts, issuer: Issuer, changes: dict[str, Any], reason: str
) -> None:
    assert reason.lower() in (await refusal(accounts, issuer.token(**changes))).lower()


async def test_caller__small_difference_of_clocks__is_accepted(accounts: ServiceAccounts, issuer: Issuer) -> None:
    soon = int(time.time()) + 10
    assert await accounts.caller(issuer.token(nbf=soon, iat=soon)) is not None


async def test_caller__signed_by_another_key_under_this_name__is_refused(
    accounts: ServiceAccounts, issuer: Issuer
) -> None:
    forger = Issuer()  # never opened: it only signs
    assert "Signature verification failed" in await refusal(accounts, forger.token())


async def test_caller__token_of_another_issuer__is_unknown(accounts: ServiceAccounts, issuer: Issuer) -> None:
    assert await accounts.caller(issuer.token(iss="https://elsewhere.example")) is None
    assert await accounts.caller(issuer.token(iss=None)) is None
    assert issuer.reads == 0


def unsigned(claims: dict[str, Any], header: dict[str, Any], signature: bytes = b"") -> str:
    parts = (json.dumps(header).encode(), json.dumps(claims).encode(), signature)
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


async def test_caller__algorithm_that_the_key_has_not__is_refused(accounts: ServiceAccounts, issuer: Issuer) -> None:
    """Among them the public key as a shared secret: the published key would sign tokens."""
    claims = issuer.claims()
    for algorithm in ("none", "None", "RS512", "PS256", "ES256", "HS256", "HS512", "EdDSA", ""):
        token = unsigned(claims, {"alg": algorithm, "kid": "key-0", "typ": "JWT"}, b"x")
        assert "alg" in await refusal(accounts, token), algorithm
    secret = issuer.public_pem("key-0")
    signer = jwt.PyJWS().get_algorithm_by_name("HS256")
    head = unsigned(claims, {"alg": "HS256", "kid": "key-0"}).rpartition(".")[0]
    signature = signer.sign(head.encode(), secret + b" ")  # pyjwt refuses to sign with what looks like a public key
    assert "alg" in await refusal(accounts, f"{head}.{_b64(signature)}")


def _b64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


async def test_caller__address_of_keys_in_the_token__is_not_followed(accounts: ServiceAccounts, issuer: Issuer) -> None:
    with Issuer(issuer.issuer) as forger:
        token = forger.sign(forger.claims(), jku=forger.keys_url, x5u=forger.keys_url)
        assert "Signature verification failed" in await refusal(accounts, token)
        assert forger.reads == 0


def hostile() -> Iterator[tuple[str, str]]:
    deep = _b64(b"[" * 10_000)
    yield "nothing", ""
    yield "dots", ".."
    yield "no base64", "a.b.c"
    yield "huge", "a" * 60_000 + ".b.c"
    yield "huge head", _b64(json.dumps({"alg": "RS256", "kid": "k" * 50_000}).encode()) + ".e30.e30"
    of_cluster = {"iss": "https://kubernetes.default.svc", "x": "x" * 20_000}
    yield "huge claims", unsigned(of_cluster, {"alg": "RS256", "kid": "key-0"})
    yield "deep head", f"{deep}.e30.e30"
    yield "deep claims", f"{_b64(json.dumps({'alg': 'RS256', 'kid': 'key-0'}).encode())}.{deep}.e30"
    yield "claims that are a list", unsigned([], {"alg": "RS256", "kid": "key-0"})  # type: ignore[arg-type]
    yield "five parts", "a.b.c.d.e"
    yield "not ASCII", "\u00e9.\u00e9.\u00e9"
    yield "a grant", unsigned({"iss": "bdn-mirror"}, {"alg": "EdDSA", "kid": "0" * 16})


@pytest.mark.parametrize("token", [pytest.param(token, id=name) for name, token in hostile()])
async def test_caller__what_is_no_token_of_a_cluster__is_unknown(
    accounts: ServiceAccounts, issuer: Issuer, token: str
) -> None:
    assert await accounts.caller(token) is None
    assert issuer.reads == 0


@pytest.mark.parametrize("key_id", [None, 1, ["key-0"], {"a": 1}])
async def test_caller__key_id_that_is_no_text__is_refused(
    accounts: ServiceAccounts, issuer: Issuer, key_id: object
) -> None:
    header = {"alg": "RS256"} if key_id is None else {"alg": "RS256", "kid": key_id}
    found: list[Caller | None] = []
    with suppress(UnauthenticatedError):
        found.append(await accounts.caller(unsigned(issuer.claims(), header, b"x")))
    assert found in ([], [None])
    assert issuer.reads == 0


# --- when the issuer is asked ---


def keys_of(issuer: Issuer, file: Path, clock: Clock, **more: str) -> IssuerKeys:
    return IssuerKeys("gpu", load_clusters(write_clusters(file, gpu=issuer.cluster(**more)))["gpu"], clock)


async def test_keys__storm_of_unknown_ids__costs_the_issuer_one_request_a_minute(
    issuer: Issuer, tmp_path: Path
) -> None:
    clock = Clock()
    keys = keys_of(issuer, tmp_path / "k.toml", clock)

    async def unknown(number: int) -> None:
        with pytest.raises(UnauthenticatedError, match="does not publish"):
            await keys.find(f"invented-{number}")

    async with asyncio.TaskGroup() as group:
        for number in range(500):
            group.create_task(unknown(number))
    assert issuer.reads == 1
    clock.advance(59)
    await unknown(501)
    assert issuer.reads == 1
    clock.advance(1)
    await unknown(502)
    assert issuer.reads == 2
    assert await keys.find("key-0") is not None


async def test_keys__new_key_of_the_issuer__is_found_once_a_minute_has_passed(issuer: Issuer, tmp_path: Path) -> None:
    clock = Clock()
    keys = keys_of(issuer, tmp_path / "k.toml", clock)
    await keys.find("key-0")
    issuer.rotate()
    with pytest.raises(UnauthenticatedError):
        await keys.find("key-1")
    clock.advance(60)
    assert await keys.find("key-1") is not None
    assert await keys.find("key-0") is not None


async def test_keys__key_that_the_issuer_removed__is_trusted_until_the_next_refresh(
    issuer: Issuer, tmp_path: Path
) -> None:
    clock = Clock()
    keys = keys_of(issuer, tmp_path / "k.toml", clock)
    await keys.find("key-0")
    issuer.rotate()
    issuer.publishes.remove("key-0")
    clock.advance(600)
    await keys.find("key-0")
    await keys.refresh()
    with pytest.raises(UnauthenticatedError):
        await keys.find("key-0")


async def test_keys__issuer_that_is_down__known_keys_stay_and_unknown_ones_can_be_retried(
    issuer: Issuer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    keys = keys_of(issuer, tmp_path / "k.toml", clock)
    await keys.find("key-0")
    issuer.fail(answer(503))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock.advance(600)
            await keys.refresh()
    assert await keys.find("key-0") is not None
    with pytest.raises(StoreUnavailableError, match="status 503"):
        await keys.find("key-1")
    assert len(caplog.messages) == 1  # of one outage
    assert "keeping 1 keys" in caplog.messages[0]
    issuer.mend()
    clock.advance(60)
    await keys.refresh()
    with pytest.raises(UnauthenticatedError):
        await keys.find("key-1")


async def test_keys__issuer_that_hangs__delays_no_caller_with_a_known_key(issuer: Issuer, tmp_path: Path) -> None:
    clock = Clock()
    keys = keys_of(issuer, tmp_path / "k.toml", clock)
    await keys.find("key-0")
    clock.advance(60)
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    issuer.fail(hang(lambda: loop.call_soon_threadsafe(begun.set)))
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(keys.find("key-1"))
        async with asyncio.timeout(60):
            await begun.wait()
        assert await keys.find("key-0") is not None
        assert not waiting.done()
        waiting.cancel()


@pytest.mark.parametrize("document", [
    b"", b"[]", b"{}", b'{"keys": {}}', b'{"keys": []}', b"[" * 10_000, b'{"keys": [' + b"{}," * 101 + b"{}]}",
    b'{"keys": [{"kty": "oct", "kid": "key-0", "k": "c2VjcmV0", "alg": "HS256"}]}',
    b" " * (256 * 1024 + 1), b"\xff\xfe",
])  # fmt: skip
async def test_keys__document_that_holds_no_usable_keys__is_refused_and_the_old_keys_stay(
    issuer: Issuer, tmp_path: Path, document: bytes
) -> None:
    clock = Clock()
    keys = keys_of(issuer, tmp_path / "k.toml", clock)
    await keys.find("key-0")
    issuer.document = document
    clock.advance(60)
    await keys.refresh()
    assert await keys.find("key-0") is not None
    with pytest.raises(StoreUnavailableError):
        await keys.find("key-1")


async def test_keys__unusable_ones_among_good_ones__are_skipped(issuer: Issuer, tmp_path: Path) -> None:
    good = json.loads(issuer.key_set())["keys"]
    odd: list[object] = [1, {"kty": "new", "kid": "a"}, {**good[0], "use": "enc", "kid": "b"}, {**good[0], "kid": 7}]
    secret = {"kty": "oct", "kid": "c", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3JldA", "alg": "HS256"}
    issuer.document = json.dumps({"keys": [*odd, secret, *good]}).encode()
    keys = keys_of(issuer, tmp_path / "k.toml", Clock())
    assert (await keys.find("key-0")).algorithm_name == "RS256"
    for key_id in "abc":
        with pytest.raises(UnauthenticatedError):
            await keys.find(key_id)


async def test_keys__in_a_file__are_read_again_for_an_unknown_id(issuer: Issuer, tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "jwks.json"
    file.write_bytes(issuer.key_set())
    keys = keys_of(issuer, tmp_path / "k.toml", clock, keys=str(file))
    await keys.find("key-0")
    issuer.rotate()
    file.write_bytes(issuer.key_set())
    clock.advance(60)
    assert await keys.find("key-1") is not None
    file.write_bytes(issuer.key_set().ljust(256 * 1024 + 1))
    clock.advance(60)
    with pytest.raises(StoreUnavailableError, match="more than 262144 bytes"):
        await keys.find("key-2")
    file.unlink()
    clock.advance(60)
    with pytest.raises(StoreUnavailableError, match="No such file"):
        await keys.find("key-2")
    assert issuer.reads == 0


async def test_keys__at_a_server_with_its_own_authority__need_that_authority_and_the_token(tmp_path: Path) -> None:
    """As inside a cluster: the API server's certificate is the cluster's, and it asks for a service-account token."""
    authority = new_authority(tmp_path, "localhost")
    token = tmp_path / "token"
    token.write_text("the-mirror-s-own\n")
    with Issuer(tls=authority.server) as issuer:
        issuer.needs = "the-mirror-s-own"
        found: dict[str, BdnError | None] = {}
        given = {"keys_ca": str(authority.certificates), "keys_token_file": str(token)}
        for left_out in ("keys_ca", "keys_token_file", ""):
            clock = Clock()
            keys = keys_of(
                issuer, tmp_path / "k.toml", clock, **{name: v for name, v in given.items() if name != left_out}
            )
            try:
                await keys.find("key-0")
            except BdnError as error:
                found[left_out] = error
            else:
                found[left_out] = None
    assert "certificate" in str(found["keys_ca"]).lower()
    assert "401" in str(found["keys_token_file"])
    assert found[""] is None
