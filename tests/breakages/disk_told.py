"""Ways to break what is told of a disk that takes nothing new, and the test that notices each."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_TEST = "tests/promises/test_failing_disk.py::"
_FULL = f"{_TEST}test_a_full_disk_is_alive_and_not_ready_until_there_is_room_again"
_SILENT = f"{_TEST}test_while_a_disk_does_not_say_how_full_it_is_heartbeats_go_on_and_tell_why_nothing_new_comes_in"

BREAKAGES: Final = [
    Breakage(
        "space",
        "node_agent/mirror_link/holdings.py",
        "a disk that does not say how full it is ends the heartbeats",
        "        except DiskFailedError as error:\n            return room, str(error)\n",
        "        except ZeroDivisionError as error:\n            return room, str(error)\n",
        _SILENT,
    ),
    Breakage(
        "space",
        "node_agent/mirror_link/holdings.py",
        "heartbeats do not say that nothing new comes in",
        "        problem=problem,\n",
        "",
        _SILENT,
    ),
    Breakage(
        "space",
        "node_agent/disk/cache_directory.py",
        "a disk without a block is said to be ready",
        "if blocks == 0 or ",
        "if ",
        _FULL,
    ),
    Breakage(
        "space",
        "node_agent/disk/cache_directory.py",
        "a disk without an inode is said to be ready",
        " or (disk.f_files and inodes == 0)",
        "",
        _FULL,
    ),
]
