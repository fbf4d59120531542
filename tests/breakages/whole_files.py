"""Ways to break the promise `whole-files`."""

# fmt: off
BREAKAGES: dict[str, list[tuple[str, ...]]] = {
    "bdn/disk/durable.py": [
        ("a write that was cut short is taken for a whole one", "content[count:]", "content[len(content) :]",
         "test_writes_that_are_cut_short_are_gone_on_with"),
    ],
    "node_agent/cache/node_cache.py": [
        ("an eviction and an admission change the cache at the same time", "async with self._lock:\n            return",
         "return", "test_a_stage_between_any_two_steps_of_an_eviction_has_all_its_files"),
    ],
    "node_agent/disk/whole_files.py": [
        ("what was given away stays in the cache", "os.rename(path, name, dst_dir_fd=folder)",
         "os.link(path, name, dst_dir_fd=folder)",
         "test_a_pull_killed_at_any_step_gives_whole_files_and_holds_none_that_it_gave"),
    ],
    "node_agent/stage/view/views.py": [
        ("a view is built where its job looks for it", 'aside = root.with_name(f"{stage_id}{_BUILDING}")',
         "aside = root", "test_an_agent_killed_at_any_step_shows_whole_files"),
        ("a view is built where jobs look", '.with_name(f"{stage_id}{_BUILDING}")', "\n        remove_tree(root)",
         "test_ten_thousand_kills_lose_nothing_acknowledged_and_show_nothing_wrong"),
    ],
}
