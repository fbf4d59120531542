"""What lets wrong records of the mirror's database go unseen, be served, or cost more than they must; each is noticed."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_RECORDS: Final = "tests/promises/test_corruption_in_the_store.py"
_SCRUB: Final = f"{_RECORDS}::test_the_scrub_finds_a_damaged_record_within_its_period"
_READ: Final = f"{_RECORDS}::test_who_reads_a_damaged_record_is_refused_and_a_verification_names_it"
_AGAIN: Final = f"{_RECORDS}::test_without_a_backup_what_has_a_damaged_record_is_evicted_collected_and_mirrored_again"


def _breakage(file: str, what: str, old: str, new: str, test: str) -> Breakage:
    return Breakage("corruption", file, what, old, new, test)


BREAKAGES: Final = [
    _breakage(
        "bdn/mirror/scrub/reading.py",
        "the scrub tells nobody of wrong records",
        "                await self.damaged_records.tell(record, wrong)\n",
        "                pass\n",
        _SCRUB,
    ),
    _breakage(
        "bdn/mirror/scrub/reading.py",
        "a record that was restored counts as damaged for ever",
        "            await self.damaged_records.check_again()\n",
        "            pass\n",
        _SCRUB,
    ),
    _breakage(
        "bdn/core/store/damage.py",
        "the record of a file is believed when it has as many chunks as the file",
        "return None if file_digest(size, names) == digest else",
        "return None if names else",
        _READ,
    ),
    _breakage(
        "bdn/mirror/api/contents.py",
        "a manifest is served that its name does not fit",
        "    if fault := await asyncio.to_thread(manifest_fault, name, row.canonical):",
        "    if fault := None:",
        _READ,
    ),
    _breakage(
        "bdn/mirror/db/layouts.py",
        "a layout says what a wrong record says",
        "    check_contents(contents)\n",
        "",
        _READ,
    ),
    _breakage(
        "bdn/mirror/db/objects.py",
        "chunks are blamed for what a wrong record says of them",
        "        if content_fault(Digest(digest), size, raw):",
        "        if False:",
        _SCRUB,
    ),
    _breakage(
        "bdn/mirror/db/removal.py",
        "what has a truncated record can never be collected",
        "split_digests(raw[: len(raw) - len(raw) % 32])",
        "split_digests(raw)",
        _AGAIN,
    ),
]
