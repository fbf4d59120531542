"""What lets a wrong byte on a node's own disk go unseen, spread, or cost more than its chunk; each is noticed."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_NODE: Final = "tests/promises/test_corruption_on_the_node.py"
_PATH: Final = "tests/e2e/test_services.py::test_a_path_of_a_stage_is_verified_by_the_agent_of_its_node"
_ONE_ROUND: Final = f"{_NODE}::test_whatever_is_damaged_one_round_makes_it_right_with_these_chunks_alone"
_LOST: Final = (
    f"{_NODE}::test_what_cannot_be_obtained_is_not_served_or_staged_and_the_next_stage_fetches_its_chunk_alone"
)

BREAKAGES: Final = [
    Breakage(
        "corruption",
        "bdn/core/cache/scrub_round.py",
        "no round ever begins",
        "return self.ended is not None and is_round_due(self.began, period_seconds, now)",
        "return False",
        _ONE_ROUND,
    ),
    Breakage(
        "corruption",
        "bdn/core/cache/scrub_round.py",
        "a round passes over the last file of each manifest",
        "return sorted(one for one in every if self.after is None or one > self.after)",
        "return sorted(one for one in every if self.after is None or one > self.after)[:-1]",
        _ONE_ROUND,
    ),
    Breakage(
        "corruption",
        "bdn/disk/direct.py",
        "the scrub believes the page cache",
        "        if self._direct >= 0:\n            try:",
        "        return self._read(self._descriptor, buffer[:size], offset)\n        if self._direct >= 0:\n            try:",
        f"{_NODE}::test_rot_that_the_page_cache_hides_is_found_on_the_disk",
    ),
    Breakage(
        "corruption",
        "node_agent/scrub/reading.py",
        "no evidence is kept",
        "            if still is not None:\n                self.quarantine",
        "            if still is None:\n                self.quarantine",
        f"{_NODE}::test_the_scrub_finds_a_wrong_chunk_and_fetches_it_alone[whole]",
    ),
    Breakage(
        "corruption",
        "node_agent/scrub/scrubber.py",
        "who only asked to look has his files changed",
        "if not findings.is_repairing or not still:",
        "if not still:",
        f"{_NODE}::test_the_mirror_commands_a_verification_and_hears_what_was_found",
    ),
    Breakage(
        "corruption",
        "node_agent/scrub/scrubber.py",
        "a wrong chunk of the cluster tier stays",
        "await in_thread(self.tier.lose, chunk)",
        "await in_thread(self.tier.holds, chunk)",
        f"{_NODE}::test_a_wrong_chunk_of_the_cluster_tier_is_dropped_with_its_bytes_kept",
    ),
    Breakage(
        "corruption",
        "node_agent/scrub/scrubber.py",
        "a file is touched before it is noted as suspect",
        "            await in_thread(self.record.save)\n",
        "            await asyncio.sleep(0)\n",
        f"{_NODE}::test_an_agent_that_is_killed_in_the_middle_of_a_repair_repairs_it_when_it_is_back",
    ),
    Breakage(
        "corruption",
        "node_agent/scrub/repair.py",
        "what was written is not read back",
        "    if not is_right:",
        "    if not is_right and not content:",
        f"{_NODE}::test_a_file_on_a_place_that_does_not_keep_bytes_is_filled_anew_elsewhere",
    ),
    Breakage(
        "corruption",
        "node_agent/scrub/repair.py",
        "a part forgets which of its chunks are right",
        "bitmap.add(right)",
        "bitmap.add(())",
        _LOST,
    ),
    Breakage(
        "corruption",
        "node_agent/cache/node_cache.py",
        "a file that was put aside still counts as whole",
        "        self.index.lose(content)  # before it goes",
        "        self.index.ledger.size_of(content)  # before it goes",
        _LOST,
    ),
    Breakage(
        "corruption",
        "node_agent/scrub/repair_source.py",
        "what is right here is asked of the mirror",
        "if await in_thread(self._read_held, chunk, put):",
        "if False:",
        f"{_NODE}::test_a_staged_copy_is_repaired_from_the_cache_on_request[flipped]",
    ),
    Breakage(
        "corruption",
        "bdn/cli/verify.py",
        "damage that is left is success where a path was asked about",
        "    return FAILED if report.error is not None or is_left else DONE\n",
        "    return FAILED if report.error is not None else DONE\n",
        _PATH,
    ),
    Breakage(
        "corruption",
        "bdn/cli/verify.py",
        "who only wants to look at a path has it repaired",
        "path=_absolute(what), repair=repair)",
        "path=_absolute(what))",
        _PATH,
    ),
    Breakage(
        "corruption",
        "node_agent/scrub/repair_source.py",
        "who replaces a file brings all that some manifest of it lacks",
        "for manifest in index.named_by(content) if index.is_complete_but_for(manifest, content)]",
        "for manifest in index.named_by(content)]",
        f"{_NODE}::test_who_replaces_a_file_brings_nothing_else_of_a_manifest_that_was_never_filled",
    ),
    Breakage(
        "corruption",
        "node_agent/scrub/repair_source.py",
        "a manifest may be evicted between being chosen and being filled, and all of it comes again",
        "        index.leases.take(manifest, _HOLDER)",
        "        pass",
        f"{_NODE}::test_a_manifest_stays_while_one_file_of_it_is_replaced",
    ),
    Breakage(
        "corruption",
        "node_agent/mirror_link/verifications.py",
        "a link to itself ends a verification",
        "    except OSError:  #",
        "    except FileNotFoundError:  #",
        f"{_NODE}::test_a_link_to_itself_in_a_view_is_damage_and_what_stands_beside_it_is_looked_at",
    ),
    Breakage(
        "corruption",
        "node_agent/scrub/repair.py",
        "a view that has two names is looked at twice",
        "            found.setdefault(file.path, file)",
        "            found[Path(str(len(found)))] = file",
        _PATH,
    ),
    Breakage(
        "corruption",
        "node_agent/scrub/repair.py",
        "a link in a view leads to files of others",
        "if _real(path.parent).is_relative_to(root):",
        "if path.parent.exists():",
        f"{_NODE}::test_nothing_is_written_through_a_link_that_somebody_put_into_a_view",
    ),
    Breakage(
        "corruption",
        "node_agent/cache/held_chunks.py",
        "a file is served while it is being repaired",
        "if place.file in self._withheld:",
        "if False:",
        f"{_NODE}::test_a_wrong_file_is_not_served_while_it_is_repaired",
    ),
    Breakage(
        "corruption",
        "node_agent/cache/held_chunks.py",
        "a fill that meets a wrong file tells nobody",
        "            self._suspect(file)",
        "            pass",
        f"{_NODE}::test_a_fill_that_finds_a_wrong_chunk_here_makes_the_scrub_look_at_its_file",
    ),
    Breakage(
        "corruption",
        "node_agent/cache/held_chunks.py",
        "a chunk that lies here is not compared with its name",
        "if count == len(buffer) and digest_of(buffer) == digest:",
        "if count == len(buffer):",
        f"{_NODE}::test_a_fill_that_finds_a_wrong_chunk_here_makes_the_scrub_look_at_its_file",
    ),
    Breakage(
        "corruption",
        "node_agent/fetch/peers_reader.py",
        "who holds a wrong chunk does not hear of it",
        "                self._make_look(peer, address, chunk)",
        "                pass",
        f"{_NODE}::test_a_peer_that_gets_a_wrong_chunk_makes_its_holder_look_at_its_file",
    ),
    Breakage(
        "corruption",
        "node_agent/cache/quarantine.py",
        "evidence fills the disk",
        "if len(items) <= self.kept:",
        "if items:",
        "tests/unit/node_agent/test_scrub_parts.py::test_the_quarantine_keeps_so_many_items_and_the_oldest_go",
    ),
]
