"""Ways to break the promise `commit-order`."""

# fmt: off
BREAKAGES: dict[str, list[tuple[str, ...]]] = {
    "bdn/mirror/db/mirrors.py": [
        ("the claims of a killed mirror are never given back", "claimed_by=None, claim_expires_at=None",
         "claim_expires_at=9e12", "test_whatever_is_killed_when_readers_see_whole_files_alone_and_all_ends_well"),
    ],
    "bdn/store/opener.py": [
        ("what a killed mirror was writing stays", "store.clear_incoming()", "pass",
         "test_a_mirror_killed_at_any_step_keeps_its_word"),
    ],
    "bdn/store/directory.py": [
        ("a chunk's name comes before its bytes are durable", "            os.fdatasync(file.descriptor)\n", "",
         "test_a_mirror_that_lost_power_at_any_step_keeps_every_mirror_that_was_ready"),
        ("a chunk is written under its name",
         ("self._write_synced(partial, content)\n                self._make_fanout(target.parent)\n"
          "                with suppress(PermissionError):  # nobody can look at it, and it may have been right\n"
          "                    self._quarantine_if_wrong(target, digest)\n                partial.rename(target)"),
         "self._make_fanout(target.parent)\n                self._write_synced(target, content)",
         "test_a_mirror_killed_at_any_step_keeps_its_word"),
    ],
    "node_agent/cache/records.py": [
        ("an eviction removes the record last",
         ("self.records.forget(victim.manifest)\n            for content in victim.contents:\n"
          "                for path in (self.places.file(content), self.places.part(content), "
          "self.places.bitmap(content)):\n                    with disk_errors(path):\n"
          "                        path.unlink(missing_ok=True)"),
         ("for content in victim.contents:\n"
          "                for path in (self.places.file(content), self.places.part(content), "
          "self.places.bitmap(content)):\n                    with disk_errors(path):\n"
          "                        path.unlink(missing_ok=True)\n            self.records.forget(victim.manifest)"),
         "test_an_eviction_killed_at_any_step_is_all_or_nothing_and_leases_hold"),
        ("an eviction removes contents before the record", "self.records.forget(victim.manifest)\n            for",
         "for", "test_ten_thousand_kills_lose_nothing_acknowledged_and_show_nothing_wrong"),
    ],
    "node_agent/cache/tiers.py": [
        ("what a killed eviction left is not removed",
         "self._remove(path)  # nobody names it: an eviction was interrupted", "pass",
         "test_an_eviction_killed_at_any_step_is_all_or_nothing_and_leases_hold"),
    ],
    "node_agent/job/volumes.py": [
        ("a job volume is not written down", "            _save(volume.folder, volume.record)\n", "",
         "test_an_agent_killed_at_any_step_keeps_volumes_whole_or_leaves_nothing"),
        ("what a killed agent had ended is open again", "record.ended_at is not None or ", "",
         "test_an_agent_killed_at_any_step_keeps_volumes_whole_or_leaves_nothing"),
    ],
    "node_agent/fill/part.py": [
        ("a file's name comes before its bytes are durable", "            self._sync(os.fsync)\n", "",
         "test_an_agent_that_lost_power_has_all_that_was_ready"),
        ("packed files appear before they are durable",
         "        await self._sync.sync([root + temporary_name(file.digest) for file in self.files], self._mark)\n", "",
         "test_an_agent_that_lost_power_has_all_that_was_ready"),
        ("a part is taken for whole before its bytes are there",
         ("def write(self, chunk: PlacedChunk, buffer: memoryview) -> None:\n"
          '        """Put a verified chunk at its place. Durable with its batch, at the latest with ``close``."""\n'
          "        with disk_errors(self._path):"),
         ("def write(self, chunk: PlacedChunk, buffer: memoryview) -> None:\n"
          '        """Put a verified chunk at its place. Durable with its batch, at the latest with ``close``."""\n'
          "        with disk_errors(self._path):\n"
          "            self._places.file(self.layout.digest).unlink(missing_ok=True)\n"
          "            os.link(self._path, self._places.file(self.layout.digest))"),
         "test_ten_thousand_kills_lose_nothing_acknowledged_and_show_nothing_wrong"),
    ],
}
