"""What lets the mirror's store keep, serve or count on wrong bytes; each is noticed."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_STORE: Final = "tests/promises/test_corruption_in_the_store.py"
_BETWEEN: Final = "tests/promises/test_corruption_from_upstreams.py"
_SCRUB: Final = (
    f"{_STORE}::test_the_scrub_finds_every_damage_within_its_period_and_only_the_damaged_bytes_are_read_again"
)
_VERIFY: Final = f"{_STORE}::test_a_verification_finds_every_damage_and_says_what_became_of_it"
_LOOKED: Final = (
    f"{_STORE}::test_what_was_only_looked_for_is_not_served_and_is_fetched_by_the_next_mirror_of_the_source"
)
_NEVER: Final = f"{_STORE}::test_a_mirror_is_never_ready_that_counts_on_a_damaged_chunk"
_STAGE: Final = (
    f"{_BETWEEN}::test_a_stage_that_gets_wrong_bytes_makes_the_mirror_look_and_another_agent_s_copy_mends_it"
)
_KILLED: Final = f"{_BETWEEN}::test_a_mirror_killed_between_the_steps_of_a_repair_goes_on_with_it"
_EVICTED: Final = f"{_BETWEEN}::test_what_an_eviction_takes_while_it_is_verified_is_not_called_damaged"
_TWO: Final = f"{_BETWEEN}::test_of_two_processes_one_reads_the_store_and_the_other_takes_over_where_it_was"
_FOLDER: Final = (
    f"{_STORE}::test_a_folder_that_the_disk_has_made_a_file_of_costs_what_was_in_it_and_keeps_nobody_from_anything_else"
)


def _breakage(file: str, what: str, old: str, new: str, test: str, also: tuple[str, ...] = ()) -> Breakage:
    return Breakage("corruption", file, what, old, new, test, also)


BREAKAGES: Final = [
    _breakage(
        "bdn/store/directory.py",
        "the store believes a chunk's size",
        "if actual == digest else",
        "if size else",
        _VERIFY,
    ),
    _breakage(
        "bdn/store/directory.py",
        "a sector that cannot be read is nobody's fault",
        "if error.errno not in _UNREADABLE:",
        "if error.errno:",
        "tests/unit/store/test_directory_damage.py::test_every_damage_is_a_fault_and_only_a_wrong_file_is_evidence",
    ),
    _breakage(
        "bdn/store/directory.py",
        "a chunk is put over a wrong one, which stays",
        "return self.keep(digest) and not is_wrong(target, digest)",
        "return self.keep(digest)",
        "tests/unit/store/test_directory_damage.py::test_putting_a_chunk_over_a_wrong_one_replaces_it",
    ),
    _breakage(
        "bdn/core/pace/rounds.py",
        "a store is scrubbed once in its life",
        "return began is None or not began <= now < began + period_seconds",
        "return began is None",
        _SCRUB,
    ),
    _breakage(
        "bdn/mirror/damages.py",
        "wrong bytes stay where readers find them",
        "await asyncio.to_thread(self.store.set_aside, digest)",
        "pass",
        _LOOKED,
    ),
    _breakage(
        "bdn/mirror/damages.py",
        "what an eviction took is called damaged",
        "return None  # an eviction took it",
        "return fault",
        _EVICTED,
    ),
    _breakage(
        "bdn/mirror/scrub/from_upstream.py",
        "the whole file is read for one chunk",
        "ByteRange(piece.start, piece.start + piece.size), accept)",
        "ByteRange(0, piece.content_size), accept)",
        _VERIFY,
    ),
    _breakage(
        "bdn/mirror/scrub/repair.py",
        "what comes for a damaged chunk is believed",
        "if digest_of(self.place(piece)) != piece.name:",
        "if not self.place(piece):",
        f"{_STORE}::test_an_upstream_that_has_changed_does_not_repair_and_is_mirrored_as_new",
    ),
    _breakage(
        "bdn/mirror/ingest/worker.py",
        "a damaged manifest is recalled",
        'if is_same and not await damaged.is_lost(session, row.manifest or "", organisation):',
        "if is_same:",
        _NEVER,
    ),
    _breakage(
        "bdn/mirror/ingest/survey.py",
        "a survey counts on damaged contents",
        "known = await damaged.without_lost(session, files, await contents.known(session, keys))",
        "known = await contents.known(session, keys)",
        _LOOKED,
    ),
    _breakage(
        "bdn/mirror/db/damaged.py",
        "of a file with a damaged chunk everything is fetched again",
        "found[key] = {index: chunk for index, chunk in chunks.items() if chunk.hex != damaged}",
        "found[key] = {}",
        _LOOKED,
    ),
    _breakage(
        "bdn/mirror/scrub/from_agents.py",
        "agents are not asked",
        "        if living:\n",
        "        if not living:\n",
        _STAGE,
    ),
    _breakage(
        "bdn/mirror/served_chunks.py",
        "a reader's suspicion is not heard",
        "            self._wait_for(self.damages.examine(request.digest))",
        "            pass",
        _STAGE,
    ),
    _breakage(
        "bdn/mirror/served_chunks.py",
        "a suspicion is not heard on the other plane",
        "            await self.damages.examine(request.digest)",
        "            pass",
        f"{_STORE}::test_who_suspects_a_chunk_of_the_api_is_not_given_it_before_it_was_read_and_found_right",
    ),
    _breakage(
        "bdn/store/directory.py",
        "a folder that cannot be looked into makes the store one that is away",
        "                self._check_is_open()  #",
        "                (self._chunks / digest.fanout).lstat()  #",
        f"{_FOLDER}[folder]",
        also=(f"{_FOLDER}[folder above]",),
    ),
    _breakage(
        "bdn/store/directory.py",
        "a folder that is none is nobody's fault",
        " | {errno.ENOTDIR}",
        "",
        f"{_FOLDER}[folder]",
    ),
    _breakage(
        "bdn/store/directory.py",
        "a folder that was there once is there",
        "if one not in self._durable or not one.is_dir():",
        "if one not in self._durable:",
        f"{_FOLDER}[folder]",
        also=(f"{_FOLDER}[folder above]",),
    ),
    _breakage(
        "bdn/mirror/damages.py",
        "a damaged chunk that cannot be looked at fails every mirror",
        "        except StoreUnavailableError:\n            return False\n",
        "        except StoreUnavailableError:\n            raise\n",
        f"{_STORE}::test_a_damaged_chunk_that_cannot_be_looked_at_again_keeps_no_other_mirror_from_being_ready",
    ),
    _breakage(
        "bdn/mirror/scrub/store_verification.py",
        "a verification that was killed is forgotten",
        'rows = await operations.open_of_mirror(session, "verification")',
        'rows = [row for row in await operations.open_of_mirror(session, "verification") if not row.created_at]',
        _KILLED,
    ),
    _breakage(
        "bdn/mirror/scrub/rounds.py",
        "every process reads the store",
        'async with self.database.alone("store keeper"):',
        "async with self.database.alone(str(id(self))):",
        _TWO,
    ),
    _breakage(
        "bdn/mirror/scrub/store_verification.py",
        "who hears not of all damage hears nothing of that",
        "                    mine.error = too_many.model_dump()",
        "                    pass",
        f"{_STORE}::test_more_than_is_listed_is_repaired_all_the_same_and_the_verification_says_that_it_told_not_all",
    ),
    _breakage(
        "bdn/store/directory.py",
        "a chunk that cannot be opened makes the store one that is away",
        "                return unreadable(error.__cause__)\n",
        "                raise\n",
        f"{_STORE}::test_a_chunk_that_may_not_be_read_is_told_and_repaired_and_the_scrub_goes_on",
    ),
    _breakage(
        "bdn/mirror/damages.py",
        "a wrong chunk that cannot be moved ends the scrub's part",
        "            # Nobody may touch it.",
        "            raise  #",
        f"{_STORE}::test_a_chunk_that_nobody_may_touch_keeps_neither_the_scrub_nor_a_verification_from_what_stands_behind_it",
    ),
    _breakage(
        "bdn/mirror/scrub/repair.py",
        "a chunk that cannot be replaced ends the verification's part",
        "            await self.damages.examine(digest)  #",
        "            raise  #",
        f"{_STORE}::test_a_chunk_that_nobody_may_touch_keeps_neither_the_scrub_nor_a_verification_from_what_stands_behind_it",
    ),
    _breakage(
        "bdn/mirror/scrub/rounds.py",
        "repairs wait for the end of verifications",
        "        has_repaired = await self._repair_next()\n        has_verified = await self.verification.go_on()\n",
        "        has_verified = await self.verification.go_on()\n"
        "        has_repaired = not has_verified and await self._repair_next()\n",
        f"{_STORE}::test_a_repair_does_not_wait_for_the_end_of_a_verification",
    ),
]
