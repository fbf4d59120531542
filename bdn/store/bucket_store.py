"""Chunks as objects of a bucket: of S3, of what speaks S3, of R2, of Google Cloud Storage.

``b3/aa/bb/<hex>`` are the chunks; ``quarantine/<time>-<hex>`` is wrong content that is kept for people; ``leaving/`` is what
collectors are about to delete; ``probe/`` is what the server is tried with; ``owner`` is the id of the database that the store belongs to. An object appears whole or not at all, and what was
answered with 200 is durable: so nothing here is ever half-written.

Nobody can rename an object, or delete it only if nobody has touched it. So who counts on a chunk and who collects it see each
other through what they write, in opposite orders (the server is strongly consistent, which is tried when the store is opened):

- A *collector* writes a marker, an object in ``leaving/`` that names a batch of chunks. Then it looks at each of them again, and
  deletes those that are as they were seen. Then it deletes the marker.
- Who *puts or keeps* a chunk writes it, or copies it onto itself, with a note that nobody has written before. Then it looks for
  markers; where one names the chunk, it waits until that is gone. Then it looks whether the chunk is there.

A's note came before B looked: then B spares the chunk. Or B looked first: then B's marker was there when A looked for markers,
and A waited for the end of B's deleting; or it was gone already, and with it all of B's deleting. Either way A's last look says
what stays. The note is a time and a few random letters in the object's metadata, because servers tell times of modification in
whole seconds.

A DELETE whose answer does not come may be carried out later, even when the chunk is gone by then. It is not sent again, and its
marker stays, or one that names that chunk alone: others wait for it until the marker is a quarter of an hour old by the server's clock. By then no DELETE is under way, because collectors send
none later than a minute after they began to write their marker, by a clock of their own, and sign each for two minutes: the server
refuses what was held up on its way.
"""

from __future__ import annotations

import logging
import os
import time
from base64 import b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from hashlib import md5
from itertools import islice
from typing import BinaryIO, Final, TypeVar

from bdn.core.chunk import CHUNK_SIZE, Buffer, Digest, digest_of
from bdn.core.errors import NotFoundError, StoreUnavailableError, UpstreamError
from bdn.core.source.upstream import ChecksumKind, Location
from bdn.core.store import StoredChunk
from bdn.store.access import Dialect
from bdn.store.bucket import Bucket, FailedOnItError, TooLateError, moment_of, since_boot, utc_seconds
from bdn.store.directory import KEPT, fault_of
from bdn.transfer.checksums import CYCLIC

logger = logging.getLogger(__name__)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_AT_ONCE: Final = 16  # requests of one batch
_BATCH: Final = 1000  # chunks that one look takes
_RECENT_SECONDS: Final = 5.0  # by which a server's clocks differ at most, and the second that they do not tell
_CLOCKS_SECONDS: Final = 60.0  # by which our clock and those of a server may differ
_DELETES_SECONDS: Final = 60.0  # after its marker was written, a collector sends no DELETE
_MARKER_SECONDS: Final = 900.0  # when nobody believes a marker any more
_WAIT_SECONDS: Final = 75.0  # for a collector
_LOOK_AGAIN_SECONDS: Final = 0.1
_PUTS: Final = 5


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a server does for who writes: which wrong checksum it refuses, and whether it leaves alone what is there.

    ``checks`` None: what was written has to be read again.
    """

    checks: str | None = "crc32c"
    leaves_what_is_there: bool = True


def open_bucket_store(bucket: Bucket, clock: Callable[[], float] = time.time) -> BucketStore:
    """The store, once its server was tried. ``StoreUnavailableError``: it does not answer, or chunks are not safe in it."""
    abilities = _tried(bucket, f"{_prefix_of(bucket)}probe/{_nonce()}", clock)
    return BucketStore(bucket, abilities, clock)


class BucketStore:
    """A ``MirrorStore`` and ``LocatableStore`` in a bucket, or below a prefix of it. Safe for several threads and processes at once.

    ``recent_seconds``: of an object that is younger when it is listed, the listing does not tell whether it is changed later.
    """

    def __init__(
        self,
        bucket: Bucket,
        abilities: Abilities,
        clock: Callable[[], float] = time.time,
        *,
        recent_seconds: float = _RECENT_SECONDS,
    ) -> None:
        self._bucket = bucket
        self._abilities = abilities
        self._clock = clock
        self._recent_seconds = recent_seconds
        self._prefix = _prefix_of(bucket)
        self._chunks = f"{self._prefix}b3/"
        self._leaving = f"{self._prefix}leaving/"
        self._quarantine = f"{self._prefix}quarantine/"

    def check(self) -> None:
        """By a listing of one object."""
        self._bucket.check(self._chunks)

    def owner(self, new: str | None = None, *, replace: bool = False) -> str | None:
        """In the object ``owner``. A server that overwrites what is there keeps the last id of several that are written at once."""
        key = f"{self._prefix}owner"
        if new is not None:
            headers, but = (
                ([self._bucket.dialect.only_if_absent], (412,)) if self._abilities.leaves_what_is_there else ([], ())
            )
            if replace:
                self._bucket.put(key, new.encode())
            elif self._bucket.head(key) is None:
                self._bucket.put(key, new.encode(), headers, but)
        file = self._bucket.get(key)
        if file is None:
            return None
        with file:
            return file.read().decode("utf-8", "replace").strip()

    def disk(self) -> None:
        """None: its room is the provider's."""

    def close(self) -> None:
        """Close the connections."""
        self._bucket.close()

    def put(self, digest: Digest, content: Buffer, *, writer: str = "") -> None:
        """Write the object with a checksum, which the server compares. One that is there is replaced when it is wrong, and kept otherwise."""
        if writer:
            of_writer = BucketStore(self._bucket.of(writer), self._abilities, self._clock)
            of_writer.put(digest, content)
            return
        for _ in range(_PUTS):
            if not self._is_found_or_new(digest, content):
                self._write(digest, content)
            if self._staying([digest]):
                return
        raise StoreUnavailableError(f"chunk {digest} is deleted as often as it is written")

    def open(self, digest: Digest, *, reader: str | None = None) -> BinaryIO:
        """All of it, in memory."""
        found = self._bucket.of(reader or "").get(self._key(digest), for_reader=reader is not None)
        if found is None:
            raise NotFoundError(f"chunk {digest}")
        return found

    def keep(self, digests: Sequence[Digest]) -> set[Digest]:
        """Copy the objects onto themselves with a new note. One that alone cannot be copied is not held: it is to be put again."""
        touched = _each(self._is_touched, digests)
        return self._staying([digest for digest, is_held in zip(digests, touched, strict=True) if is_held])

    def stored(self, digests: Iterable[Digest] | None = None) -> Iterator[StoredChunk]:
        """By listing the bucket, or by asking for each of these. Times of a listing are the server's."""
        if digests is None:
            yield from self._listed()
            return
        left = iter(digests)
        while batch := list(islice(left, _BATCH)):
            yield from filter(None, _each(self._look, batch))

    def collect(self, chunks: Sequence[StoredChunk]) -> list[StoredChunk]:
        """Write a marker, look again, delete. A chunk whose DELETE was not answered is not among the removed ones.

        Two collectors that remove a chunk in the same moment both say that they did.
        """
        if not chunks:
            return []
        until = since_boot() + _DELETES_SECONDS
        marker = self._mark(chunk.digest for chunk in chunks)
        under_way = set[Digest]()
        try:
            gone = _each(partial(self._collect, until=until, under_way=under_way), chunks)
        finally:
            with suppress(StoreUnavailableError):  # nobody believes it for long
                if under_way:  # the others of this batch need nobody to wait
                    self._mark(under_way)
                self._bucket.delete(marker)
        return [chunk for chunk, is_gone in zip(chunks, gone, strict=True) if is_gone]

    def drop_leftovers(self, before: float, *, dry_run: bool) -> tuple[int, int]:
        """What is left of trying the server, and markers of collectors that were killed."""
        sizes: list[int] = []
        for prefix in (f"{self._prefix}probe/", self._leaving):
            for page in self._bucket.list_all(prefix):
                for entry in page.objects:
                    written = _written(entry.modified)
                    if written < before and page.now - written > _MARKER_SECONDS:
                        if not dry_run:
                            self._bucket.delete(entry.name)
                        sizes.append(entry.size)
        return len(sizes), sum(sizes)

    def fault(self, digest: Digest) -> str | None:
        """By reading all of it. One that cannot be read where others can is wrong."""
        try:
            with self.open(digest) as file:
                return fault_of(file, digest)
        except NotFoundError:
            return "it is absent"
        except StoreUnavailableError as error:
            self._check_others(error)
            return f"it cannot be read ({error})"

    def set_aside(self, digest: Digest) -> bool:
        """A copy, then what a collector does: so right bytes that somebody puts meanwhile stay."""
        seen = self._look(digest)
        if seen is None or self.fault(digest) is None:
            return False
        evidence = f"{self._quarantine}{time.time_ns()}-{digest.hex}"  # when it was found, and what it should have been
        if not self._bucket.copy(self._key(digest), evidence, ()):
            return False
        if not self.collect([seen]):
            self._bucket.delete(evidence)
            return False
        for name in sorted(self._quarantined())[:-KEPT]:
            self._bucket.delete(name)
        return True

    def evidence(self) -> int:
        """Objects in ``quarantine/``."""
        return len(self._quarantined())

    def locate(self, digests: Sequence[Digest]) -> list[Location]:
        """Signed for a quarter of an hour, or until the store's keys end: each address opens one chunk, and nothing else."""
        try:
            with self._bucket.signed_in():
                signer = self._bucket.access.signer
        except UpstreamError as error:
            raise StoreUnavailableError(str(error)) from error
        return [Location(signer.address(self._key(digest)), expires_at=signer.expires_at) for digest in digests]

    def _key(self, digest: Digest) -> str:
        return f"{self._chunks}{digest.fanout}"

    def _note(self) -> tuple[str, str]:
        """One that no object has."""
        return self._bucket.dialect.note, f"{self._clock():.6f}-{_nonce()}"

    def _is_found_or_new(self, digest: Digest, content: Buffer) -> bool:
        """Write the object if there is none, and touch one that is right. False: it is wrong, or alone cannot be looked at or touched."""
        try:
            return self._write_new(digest, content) or (self._is_right(digest, content) and self._touch(digest))
        except StoreUnavailableError as error:
            self._check_others(error)
            return False

    def _is_touched(self, digest: Digest) -> bool:
        try:
            return self._touch(digest)
        except StoreUnavailableError as error:
            self._check_others(error)
            return False

    def _check_others(self, error: StoreUnavailableError) -> None:
        """Of a request for one object: raise the error again, unless that object alone fails, and another is written and read."""
        if not isinstance(error.__cause__, FailedOnItError):
            raise error
        # As large as a chunk: where a link or a proxy breaks, small answers may well get through.
        probe, content = f"{self._prefix}probe/{_nonce()}", os.urandom(CHUNK_SIZE)
        self._bucket.put(probe, content)
        file = self._bucket.get(probe)
        if file is None:
            raise error
        with file:
            if fault_of(file, digest_of(content)) is not None:
                raise error
        self._bucket.delete(probe)

    def _write_new(self, digest: Digest, content: Buffer) -> bool:
        """Write the object if there is none; False when there is one."""
        if self._abilities.leaves_what_is_there:
            return self._write(digest, content, but_what_is_there=True)
        return self._bucket.head(self._key(digest)) is None and self._write(digest, content)

    def _write(self, digest: Digest, content: Buffer, *, but_what_is_there: bool = False) -> bool:
        dialect = self._bucket.dialect
        headers = [self._note(), *_checked(dialect, self._abilities.checks, content)]
        if but_what_is_there:
            headers.append(dialect.only_if_absent)
        is_written = self._bucket.put(self._key(digest), content, headers, (412,) if but_what_is_there else ())
        if is_written and self._abilities.checks is None:
            self._compare(digest, content)
        return is_written

    def _compare(self, digest: Digest, content: Buffer) -> None:
        """Read it again: the server takes what comes, whatever its checksum is. What was collected since, ``put`` writes again."""
        file = self._bucket.get(self._key(digest))
        if file is None:
            return
        with file:
            if memoryview(file.read()) != memoryview(content):
                raise StoreUnavailableError(f"chunk {digest} came into the bucket with other bytes than were sent")

    def _is_right(self, digest: Digest, content: Buffer) -> bool:
        """Whether what is there is what its name says: by the checksum that the server has verified, or by reading it."""
        dialect = self._bucket.dialect
        if self._abilities.checks == "crc32c":
            found = self._bucket.head(self._key(digest), dialect.tells_crc32c)
            if found and _size_of(found) == len(content) and dialect.stated_crc32c(found) == _crc32c(content):
                return True
        return self.fault(digest) is None

    def _touch(self, digest: Digest) -> bool:
        """Give it a new note. False when there is none."""
        key = self._key(digest)
        return self._bucket.copy(key, key, [self._note()])

    def _staying(self, digests: Sequence[Digest]) -> set[Digest]:
        """Which of these are there, once nobody deletes them who has seen them before they were touched."""
        if not digests:
            return set()
        self._wait_for_collectors({digest.hex for digest in digests})
        return {chunk.digest for chunk in _each(self._look, digests) if chunk is not None}

    def _wait_for_collectors(self, names: Collection[str]) -> None:
        """Until no marker has one of these names."""
        until, concerned = time.monotonic() + _WAIT_SECONDS, dict[str, bool]()
        while self._is_any_leaving(names, concerned):
            if time.monotonic() > until:
                raise StoreUnavailableError(
                    "a collection that did not end may still delete a chunk that is needed; try again in a quarter of an hour"
                )
            self._bucket.pause(_LOOK_AGAIN_SECONDS)

    def _is_any_leaving(self, names: Collection[str], concerned: dict[str, bool]) -> bool:
        """Whether a marker concerns these names; ``concerned`` are markers that were read."""
        is_any = False
        for page in self._bucket.list_all(self._leaving):
            for entry in page.objects:
                if page.now - _written(entry.modified) > _MARKER_SECONDS:
                    self._bucket.delete(entry.name)
                    continue
                if entry.name not in concerned:
                    marked = self._marked(entry.name)
                    if marked is None:  # it is gone, perhaps for another one that this listing does not show
                        is_any = True
                        continue
                    concerned[entry.name] = not marked.isdisjoint(names)
                is_any |= concerned[entry.name]
        return is_any

    def _mark(self, digests: Iterable[Digest]) -> str:
        """A marker that names these chunks."""
        marker = f"{self._leaving}{_nonce()}"
        self._bucket.put(marker, "\n".join(digest.hex for digest in digests).encode())
        return marker

    def _marked(self, marker: str) -> set[str] | None:
        file = self._bucket.get(marker)
        if file is None:
            return None
        with file:
            return set(file.read().decode("ascii", "replace").split())

    def _collect(self, chunk: StoredChunk, *, until: float, under_way: set[Digest]) -> bool:
        """Delete it if it is as it was seen. It stays ``under_way`` when nobody knows what becomes of the DELETE."""
        found = self._look(chunk.digest)
        if found is None or not self._is_as_seen(chunk, found):
            return False
        under_way.add(chunk.digest)
        try:
            is_known = self._bucket.delete_once(self._key(chunk.digest), until)
        except TooLateError:
            under_way.discard(chunk.digest)
            return False
        except StoreUnavailableError:
            under_way.discard(chunk.digest)  # the server said that it does not do that
            raise
        if is_known:
            under_way.discard(chunk.digest)
            return True
        return self._look(chunk.digest) is None  # another's DELETE may have done that, and ours may still come

    @staticmethod
    def _is_as_seen(seen: StoredChunk, found: StoredChunk) -> bool:
        if seen.stamp:
            return found.stamp == seen.stamp
        return found.stamp.rpartition(" ")[2] == str(int(seen.kept_at))  # a listing has told when it was written

    def _look(self, digest: Digest) -> StoredChunk | None:
        headers = self._bucket.head(self._key(digest))
        if headers is None:
            return None
        note, written = headers.get(self._bucket.dialect.note, ""), moment_of(headers.get("last-modified", ""))
        try:
            kept_at = float(note.partition("-")[0])
        except ValueError:  # somebody else wrote it
            kept_at = written
        return StoredChunk(digest, _size_of(headers), kept_at, f"{note} {headers.get('etag', '')} {int(written)}")

    def _listed(self) -> Iterator[StoredChunk]:
        for page in self._bucket.list_all(self._chunks):
            found = {digest: entry for entry in page.objects if (digest := self._digest_in(entry.name))}
            recent = {
                digest for digest, entry in found.items() if page.now - _written(entry.modified) < self._recent_seconds
            }
            looked_at = {chunk.digest: chunk for chunk in _each(self._look, list(recent)) if chunk is not None}
            for digest, entry in found.items():
                if digest in looked_at:
                    yield looked_at[digest]
                elif digest not in recent:
                    yield StoredChunk(digest, entry.size, _written(entry.modified))

    def _digest_in(self, key: str) -> Digest | None:
        """None for what is not ours."""
        try:
            digest = Digest(key.rpartition("/")[2])
        except ValueError:
            return None
        return digest if self._key(digest) == key else None

    def _quarantined(self) -> list[str]:
        return [entry.name for page in self._bucket.list_all(self._quarantine) for entry in page.objects]


def _tried(bucket: Bucket, key: str, clock: Callable[[], float]) -> Abilities:
    """What the server does with a small object, which is removed again."""
    dialect, content = bucket.dialect, b"bdn tries what this server does"
    checks = None
    for kind in ("crc32c", "md5"):
        wrong = _checked(dialect, kind, b"other bytes")
        if not bucket.put(key, content, wrong, (400, 501)) and bucket.put(
            key, content, _checked(dialect, kind, content), (400, 501)
        ):
            checks = kind
            break
    first = f"{key}-first"
    is_taken = [bucket.put(first, content, [dialect.only_if_absent], (412, 501)) for _ in range(2)]
    abilities = Abilities(checks, leaves_what_is_there=is_taken == [True, False])
    if not any(is_taken):
        bucket.put(first, content)
    note, began = (dialect.note, _nonce()), clock()
    found = bucket.head(first) if bucket.copy(first, first, [note]) else None
    if found is None or found.get(note[0]) != note[1]:
        raise StoreUnavailableError(
            "its server cannot copy an object onto itself with other metadata, so nothing could be kept"
        )
    page = bucket.list_some(first)
    if [entry.name for entry in page.objects] != [first]:
        raise StoreUnavailableError(
            "its server does not list at once what was written, so nothing could be collected safely"
        )
    _compare_clocks(_written(page.objects[0].modified), page.now, began, clock())
    for name in (key, first):
        bucket.delete(name)
    if abilities != Abilities():
        logger.warning(
            "the store's server does less than it could: %s; %s",
            {
                "crc32c": "it compares CRC32C",
                "md5": "it compares MD5 alone",
                None: "it compares no checksum, and what is written is read again",
            }[checks],
            "it leaves alone what is there" if abilities.leaves_what_is_there else "it overwrites what is there",
        )
    return abilities


def _compare_clocks(written: float, told: float, began: float, ended: float) -> None:
    """Markers rest on them. An object was ``written``, and then the server ``told`` its time, between two looks at our own clock."""
    if abs(told - written) > _CLOCKS_SECONDS + max(0.0, ended - began):
        raise StoreUnavailableError(
            f"its server says that an object was written {told - written:+.0f} s before it was: its own clocks differ, so "
            "nothing could be collected safely"
        )
    if not began - _CLOCKS_SECONDS <= told <= ended + _CLOCKS_SECONDS:
        raise StoreUnavailableError(
            f"the clock of this machine is {ended - told:+.0f} s off that of its server; set it, as with NTP, and start again"
        )


def _prefix_of(bucket: Bucket) -> str:
    """Of every key: nothing, or with a final slash."""
    prefix = bucket.uri.prefix.strip("/")
    return f"{prefix}/" if prefix else ""


def _nonce() -> str:
    return os.urandom(8).hex()


def _crc32c(content: bytes | Buffer) -> str:
    value = CYCLIC[ChecksumKind.CRC32C].go_on(memoryview(content), 0)
    return b64encode(value.to_bytes(4, "big")).decode()


def _checked(dialect: Dialect, checks: str | None, content: bytes | Buffer) -> list[tuple[str, str]]:
    """The header by which the server compares this content."""
    match checks:
        case "crc32c":
            return [dialect.checked(_crc32c(content))]
        case "md5":
            return [("content-md5", b64encode(md5(content, usedforsecurity=False).digest()).decode())]
        case _:
            return []


def _size_of(headers: Mapping[str, str]) -> int:
    return int(headers.get("content-length", "0"))


def _written(text: str) -> float:
    """When a listing says that an object was written. ``StoreUnavailableError``: it does not."""
    try:
        return utc_seconds(datetime.fromisoformat(text))
    except ValueError:
        raise StoreUnavailableError("its server lists objects without their times") from None


def _each(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """The results in order; several at once."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(len(items), _AT_ONCE)) as threads:
        return list(threads.map(work, items))
