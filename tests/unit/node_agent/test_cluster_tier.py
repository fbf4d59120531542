"""The cluster tier between threads, and over a restart."""

import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bdn.core.cache.index import EvictionReason, Victim
from bdn.core.chunk import Digest, digest_of
from bdn.core.errors import CacheFullError, DiskFailedError
from bdn.core.events import Event
from node_agent.cache.cache_events import CacheEvents, over_budget
from node_agent.cache.cluster_tier import IN_USE_SECONDS
from tests.fakes.clock import Clock
from tests.support.agent.cache import a_tier
from tests.support.content.names import named

M, N = named("m"), named("n")
BRINGERS = 3


def test_chunks_that_come_while_their_manifest_is_evicted_fail_neither_themselves_nor_the_eviction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A makes the manifest's folder; B deletes it; A must not find it gone, nor B find it filled again."""
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    tier, ended = a_tier(tmp_path, 1000), threading.Semaphore(0)
    interval = sys.getswitchinterval()

    def bring(number: int) -> None:
        try:
            for turn in range(200):
                content = f"{number} {turn % 50}".encode()
                tier.bring(M, digest_of(content), memoryview(content), lambda _: None)
        finally:
            ended.release()

    def evict() -> None:
        count = 0
        while count < BRINGERS:
            count += ended.acquire(blocking=False)
            tier.evict([M], None, "request", over_budget("cluster", 0, 0, 0))

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(BRINGERS + 1) as threads:
            working = [threads.submit(bring, number) for number in range(BRINGERS)] + [threads.submit(evict)]
            for one in working:
                one.result(60)
    finally:
        sys.setswitchinterval(interval)
    assert tier.ledger.used_bytes == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_was_read_last_goes_last_also_after_a_restart(tmp_path: Path) -> None:
    clock = Clock(time.time())  # folders bear the time of the disk as well
    tier = a_tier(tmp_path, 8, clock)
    for manifest, content in ((M, b"mmmm"), (N, b"nnnn")):
        assert tier.keep(manifest, digest_of(content), memoryview(content))
    clock.now += 100
    file = tier.open(digest_of(b"mmmm"))
    assert file is not None
    file.close()

    clock.now += 100
    tier = a_tier(tmp_path, 8, clock)
    assert list(tier.held()) == [N, M]
    assert tier.keep(named("new"), digest_of(b"new"), memoryview(b"new"))
    assert list(tier.held()) == [M, named("new")]


def test_a_manifest_whose_chunks_are_in_use_makes_no_room_and_the_chunk_is_not_read(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    tier = a_tier(tmp_path, 8, clock)
    assert tier.keep(M, digest_of(b"mmmmm"), memoryview(b"mmmmm"))
    clock.now += IN_USE_SECONDS - 0.01
    with pytest.raises(CacheFullError) as full:
        tier.bring(N, digest_of(b"nnnn"), memoryview(bytearray(4)), lambda _: pytest.fail("it was read"))
    assert tuple(full.value.details().values())[:4] == (4, 3, 5, 8)
    assert not tier.keep(N, digest_of(b"nnnn"), memoryview(b"nnnn"))
    assert list(tier.held()) == [M]
    clock.now += 0.01
    assert tier.keep(N, digest_of(b"nnnn"), memoryview(b"nnnn"))
    assert list(tier.held()) == [N]


def test_load__wrong_chunk_that_could_not_be_removed__is_removed_and_the_one_read_after_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(manifest: Digest, _: Digest) -> None:
        raise DiskFailedError(manifest.hex, "Read-only file system")

    tier, chunk = a_tier(tmp_path, 1000), digest_of(b"mmmm")
    assert tier.keep(M, chunk, memoryview(b"mmmm"))
    with monkeypatch.context() as patch:
        patch.setattr(tier.files, "remove", refuse)
        with pytest.raises(DiskFailedError):
            tier.lose(chunk)
    assert tier.keep(N, chunk, memoryview(b"mmmm"))
    for used, manifest in enumerate((M, N)):
        tier.files.touch(manifest, float(used))

    tier = a_tier(tmp_path, 1000)
    assert list(tier.held()) == [N]
    assert [path.parent.name for path in tmp_path.rglob(chunk.hex)] == [N.hex]
    assert tier.ledger.used_bytes == 4


def test_what_the_disk_does_not_delete_is_said_to_be_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Event] = []
    events = CacheEvents(lambda: None, lambda *evicted: gone.append(evicted), told.extend)
    gone: list[tuple[EvictionReason, Sequence[Victim]]] = []
    tier = a_tier(tmp_path, 1000, events=events)
    for manifest in (M, N):
        assert tier.keep(manifest, digest_of(manifest.hex.encode()), memoryview(manifest.hex.encode()))
    real = tier.files.remove

    def removing(manifest: Digest, chunk: Digest) -> None:
        if manifest == N:
            raise DiskFailedError(manifest.hex, "Read-only file system")
        real(manifest, chunk)

    monkeypatch.setattr(tier.files, "remove", removing)
    with pytest.raises(DiskFailedError):
        tier.evict([M, N], None, "request", over_budget("cluster", 0, 0, 0))
    assert list(tier.held()) == [N]
    assert [(one.kind, one.manifest) for one in told] == [("trimmed", str(M)), ("trimmed", str(N)), ("kept", str(N))]
    assert [(reason, [one.manifest for one in victims]) for reason, victims in gone] == [("request", [M])]


def test_a_chunk_that_cannot_be_removed_for_a_whole_file_s_sake_stays_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = a_tier(tmp_path, 1000)
    assert tier.keep(M, digest_of(b"mmmm"), memoryview(b"mmmm"))

    def refused(*_: object) -> None:
        raise DiskFailedError("chunk", "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(tier.files, "remove", refused)
        with pytest.raises(DiskFailedError):
            tier.drop(lambda _: True)
    assert tier.chunks_of(M) == {digest_of(b"mmmm")}
    assert tier.drop(lambda _: True) == 1
    assert not tier.held()
