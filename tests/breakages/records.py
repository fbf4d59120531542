"""What lets wrong records of the mirror's database go unseen, be served, or cost more than they must; each is noticed."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_RECORDS: Final = "tests/promises/test_corruption_of_records.py"
_SCRUB: Final = f"{_RECORDS}::test_the_scrub_finds_a_damaged_record_within_its_period_and_writes_it_right_again"
_VERIFY: Final = f"{_RECORDS}::test_a_verification_finds_a_damaged_record_and_only_looks_when_that_was_asked"
_READ: Final = f"{_RECORDS}::test_who_reads_a_damaged_record_is_refused_until_it_is_repaired_and_nobody_gets_it"


def _breakage(file: str, what: str, old: str, new: str, test: str) -> Breakage:
    return Breakage("corruption", file, what, old, new, test)


BREAKAGES: Final = [
    _breakage(
        "bdn/mirror/scrub/rounds.py",
        "the scrub tells nobody of wrong records",
        "            self.mending.suspects.add(record, fault)\n",
        "            pass\n",
        f"{_SCRUB}[one-zeroed]",
    ),
    _breakage(
        "bdn/core/store/damage.py",
        "the record of a file is believed when it has as many chunks as the file",
        "return None if file_digest(size, names) == digest else",
        "return None if names else",
        f"{_VERIFY}[large]",
    ),
    _breakage(
        "bdn/mirror/api/contents.py",
        "a manifest is served that its name does not fit",
        "    await _check(service, name, row.canonical)\n",
        "",
        f"{_READ}[manifest]",
    ),
    _breakage(
        "bdn/mirror/db/layouts.py",
        "a layout says what a wrong record says",
        "        if fault := content_fault(Digest(digest), size, chunks):",
        "        if (fault := content_fault(Digest(digest), size, chunks)) and not size:",
        f"{_READ}[large]",
    ),
    _breakage(
        "bdn/mirror/db/objects.py",
        "chunks are blamed for what a wrong record says of them",
        "        if content_fault(Digest(digest), size, raw):",
        "        if False:",
        f"{_VERIFY}[large]",
    ),
    _breakage(
        "bdn/mirror/scrub/record_mending.py",
        "a wrong record leaves no evidence",
        "            await self._keep(record, *found)\n",
        "",
        f"{_READ}[large]",
    ),
    _breakage(
        "bdn/mirror/scrub/record_sources.py",
        "agents are not asked for records",
        "        if not mirrored:\n",
        "        if mirrored:\n",
        f"{_RECORDS}::test_a_record_that_an_agent_holds_is_asked_of_it_and_not_of_the_upstream",
    ),
    _breakage(
        "bdn/mirror/scrub/record_sources.py",
        "of a file whose record is wrong everything is read again",
        "for half in (kept, {}):",
        "for half in ({}, kept):",
        f"{_SCRUB}[large-flipped]",
    ),
]
