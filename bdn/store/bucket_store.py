"""Chunks as objects of a bucket: S3, S3-compatible, R2 or Google Cloud Storage.

Keys: ``b3/aa/bb/<hex>`` for chunks; ``quarantine/<time>-<hex>`` for wrong content, as evidence; ``probe/`` for tests of
the server; ``owner`` for the id of the database that owns the store. Objects appear atomically, and an answer of 200
means durable: so nothing is ever half-written.

A PUT or DELETE without an answer may be carried out later, but not after its signature has expired. A PUT is retried at
once: all writers of a chunk write the same bytes. A DELETE is sent once: after a retry was answered, the chunk may be
put again, and the first DELETE could still remove it.
"""

from __future__ import annotations

import logging
import os
import time
from base64 import b64encode
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import md5
from typing import BinaryIO, Final, TypeVar

from bdn.core.chunk import CHUNK_SIZE, Buffer, Digest, digest_of
from bdn.core.errors import NotFoundError, StoreUnavailableError, UpstreamError
from bdn.core.source.upstream import ChecksumKind, Location
from bdn.core.store import DELETE_SENT_SECONDS, NotDeletedError, StoredObject
from bdn.store.access import Dialect
from bdn.store.boot_clock import since_boot
from bdn.store.bucket import Bucket, FailedOnItError
from bdn.store.directory import KEPT, fault_of
from bdn.transfer.checksums import CYCLIC

logger = logging.getLogger(__name__)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_AT_ONCE: Final = 16  # concurrent requests of one batch


def open_bucket_store(bucket: Bucket) -> BucketStore:
    """Test the server, and open the store. Raises ``StoreUnavailableError`` if the server does not respond."""
    return BucketStore(bucket, _compared(bucket, f"{_prefix_of(bucket)}probe/{_nonce()}"))


class BucketStore:
    """A ``MirrorStore`` and ``LocatableStore`` in a bucket or below a prefix. Safe for several threads and processes.

    ``compared`` is the checksum by which the server rejects wrong bytes. None: each chunk is read again after its
    write.
    """

    def __init__(self, bucket: Bucket, compared: str | None = "crc32c") -> None:
        self._bucket = bucket
        self._compared = compared
        self._prefix = _prefix_of(bucket)
        self._chunks = f"{self._prefix}b3/"
        self._quarantine = f"{self._prefix}quarantine/"

    def check(self) -> None:
        self._bucket.check(self._chunks)

    def owner(self, new: str | None = None, *, replace: bool = False) -> str | None:
        """In the object ``owner``. Of concurrent writes the last one wins if the server ignores conditions."""
        key = f"{self._prefix}owner"
        if new is not None and replace:
            self._bucket.put(key, new.encode())
        elif new is not None and self._bucket.head(key) is None:
            is_written = self._bucket.put(key, new.encode(), [self._bucket.dialect.only_if_absent], (412, 501))
            if not is_written and self._bucket.head(key) is None:  # the server does not support conditions
                self._bucket.put(key, new.encode())
        file = self._bucket.get(key)
        if file is None:
            return None
        with file:
            return file.read().decode("utf-8", "replace").strip()

    def disk(self) -> None:
        """None: the provider limits the room."""

    def close(self) -> None:
        self._bucket.close()

    def put(self, digest: Digest, content: Buffer, *, writer: str = "") -> None:
        """One PUT with a checksum, which the server verifies; otherwise followed by a GET."""
        bucket = self._bucket.of(writer)
        bucket.put(self._key(digest), content, _checked(bucket.dialect, self._compared, content))
        if self._compared is not None:
            return
        with self.open(digest) as file:
            if memoryview(file.read()) != memoryview(content):
                raise StoreUnavailableError(f"chunk {digest} arrived in the bucket with other bytes than were sent")

    def open(self, digest: Digest, *, reader: str | None = None) -> BinaryIO:
        found = self._bucket.of(reader or "").get(self._key(digest), for_reader=reader is not None)
        if found is None:
            raise NotFoundError(f"chunk {digest}")
        return found

    def delete(self, digests: Collection[Digest], *, began: float | None = None) -> None:
        """One DELETE per chunk, several at a time: each is answered on its own, and Google has no batch delete."""
        until = (since_boot() if began is None else began) + DELETE_SENT_SECONDS
        failed: dict[Digest, str] = {}
        with self._bucket.with_new_connections() as bucket:

            def remove(digest: Digest) -> None:
                try:
                    bucket.delete_once(self._key(digest), until)
                except StoreUnavailableError as error:
                    failed[digest] = error.reason

            _each(remove, list(digests))
        for reason in failed.values():
            raise NotDeletedError(reason, frozenset(failed))

    def listed(self) -> Iterator[StoredObject]:
        for page in self._bucket.list_all(self._chunks):
            for entry in page.objects:
                with suppress(ValueError):  # not a chunk
                    digest = Digest(entry.name.rpartition("/")[2])
                    if self._key(digest) == entry.name:
                        yield StoredObject(digest, entry.size)

    def drop_leftovers(self, before: float, *, dry_run: bool) -> tuple[int, int]:
        sizes: list[int] = []
        for page in self._bucket.list_all(f"{self._prefix}probe/"):
            for entry in page.objects:
                if _seconds(entry.modified) < before:
                    if not dry_run:
                        self._bucket.delete(entry.name)
                    sizes.append(entry.size)
        return len(sizes), sum(sizes)

    def fault(self, digest: Digest) -> str | None:
        """Reads the whole chunk. A chunk that cannot be read while other objects can is wrong."""
        try:
            with self.open(digest) as file:
                return fault_of(file, digest)
        except NotFoundError:
            return "it is absent"
        except StoreUnavailableError as error:
            self._check_others(error)
            return f"it cannot be read ({error})"

    def set_aside(self, digest: Digest) -> bool:
        """Copies the bytes into quarantine. Raises ``StoreUnavailableError`` if they cannot be read."""
        file = self._bucket.get(self._key(digest))
        if file is None:
            return False
        with file:
            if fault_of(file, digest) is None:
                return False
            file.seek(0)
            # The name: when it was found, and the expected digest.
            self._bucket.put(f"{self._quarantine}{time.time_ns()}-{digest.hex}", file.read())
        for name in sorted(self._quarantined())[:-KEPT]:
            self._bucket.delete(name)
        return True

    def evidence(self) -> int:
        return len(self._quarantined())

    def locate(self, digests: Sequence[Digest]) -> list[Location]:
        """Each address opens one chunk, for a quarter of an hour or until the store's keys expire."""
        try:
            with self._bucket.signed_in():
                signer = self._bucket.access.signer
        except UpstreamError as error:
            raise StoreUnavailableError(str(error)) from error
        return [Location(signer.address(self._key(digest)), expires_at=signer.expires_at) for digest in digests]

    def _key(self, digest: Digest) -> str:
        return f"{self._chunks}{digest.fanout}"

    def _check_others(self, error: StoreUnavailableError) -> None:
        """Raise the error again unless only this object fails: another one can be written and read."""
        if not isinstance(error.__cause__, FailedOnItError):
            raise error
        # As large as a chunk: through a broken link or proxy small answers may still pass.
        probe, content = f"{self._prefix}probe/{_nonce()}", os.urandom(CHUNK_SIZE)
        self._bucket.put(probe, content)
        file = self._bucket.get(probe)
        if file is None:
            raise error
        with file:
            if fault_of(file, digest_of(content)) is not None:
                raise error
        self._bucket.delete(probe)

    def _quarantined(self) -> list[str]:
        return [entry.name for page in self._bucket.list_all(self._quarantine) for entry in page.objects]


def _compared(bucket: Bucket, key: str) -> str | None:
    """The checksum by which the server rejects wrong bytes, found with a small object, which is removed again."""
    content, found = b"bdn tries what this server does", None
    for kind in ("crc32c", "md5"):
        wrong, right = (_checked(bucket.dialect, kind, one) for one in (b"other bytes", content))
        if not bucket.put(key, content, wrong, (400, 501)) and bucket.put(key, content, right, (400, 501)):
            found = kind
            break
    bucket.list_some(key, 1)  # fails early if the credentials do not allow listing
    bucket.delete(key)
    if found != "crc32c":
        logger.warning(
            "the store's server compares no CRC32C of what it receives: %s",
            "using MD5 instead" if found else "nor MD5; reading each chunk again after it is written",
        )
    return found


def _prefix_of(bucket: Bucket) -> str:
    """The prefix of every key: empty, or with a final slash."""
    prefix = bucket.uri.prefix.strip("/")
    return f"{prefix}/" if prefix else ""


def _nonce() -> str:
    return os.urandom(8).hex()


def _crc32c(content: bytes | Buffer) -> str:
    value = CYCLIC[ChecksumKind.CRC32C].go_on(memoryview(content), 0)
    return b64encode(value.to_bytes(4, "big")).decode()


def _checked(dialect: Dialect, checks: str | None, content: bytes | Buffer) -> list[tuple[str, str]]:
    """The header by which the server verifies this content."""
    match checks:
        case "crc32c":
            return [dialect.checked(_crc32c(content))]
        case "md5":
            return [("content-md5", b64encode(md5(content, usedforsecurity=False).digest()).decode())]
        case _:
            return []


def _seconds(text: str) -> float:
    """Parse a listing's time of writing. Raises ``StoreUnavailableError`` if it is missing."""
    try:
        written = datetime.fromisoformat(text)
    except ValueError:
        raise StoreUnavailableError("its server lists objects without their times") from None
    return (written if written.tzinfo else written.replace(tzinfo=UTC)).timestamp()


def _each(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Results in the order of items; several calls run at once."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(len(items), _AT_ONCE)) as threads:
        return list(threads.map(work, items))
