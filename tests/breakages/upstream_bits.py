"""What makes a bit that flips on the way from an upstream cost a mirror, go unseen, or leave no trace; each is noticed."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_FROM: Final = "tests/promises/test_corruption_from_upstreams.py"
_WIRE: Final = f"{_FROM}::test_a_bit_flipped_on_the_wire_costs_the_file_once_more_and_only_its_wrong_chunk_is_kept[s3]"
_SMALL: Final = f"{_FROM}::test_a_bit_flipped_in_one_small_file_costs_that_file_once_more[gs]"
_TWICE: Final = f"{_FROM}::test_what_comes_wrong_twice_is_never_published_and_ends_with_the_name_of_the_file"
_REPAIR: Final = f"{_FROM}::test_a_bit_flipped_while_a_damaged_chunk_is_repaired_costs_that_range_once_more"


def _breakage(file: str, what: str, old: str, new: str, test: str) -> Breakage:
    return Breakage("corruption", file, what, old, new, test)


BREAKAGES: Final = [
    _breakage(
        "bdn/mirror/ingest/copy_missing.py",
        "a file that came wrong once fails its mirror",
        "            evidence = await self._quarantine(file, error)\n",
        "            evidence = await self._quarantine(file, error)\n            raise\n",
        _WIRE,
    ),
    _breakage(
        "bdn/mirror/ingest/copy_missing.py",
        "right chunks of a file that came wrong are kept as evidence",
        "        await self.progress.narrow(evidence, layout)\n",
        "",
        _WIRE,
    ),
    _breakage(
        "bdn/transfer/checksums.py",
        "checksums of parts are never compared with the whole's",
        "check_equal(self._expected, cyclic.format(whole), subject)",
        "check_equal(self._expected, self._expected.hex, subject)",
        f"{_TWICE}[model.safetensors-gs]",
    ),
    _breakage(
        "bdn/mirror/upstream/reader.py",
        "a small file that came wrong once fails its mirror",
        "                if left[0] is wrong:",
        "                if left[0] is not wrong:",
        _SMALL,
    ),
    _breakage(
        "bdn/mirror/ingest/copier.py",
        "what came wrong of a small file is forgotten",
        "            await on_wrong(located, digest, error)\n",
        "",
        _SMALL,
    ),
    _breakage(
        "bdn/mirror/scrub/from_upstream.py",
        "a repair takes one wrong answer for a changed upstream",
        "await self.reader.read([wanted], on_wrong=once_more)",
        "await self.reader.read([wanted])",
        _REPAIR,
    ),
]
