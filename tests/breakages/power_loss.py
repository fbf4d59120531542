"""Ways to break the promise `power-loss`."""

# fmt: off
BREAKAGES: dict[str, list[tuple[str, ...]]] = {
    "bdn/disk/durable.py": [
        ("the key that signs grants is not synced", "        file.flush()\n        os.fsync(file.fileno())\n", "",
         "test_a_mirror_that_lost_power_at_any_step_keeps_every_mirror_that_was_ready"),
        ("records are renamed before they are durable", "                os.fsync(descriptor)", "                pass",
         "test_an_agent_that_lost_power_has_all_that_was_ready", "test_what_was_written_durably_survives_every_power_loss"),
    ],
    "bdn/mirror/db/database.py": [
        ("commits are not synced", '"synchronous=FULL"', '"synchronous=OFF"',
         "test_a_mirror_that_lost_power_at_any_step_keeps_every_mirror_that_was_ready"),
    ],
    "node_agent/disk/group_sync.py": [
        ("the file system is not asked to sync", "sync_file_system(self._descriptor)", "True",
         "test_one_sync_serves_all_who_wait_and_nobody_who_came_while_it_ran_is_served_by_it"),
    ],
    "node_agent/disk/places.py": [
        ("the folders of the cache are not synced", "sync_folder(folder)", "pass",
         "test_an_agent_that_lost_power_has_all_that_was_ready"),
    ],
    "node_agent/fill/part.py": [
        ("a file's name is not synced", "            sync_folder(self._files.places.file(self.layout.digest).parent)\n", "",
         "test_an_agent_that_lost_power_has_all_that_was_ready"),
        ("the record of durable chunks is not synced", "        os.fdatasync(self._bitmap_descriptor)\n", "",
         "test_after_a_power_loss_a_fill_goes_on_from_the_last_batch"),
        ("the name of a part is not synced",
         "        sync_folder(self._path.parent)  # what is durable is found again only under its name\n", "",
         "test_after_a_power_loss_a_fill_goes_on_from_the_last_batch"),
        ("a sync that failed is forgotten", "            self._is_suspect = True\n", "",
         "test_after_a_sync_that_failed_nothing_more_is_recorded_however_well_later_ones_go"),
    ],
    "node_agent/job/journal.py": [
        ("that a checkpoint has settled is not synced", "                os.fsync(self._descriptor)", "                pass",
         "test_after_a_power_loss_what_had_settled_is_pushed_and_nothing_else"),
    ],
    "node_agent/job/syncing.py": [
        ("what had not settled is pushed after a power loss", "self._is_as_noted if is_after_restart else self._is_complete", "self._is_complete",
         "test_after_a_power_loss_what_had_settled_is_pushed_and_nothing_else"),
    ],
    "node_agent/job/tree.py": [
        ("what has settled is not synced", "                    os.fsync(descriptor)", "                    pass",
         "test_after_a_power_loss_what_had_settled_is_pushed_and_nothing_else"),
    ],
    "node_agent/job/volume_sync.py": [
        ("a volume goes before its last checkpoint is pushed", "not await self._again(self._to_the_end)", "False",
         "test_whatever_fails_while_a_job_writes_checkpoints_each_that_is_listed_is_one_that_it_left"),
    ],
    "node_agent/stage/view/destination.py": [
        ("the folders of a pulled view are not synced", "            sync_folders(self.aside)\n", "",
         "test_a_pulled_directory_stands_once_the_pull_has_ended"),
        ("the name of a pulled view is not synced", "            sync_folder(self.path.parent)\n", "",
         "test_a_pulled_directory_stands_once_the_pull_has_ended"),
    ],
}
