"""Ways to lose what somebody needs, or to keep what nobody does."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_PROMISE: Final = "collection"
_STEPS: Final = (
    "tests/promises/test_collection.py::test_at_each_step_of_a_collection_others_may_do_anything_and_it_may_be_killed"
)
_LONG: Final = (
    "tests/promises/test_collection.py::test_a_copy_that_takes_longer_than_the_grace_loses_nothing_at_any_of_its_steps"
)
_ANY_ORDER: Final = (
    "tests/promises/test_collection.py"
    "::test_whatever_happens_in_whatever_order_nothing_that_is_named_goes_and_nothing_else_stays"
)
_KILLED: Final = (
    "tests/fault/test_mirror_killed.py"
    "::test_a_mirror_that_is_killed_while_it_collects_loses_nothing_that_it_said_was_ready"
)
_TWO_WORKERS: Final = (
    "tests/integration/test_mirror_postgres.py"
    "::test_two_workers_that_collect_and_mirror_at_once_lose_nothing_and_leave_nothing"
)
_ROBBED: Final = (
    "tests/integration/test_mirror_postgres.py"
    "::test_an_eviction_never_robs_a_mirror_that_publishes_after_its_look_at_who_is_at_work"
)
_DAMAGED: Final = (
    "tests/promises/test_collection.py::test_a_slab_whose_files_lie_damaged_elsewhere_stays_for_whoever_needs_them"
)
_STANDS_IN: Final = (
    "tests/unit/core/test_slab_needs.py"
    "::test_a_damaged_slab_does_not_stand_in_and_nobody_needs_it_where_another_one_does"
)
_PACKED: Final = "tests/integration/test_mirror_packing.py::"
_RESTORING: Final = "tests/promises/test_restoring.py::"
_COLLECTOR: Final = "bdn/mirror/retention/collector.py"
_TOMBSTONES: Final = "bdn/mirror/db/tombstones.py"
_STORE: Final = "bdn/store/directory.py"

BREAKAGES: Final = [
    Breakage(
        _PROMISE,
        "bdn/mirror/retention/store_eviction.py",
        "mirrors publish while an eviction looks at what they have published",
        "                    await mirrors.hold_claims(session)",
        "                    pass",
        _ROBBED,
    ),
    Breakage(
        _PROMISE,
        _STORE,
        "a chunk that lies aside is deleted without a second look",
        "            if self._kept_at(aside) == chunk.kept_at:",
        "            if self._kept_at(aside):",
        _STEPS,
    ),
    Breakage(
        _PROMISE,
        _STORE,
        "who finds a chunk does not say that he counts on it",
        "                os.utime(self._chunks / digest.fanout, (now, now))",
        "                os.stat(self._chunks / digest.fanout)",
        "tests/contract/test_directory_store.py::TestDirectoryStore::test_what_was_put_or_kept_since_it_was_seen_is_not_collected",
    ),
    Breakage(
        _PROMISE,
        _STORE,
        "what a crash left aside stays there",
        '                self._put_back(path, self._chunks / Digest(path.name.partition("-")[0]).fanout)',
        "                pass",
        "tests/unit/store/test_directory_collecting.py"
        "::test_a_chunk_that_a_crash_left_aside_can_be_read_and_is_put_back_by_who_opens_the_store",
    ),
    Breakage(
        _PROMISE,
        "bdn/mirror/ingest/copy_missing.py",
        "chunks of an earlier attempt are not kept",
        "for index, digest in recorded.items() if self.store.keep(digest)}",
        "for index, digest in recorded.items()}",
        "tests/unit/mirror/test_copy_missing.py::test_a_half_copied_file_that_is_gone_on_with_is_as_good_as_new",
    ),
    Breakage(
        _PROMISE,
        "bdn/mirror/ingest/copy_missing.py",
        "a complete file is counted on without being kept",
        "        return found if found is not None and await self.keep(found) else None",
        "        return found",
        "tests/unit/mirror/test_copy_missing.py::test_what_is_recorded_and_gone_from_the_store_is_brought_again",
    ),
    Breakage(
        _PROMISE,
        "bdn/core/store/collection.py",
        "mirrors that run protect nothing",
        "return latest if oldest_at_work is None else min(latest, oldest_at_work - CLOCKS_SECONDS)",
        "return latest",
        _LONG,
    ),
    Breakage(
        _PROMISE,
        "bdn/core/store/collection.py",
        "there is no grace",
        "latest = now - grace_seconds",
        "latest = now",
        "tests/unit/core/test_collection.py::test_only_what_is_older_than_the_grace_may_go",
    ),
    Breakage(
        _PROMISE,
        _COLLECTOR,
        "chunks that others name go, too",
        "        unnamed = (chunk for chunk in look.seen if chunk.digest.to_bytes() not in look.named)",
        "        unnamed = (chunk for chunk in look.seen)",
        _STEPS,
        ("tests/promises/test_collection.py::test_who_goes_on_with_a_failed_copy_while_it_is_collected_loses_nothing",),
    ),
    Breakage(
        _PROMISE,
        _COLLECTOR,
        "a dry run deletes",
        "            remove: Remove = _pretend if dry_run else self.store.collect",
        "            remove: Remove = self.store.collect",
        "tests/promises/test_collection.py::test_what_is_planned_in_a_dry_run_is_of_every_kind",
    ),
    Breakage(
        _PROMISE,
        "bdn/mirror/db/database.py",
        "a rehearsal is not taken back",
        "                await session.rollback()",
        "                pass",
        "tests/promises/test_collection.py::test_what_is_planned_in_a_dry_run_is_of_every_kind",
    ),
    Breakage(
        _PROMISE,
        _TOMBSTONES,
        "one organisation's eviction takes from all",
        "        .where(source.manifest == manifest, tombstone.manifest.is_(None))",
        "        .where(source.manifest == manifest, tombstone.manifest.is_(None), ~exists().where(TombstoneRow.manifest == manifest))",
        _RESTORING + "test_an_eviction_takes_nothing_from_another_organisation",
    ),
    Breakage(
        _PROMISE,
        _TOMBSTONES,
        "a tombstone is collected before its time",
        "        joined = and_(joined, tombstone.created_at <= before)",
        "        joined = and_(joined)",
        _RESTORING + "test_it_can_be_restored_until_it_is_collected_after_seven_days",
    ),
    Breakage(
        _PROMISE,
        _TOMBSTONES,
        "what is given up is still read",
        "    return exists().where(TombstoneRow.organisation == organisation, TombstoneRow.manifest == manifest)",
        '    return exists().where(TombstoneRow.organisation == "", TombstoneRow.manifest == manifest)',
        _RESTORING + "test_what_was_evicted_is_not_there_until_it_is_restored",
    ),
    Breakage(
        _PROMISE,
        _TOMBSTONES,
        "what was collected is restored",
        "                TombstoneRow.collected_at.is_(None),\n            )\n            .returning",
        "            )\n            .returning",
        _RESTORING + "test_what_somebody_else_mirrors_after_it_was_collected_is_still_given_up",
    ),
    Breakage(
        _PROMISE,
        "bdn/mirror/db/contents.py",
        "mirroring it again does not bring it back",
        "    await tombstones.lift(session, organisation, manifest.digest.hex)",
        "    await session.flush()",
        _RESTORING + "test_mirroring_it_again_brings_it_back_and_moves_no_bytes",
    ),
    Breakage(
        _PROMISE,
        "bdn/mirror/db/removal.py",
        "contents that other manifests name go with the first",
        "~exists().where(other.content == ManifestContentRow.content, other.manifest != manifest),",
        '~exists().where(other.content == ManifestContentRow.content, other.manifest == ""),',
        _STEPS,
        (
            _ANY_ORDER,
            _KILLED,
            _TWO_WORKERS,
        ),
    ),
    Breakage(
        _PROMISE,
        "bdn/mirror/operations/collections.py",
        "what a killed worker had begun is forgotten",
        "asked = await operations.open_of_mirror(session, COLLECTION.name)",
        "asked = (await operations.open_of_mirror(session, COLLECTION.name))[1:]",
        _RESTORING + "test_a_collection_comes_round_by_itself_and_what_a_killed_worker_had_begun_is_carried_out",
    ),
    Breakage(
        _PROMISE,
        _STORE,
        "what a crash left aside takes the place of what was put since, with its older time",
        "                target.hardlink_to(aside)\n",
        "                aside.replace(target)\n",
        "tests/unit/store/test_directory_collecting.py"
        "::test_what_a_crash_left_aside_does_not_take_the_place_of_what_was_put_since",
    ),
    Breakage(
        _PROMISE,
        "bdn/mirror/db/operations.py",
        "a dry run counts as the collection that was due",
        ' == "collection", is_real, ',
        ' == "collection", ',
        _RESTORING + "test_asking_what_would_go_does_not_put_off_the_collection_that_is_due",
    ),
    Breakage(
        "corruption",
        "bdn/mirror/db/removal.py",
        "a collection believes a damaged record, and takes the chunks that it should name",
        "    check_contents(contents)\n",
        "",
        "tests/promises/test_corruption_in_the_store.py"
        "::test_no_chunk_is_collected_while_a_record_is_damaged_that_may_need_it",
    ),
    Breakage(
        _PROMISE,
        "bdn/mirror/db/operations.py",
        "collections from before the clock was set back count as the newest",
        ", OperationRow.created_at <= now",
        "",
        _RESTORING + "test_a_clock_that_was_set_back_puts_off_no_collection",
    ),
    Breakage(
        _PROMISE,
        "bdn/mirror/operations/collections.py",
        "a clock that was set back puts the next collection off",
        "is_round_due(since, self.period_seconds, now)",
        "bool(self.period_seconds) and now - since >= self.period_seconds",
        _RESTORING + "test_a_clock_that_was_set_back_puts_off_no_collection",
    ),
    Breakage(
        _PROMISE,
        "bdn/mirror/operations/collections.py",
        "a bug in a collection ends the mirror, now and at each start",
        "        except Exception as error:\n",
        "        except MemoryError as error:\n",
        _RESTORING + "test_a_collection_that_fails_for_a_bug_has_failed_and_the_mirror_goes_on",
    ),
    Breakage(
        _PROMISE,
        "bdn/core/store/slabs.py",
        "a slab goes whose contents lie in a damaged one as well",
        "self._slabs[content] - self._damaged - dropped",
        "self._slabs[content] - dropped",
        _DAMAGED,
        (
            "tests/property/test_slab_needs.py::test_what_stays_can_be_read_and_what_nobody_needs_goes",
            _STANDS_IN,
        ),
    ),
    Breakage(
        _PROMISE,
        "bdn/mirror/db/removal.py",
        "a collection does not hear which slabs are damaged",
        "            needs.add_damaged(slab)\n",
        "            pass\n",
        _DAMAGED,
        (_PACKED + "test_a_slab_of_which_what_stays_lies_damaged_elsewhere_stays_with_it[sqlite]",),
    ),
    Breakage(
        _PROMISE,
        "bdn/mirror/db/removal.py",
        "a slab goes whose contents have damaged chunks of their own",
        'ContentRow.chunks != b"", chunks_are_sound())\n',
        'ContentRow.chunks != b"")\n',
        _PACKED + "test_a_slab_stays_with_what_is_whole_by_itself_and_damaged[sqlite]",
    ),
]
