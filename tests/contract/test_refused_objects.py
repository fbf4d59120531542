"""An object that is listed and cannot be read: the error says what to do, and what will not pass is requested once."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from xml.sax.saxutils import escape

import pytest

from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    InvalidSourceError,
    SourceArchivedError,
    SourceNotFoundError,
)
from bdn.core.source.uri import BucketUri
from bdn.mirror.ingest.copier import Copier
from bdn.mirror.upstream.budget import UpstreamBudgets
from bdn.mirror.upstream.reader import LocatedFile, UpstreamReader
from bdn.mirror.upstream.retries import UpstreamRetries
from bdn.net.http1.pool import ConnectionPool
from bdn.sources.opener import open_source
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import Secret, SourceContext
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.ranged import RangedReader
from bdn.transfer.under_way import UnderWay
from tests.contract.opening import GcsWay, Opened, keys_of
from tests.contract.source_contract import listed
from tests.doubles.faults import Fault, answer, truncate
from tests.doubles.gcs import GcsServer, gcs_error
from tests.doubles.s3 import S3Server
from tests.support.content.memory_store import MemoryStore
from tests.support.content.noise import MIB, noise
from tests.support.network.egress import LOOPBACK

SMALL, LARGE = "small.bin", "large.bin"
FILES = {SMALL: b"x" * 100, LARGE: noise(9 * MIB + 1, 2)}
SECRET = "sesame"  # stands in messages of servers


def of_s3(status: int, code: str, message: str = "double", **more: str) -> Fault:
    facts = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in more.items())
    text = escape(f"{message} {SECRET}")
    document = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{text}</Message>{facts}</Error>'
    return answer(status, {"Content-Type": "application/xml"}, document.encode())


def of_gcs(status: int, reason: str) -> Fault:
    document = gcs_error(status, reason).content
    assert isinstance(document, bytes)
    return answer(status, body=document)


@dataclass
class Pulling:
    """Reads a file of an upstream as the mirror does."""

    reader: UpstreamReader
    pauses: list[float]

    async def pull(self, opened: Opened, path: str) -> None:
        async with opened as source:
            file = (await listed(source))[path]
            located = LocatedFile("the source", source, file)
            store = MemoryStore()
            copied = await Copier(store, self.reader).copy(located, {}, store.put, lambda *_: None, UnderWay())
        assert copied.size == len(FILES[path])

    async def refusal(self, opened: Opened, path: str) -> BdnError:
        with pytest.raises(BdnError) as raised:
            await self.pull(opened, path)
        assert SECRET not in f"{raised.value} {raised.value.details()}"
        assert self.pauses == [], "it is not requested again"
        return raised.value


@pytest.fixture
def pulling() -> Iterator[Pulling]:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    with closing(ConnectionPool(timeout_seconds=10)) as pool, closing(ByteThreads(1, "test")) as threads:
        yield Pulling(
            UpstreamReader(RangedReader(pool), threads, UpstreamRetries(UpstreamBudgets(pause=pause))), pauses
        )


@pytest.fixture(scope="module")
def filled(shared_s3_server: S3Server, shared_gcs_server: GcsServer) -> None:
    shared_s3_server.bucket("refusing").put(FILES)
    shared_gcs_server.bucket("refusing", public=True).put(FILES)


@pytest.fixture
def s3(s3_server: S3Server, filled: None) -> S3Server:
    return s3_server


@pytest.fixture
def gcs(gcs_server: GcsServer, filled: None) -> GcsServer:
    return gcs_server


def opened(server: S3Server) -> Opened:
    settings = UpstreamSettings(egress=LOOPBACK, s3_endpoint_url=server.url)
    return open_source(
        BucketUri("s3", "refusing", ""), SourceContext("acme", settings, Secret("keys", keys_of(server.account)))
    )


REFUSALS = [
    (of_s3(403, "InvalidObjectState", StorageClass="GLACIER"), SourceArchivedError, r"archived \(GLACIER\).*restore"),
    (of_s3(403, "InvalidObjectState", StorageClass="DEEP_ARCHIVE"), SourceArchivedError, r"\(DEEP_ARCHIVE\)"),
    (of_s3(403, "InvalidObjectState", StorageClass="INTELLIGENT_TIERING", AccessTier="ARCHIVE_ACCESS"),
        SourceArchivedError, r"\(ARCHIVE_ACCESS\)"),
    (of_s3(403, "InvalidObjectState", StorageClass="<b>&"), SourceArchivedError, r"\(InvalidObjectState\)"),
    (of_s3(403, "AccessDenied", "User: arn:… is not authorized to perform: kms:Decrypt"), AuthRequiredError, "kms:Decrypt"),
    (of_s3(400, "KMS.DisabledException"), AuthRequiredError, r"KMS\.DisabledException.*enable the key"),
    (of_s3(400, "KMS.NotFoundException"), AuthRequiredError, "kms:Decrypt"),
    (of_s3(400, "InvalidRequest", "The object was stored using a form of Server Side Encryption."),
        AuthRequiredError, "SSE-C.*Copy"),
    (of_s3(403, "AllAccessDisabled"), SourceNotFoundError, "disabled it"),
    (of_s3(403, "NotSignedUp"), AuthRequiredError, "NotSignedUp"),
    (of_s3(403, "NotEntitled"), AuthRequiredError, "NotEntitled"),  # R2
    (of_s3(403, "AccountProblem"), AuthRequiredError, "suspended"),
    (of_s3(400, "AuthorizationHeaderMalformed", Region="eu-west-1"), InvalidSourceError, "another region"),
    (of_s3(451, "UnavailableForLegalReasons"), SourceNotFoundError, "legal reasons"),
    (answer(451), SourceNotFoundError, "legal reasons"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "expected", "said"), REFUSALS)
@pytest.mark.parametrize("path", [SMALL, LARGE])
async def test_what_s3_refuses_for_good_is_named_with_its_remedy_and_requested_once(
    s3: S3Server, pulling: Pulling, fault: Fault, expected: type[BdnError], said: str, path: str
) -> None:
    s3.script.add(fault, path, method="GET", times=None)
    error = await pulling.refusal(opened(s3), path)
    assert type(error) is expected
    assert not error.transient
    assert s3.log.count(path, method="GET") == 1
    with pytest.raises(expected, match=said):
        raise error


UNREAD = [
    of_s3(403, "AccessDenied", "Request has expired"),
    of_s3(400, "ExpiredToken"),
    of_s3(403, "not a code"),
    answer(403, body=b"<html>a proxy's page"),
    answer(403, body=b"<Error>" + b"x" * 100_000),
    answer(403, body=b'<!DOCTYPE x [<!ENTITY a "InvalidObjectState">]><Error><Code>&a;&a;</Code></Error>'),
    truncate(0),
]


@pytest.mark.parametrize("fault", UNREAD)
async def test_any_other_refusal_once_is_survived_with_another_address(
    s3: S3Server, pulling: Pulling, fault: Fault
) -> None:
    s3.script.add(fault, SMALL, method="GET")
    await pulling.pull(opened(s3), SMALL)
    assert s3.log.count(SMALL, method="GET") == 2


OF_GCS = [
    (of_gcs(400, "cloudKmsDisabledKey"), AuthRequiredError, "cloudKmsDisabledKey.*Enable the key"),
    (of_gcs(400, "resourceIsEncryptedWithCustomerEncryptionKey"), AuthRequiredError, "CSEK"),
    (of_gcs(400, "userProjectMissing"), InvalidSourceError, "no project to bill"),
    (of_gcs(403, "accountDisabled"), AuthRequiredError, "billing account"),
    (answer(451), SourceNotFoundError, "legal reasons"),
]


@pytest.mark.parametrize(("fault", "expected", "said"), OF_GCS)
async def test_what_gcs_refuses_for_good_is_named_with_its_remedy_and_requested_once(
    gcs: GcsServer, pulling: Pulling, fault: Fault, expected: type[BdnError], said: str
) -> None:
    gcs.script.add(fault, SMALL, method="GET", times=None, skip=0)
    error = await pulling.refusal(GcsWay(gcs.url).open("refusing"), SMALL)
    assert type(error) is expected
    assert gcs.log.count(SMALL) == 1
    with pytest.raises(expected, match=said):
        raise error


async def test_a_rate_limit_of_gcs_with_status_403_is_waited_out(gcs: GcsServer, pulling: Pulling) -> None:
    gcs.script.add(of_gcs(403, "rateLimitExceeded"), SMALL, times=3)
    await pulling.pull(GcsWay(gcs.url).open("refusing"), SMALL)
    assert len(pulling.pauses) >= 1
