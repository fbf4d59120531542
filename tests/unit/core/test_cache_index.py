"""Examples of the index of each tier, and what the machines in ``tests/property`` do not try against their models."""

from collections.abc import Mapping

import pytest

from bdn.core.cache.index import CacheIndex
from bdn.core.chunk import Digest
from bdn.core.errors import CacheFullError
from tests.support.agent.cache import at_once
from tests.support.content.names import named, sizes, stage

M, N, P = (named(word) for word in ("M", "N", "P"))
A, B, C, D = (named(word) for word in "abcd")


def held(*manifests: tuple[Digest, Mapping[Digest, int]]) -> CacheIndex:
    """Whole manifests that nobody leases, used in this order."""
    index = CacheIndex()
    for at, (manifest, contents) in enumerate(manifests):
        index.restore(manifest, contents, dict.fromkeys(contents, True), last_used=at)
    return index


def test_a_manifest_may_be_complete_but_for_one_content() -> None:
    index = CacheIndex()
    at_once(index.admitting(M, sizes(a=3, b=4), stage("s"), now=1, budget=7))
    assert not index.is_complete_but_for(M, A)
    index.commit(B)
    index.commit(B)
    assert index.is_complete_but_for(M, A)
    assert not index.is_complete_but_for(M, B)  # it is there
    assert not index.is_complete_but_for(M, C)  # it is not one of its contents
    assert not index.is_complete_but_for(N, A)
    index.commit(A)
    assert index.is_complete(M)
    with pytest.raises(KeyError):
        index.commit(C)


def test_where_inodes_are_short_files_are_evicted_for_them_and_the_error_says_how_many_lack() -> None:
    index = held((M, sizes(a=1, b=1)), (N, sizes(c=1)))
    admission = at_once(index.admitting(P, sizes(d=1, e=1, f=1), stage("s"), now=3, budget=100, free_files=1))
    assert [victim.manifest for victim in admission.victims] == [M]
    index.leases.take(N, stage("s"))
    with pytest.raises(CacheFullError, match="2 more files do not fit now: the file system has inodes for 0") as caught:
        at_once(index.admitting(M, sizes(a=1, g=0), stage("s"), now=3, budget=100, free_files=0))
    assert (caught.value.needed_files, caught.value.free_files) == (2, 0)
    assert index.manifests() == (N, P)
