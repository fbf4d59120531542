"""Ways to break the promise `upgrades`."""

# fmt: off
BREAKAGES: dict[str, list[tuple[str, ...]]] = {
    "bdn/mirror/db/database.py": [
        ("a schema that is not ours is worked on", "run_sync(_upgrade)", "run_sync(_upgrade) and not version",
         "test_a_database_of_a_newer_version_is_refused_and_left_alone[sqlite]"),
        ("additions to the schema stop the version before", "found == known and more >= additions", "version == HEAD",
         "test_a_version_starts_and_works_on_a_newer_schema_that_has_additions_alone[sqlite]"),
    ],
    "migrations/versions/0006_tokens.py": [
        ("a migration drops what was there", "upgrade() -> None:",
         'upgrade() -> None:\n    op.execute("DELETE FROM manifests")', "test_what_an_earlier_version_left_is_kept_whole[postgresql-0005]"),
    ],
    "migrations/versions/0010_operations.py": [
        ("what was collected is forgotten", '{"kinds": row["kinds"]}', "{}",
         "test_what_was_asked_before_operations_had_one_table_is_still_told[sqlite]"),
    ],
    "migrations/versions/0012_holdings.py": [
        ("what agents hold is forgotten", "for holding in holdings or ():", "for holding in ():",
         "test_what_agents_held_before_holdings_had_a_table_is_still_known[sqlite]"),
    ],
    "migrations/versions/0015_content_chunks.py": [
        ("of a large content the first chunks are found", "range(0, len(rows), _AT_ONCE)", "range(0, 1, _AT_ONCE)",
         "test_the_chunks_of_contents_that_were_mirrored_before_are_found_by_name[sqlite]"),
    ],
    "migrations/versions/0015_2_teams.py": [
        ("checkpoints go with the table of projects", 'op.execute("INSERT INTO checkpoints SELECT * FROM held")', "pass",
         "test_projects_from_before_there_were_teams_are_the_team_defaults[sqlite]"),
    ],
    "node_agent/cache/tiers.py": [
        ("files where the first version put them are not taken over", "path.rename(place)", "path.unlink()",
         "test_a_cache_of_the_first_version_keeps_its_files_and_its_stages"),
    ],
    "node_agent/disk/cache_format.py": [
        ("every format is taken for ours", "if found != FORMAT:", "if found is None:",
         "test_a_cache_of_an_unknown_format_is_refused"),
    ],
}
