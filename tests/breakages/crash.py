"""Breakages of the commit order, of what a power loss leaves, and of upgrades."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_POWER: Final = "tests/promises/test_power_loss.py"
_AGENT: Final = f"{_POWER}::test_an_agent_that_lost_power_at_any_step_has_whole_files_and_every_ready_stage"
_MIRROR: Final = f"{_POWER}::test_a_mirror_that_lost_power_at_any_step_keeps_every_mirror_that_was_ready"
_DETAILS: Final = "tests/promises/test_power_loss.py"
_BATCH: Final = f"{_DETAILS}::test_after_a_power_loss_a_fill_goes_on_from_the_last_batch"
_FAILED_SYNC: Final = f"{_DETAILS}::test_a_sync_that_failed_is_not_made_good_by_one_that_succeeds_afterwards"
_PULL: Final = f"{_DETAILS}::test_a_pulled_directory_stands_once_the_pull_has_ended"
_GROUP: Final = f"{_DETAILS}::test_many_small_files_are_durable_by_one_sync_of_the_file_system"
_SHORT: Final = f"{_DETAILS}::test_writes_that_are_cut_short_are_gone_on_with"
_STEPS: Final = "tests/promises/test_kills.py"
_AGENT_STEPS: Final = f"{_STEPS}::test_an_agent_killed_at_any_step_goes_on_and_readers_see_whole_files_alone"
_MIRROR_STEPS: Final = f"{_STEPS}::test_a_mirror_killed_at_any_step_goes_on_and_keeps_what_it_said"
_RANDOM: Final = (
    "tests/promises/test_kills.py::test_whatever_is_killed_when_readers_see_whole_files_alone_and_all_ends_well"
)
_UPGRADES: Final = "tests/promises/test_upgrades.py"

BREAKAGES: Final = [
    Breakage(
        "power-loss",
        "bdn/mirror/keys.py",
        "the key that signs grants is not synced",
        "            os.fsync(file.fileno())\n",
        "",
        _MIRROR,
    ),
    Breakage(
        "power-loss",
        "bdn/mirror/db/database.py",
        "commits are not synced",
        '"synchronous=FULL"',
        '"synchronous=OFF"',
        _MIRROR,
    ),
    Breakage(
        "commit-order",
        "bdn/store/directory.py",
        "a chunk's name comes before its bytes are durable",
        "            os.fdatasync(file.descriptor)\n",
        "",
        _MIRROR,
    ),
    Breakage(
        "power-loss",
        "node_agent/disk/places.py",
        "the folders of the cache are not synced",
        "            sync_folder(folder)\n",
        "            pass\n",
        _AGENT,
    ),
    Breakage(
        "commit-order",
        "node_agent/fill/part.py",
        "a file's name comes before its bytes are durable",
        "            self._sync(os.fsync)\n",
        "",
        _AGENT,
    ),
    Breakage(
        "power-loss",
        "node_agent/fill/part.py",
        "a file's name is not synced",
        "            sync_folder(target.parent)\n",
        "",
        _AGENT,
    ),
    Breakage(
        "commit-order",
        "node_agent/fill/part.py",
        "packed files appear before they are durable",
        "        await self._sync.sync([root + name_aside(file.digest) for file in self.files], self._mark)\n",
        "",
        _AGENT,
        also=(f"{_DETAILS}::test_a_file_system_that_could_not_write_back_fails_whoever_asked",),
    ),
    Breakage(
        "power-loss",
        "bdn/disk/durable.py",
        "records are renamed before they are durable",
        "                os.fsync(descriptor)\n",
        "                pass\n",
        _AGENT,
    ),
    Breakage(
        "power-loss",
        "node_agent/fill/part.py",
        "the record of durable chunks is not synced",
        "        os.fdatasync(self._bitmap_descriptor)\n",
        "",
        _BATCH,
    ),
    Breakage(
        "power-loss",
        "node_agent/fill/part.py",
        "the name of a part is not synced",
        "        sync_folder(self._path.parent)  # what is durable is found again only under its name\n",
        "",
        _BATCH,
    ),
    Breakage(
        "power-loss",
        "node_agent/fill/part.py",
        "a sync that failed is forgotten",
        "            self._is_suspect = True\n",
        "",
        _FAILED_SYNC,
    ),
    Breakage(
        "power-loss",
        "node_agent/stage/view/destination.py",
        "the folders of a pulled view are not synced",
        "                sync_folders(self.aside)\n",
        "",
        _PULL,
    ),
    Breakage(
        "power-loss",
        "node_agent/stage/view/destination.py",
        "the name of a pulled view is not synced",
        "                sync_folder(self.path.parent)\n",
        "",
        _PULL,
    ),
    Breakage(
        "power-loss",
        "node_agent/disk/group_sync.py",
        "the file system is not asked to sync",
        "                sync_file_system(self._descriptor)\n",
        "                pass\n",
        _GROUP,
    ),
    Breakage(
        "whole-files",
        "bdn/disk/durable.py",
        "a write that was cut short is taken for a whole one",
        "        content, offset = content[count:], offset + count\n",
        "        content, offset = content[len(content) :], offset + count\n",
        _SHORT,
    ),
    Breakage(
        "whole-files",
        "node_agent/stage/view/views.py",
        "a view is built where its job looks for it",
        'aside = root.with_name(f"{stage_id}{_BUILDING}")',
        "aside = root",
        _AGENT_STEPS,
    ),
    Breakage(
        "upgrades",
        "node_agent/disk/cache_directory.py",
        "every format is taken for ours",
        "    if found != FORMAT:\n",
        "    if found is None:\n",
        f"{_UPGRADES}::test_a_cache_of_an_unknown_format_is_refused_and_not_touched",
    ),
    Breakage(
        "upgrades",
        "node_agent/cache/scan.py",
        "files where the first version put them are not taken over",
        "            path.rename(place)\n\n    def _remove_old",
        "            path.unlink()\n\n    def _remove_old",
        f"{_UPGRADES}::test_a_cache_of_the_first_version_keeps_its_files_and_its_stages",
    ),
    Breakage(
        "upgrades",
        "bdn/mirror/db/database.py",
        "a schema that is not ours is worked on",
        "                if not await connection.run_sync(_upgrade):\n",
        "                if not await connection.run_sync(_upgrade) and not version:\n",
        f"{_UPGRADES}::test_a_database_of_a_later_version_is_refused_and_not_touched",
    ),
    Breakage(
        "upgrades",
        "migrations/versions/0006_tokens.py",
        "a migration drops what was there",
        "def upgrade() -> None:\n",
        'def upgrade() -> None:\n    op.execute("DELETE FROM manifests")\n',
        f"{_UPGRADES}::test_a_database_and_store_of_the_first_version_are_kept_whole",
    ),
    Breakage(
        "upgrades",
        "migrations/versions/0010_operations.py",
        "what was collected is forgotten",
        '{"kinds": row["kinds"]}',
        "{}",
        f"{_UPGRADES}::test_what_was_asked_before_operations_had_one_table_is_still_told",
    ),
    Breakage(
        "commit-order",
        "bdn/store/directory.py",
        "a chunk is written under its name",
        "                self._write_synced(partial, content)\n"
        "                self._make_fanout(target.parent)\n"
        "                with suppress(PermissionError):  # nobody can look at it, and it may have been right\n"
        "                    self._quarantine.move_if_wrong(target, digest)\n"
        "                partial.rename(target)\n",
        "                self._make_fanout(target.parent)\n                self._write_synced(target, content)\n",
        _MIRROR_STEPS,
    ),
    Breakage(
        "commit-order",
        "bdn/mirror/store_opener.py",
        "what a killed mirror was writing stays",
        "        store.clear_incoming()\n",
        "        pass\n",
        _MIRROR_STEPS,
    ),
    Breakage(
        "commit-order",
        "bdn/mirror/db/mirrors.py",
        "the claims of a killed mirror are never given back",
        "    await session.execute(statement.values(claimed_by=None, claim_expires_at=None))\n",
        "    await session.execute(statement.values(claim_expires_at=9e12))\n",
        _RANDOM,
    ),
]
