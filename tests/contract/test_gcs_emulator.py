"""GcsSource keeps its contracts against gcp-storage-emulator too, which nobody here wrote.

What the emulator does otherwise than GCS is skipped here, fact by fact, and shown against the strict double instead.
"""

from collections.abc import Iterator
from itertools import count

import pytest

from bdn.core.source.upstream import Checksum, ChecksumKind
from tests.contract.bucket_contract import Bucket, BucketContract
from tests.contract.source_contract import CONTENT, SourceContract, Upstream, listed
from tests.doubles.gcs_emulator import EmulatedBucket, GcsEmulator
from tests.support.mirror.gcs_sources import FolderUpstream, PrefixedBucket, Way

NUMBERS = count()


@pytest.fixture(scope="module")
def emulator() -> Iterator[GcsEmulator]:
    with GcsEmulator() as emulator:
        yield emulator


@pytest.fixture
def filled(emulator: GcsEmulator) -> EmulatedBucket:
    return emulator.bucket(f"emulated-{next(NUMBERS)}")


class EmulatorContract(SourceContract):
    async def test_a_range_behind_the_end_is_refused(self) -> None:  # type: ignore[override]
        pytest.skip("the emulator answers 206 without bytes instead of 416")

    async def test_the_old_location_of_a_replaced_file_never_answers_with_new_bytes(self) -> None:  # type: ignore[override]
        pytest.skip("the emulator ignores the generation that is asked for")

    @pytest.mark.parametrize("path", ["back\\slash", "nul\0byte", "x" * 300])
    async def test_a_path_that_must_not_become_a_file_is_the_source_s_error(
        self, upstream: Upstream, path: str
    ) -> None:
        """Without those with "..", which the emulator's own file system refuses to hold."""
        await super().test_a_path_that_must_not_become_a_file_is_the_source_s_error(upstream, path)


class TestFolder(EmulatorContract):
    @pytest.fixture
    def upstream(self, emulator: GcsEmulator, filled: EmulatedBucket) -> Upstream:
        return FolderUpstream(Way(emulator.url), filled, "models/a b+c%/")


class TestWholeBucket(EmulatorContract):
    @pytest.fixture
    def upstream(self, emulator: GcsEmulator, filled: EmulatedBucket) -> Upstream:
        return FolderUpstream(Way(emulator.url), filled)


class TestBucket(BucketContract):
    @pytest.fixture
    def bucket(self, emulator: GcsEmulator, filled: EmulatedBucket) -> Bucket:
        return PrefixedBucket(Way(emulator.url), filled)

    async def test_every_page_of_a_long_listing_is_read(self) -> None:  # type: ignore[override]
        pytest.skip("the emulator has no pages: it ignores maxResults")


async def test_the_emulator_s_own_crc32c_is_the_checksum(emulator: GcsEmulator, filled: EmulatedBucket) -> None:
    filled.put({"a.bin": bytes(32), "b.bin": CONTENT})
    async with Way(emulator.url).open(f"gs://{filled.name}") as source:
        files = await listed(source)
    assert files["a.bin"].checksum == Checksum(ChecksumKind.CRC32C, "8a9136aa")
    assert files["a.bin"].version != files["b.bin"].version
