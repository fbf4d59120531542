"""Ways to turn somebody away because others ask, too, and to take more with each request."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

BREAKAGES: Final = [
    Breakage(
        "load",
        "bdn/mirror/db/database.py",
        "who cannot write at once is turned away",
        "async with asyncio.timeout(WRITER_SECONDS):",
        "async with asyncio.timeout(0):",
        "tests/promises/test_load.py::test_agents_that_ask_all_at_once_cost_the_upstream_one_read",
    ),
    Breakage(
        "load",
        "bdn/disk/durable.py",
        "each folder that is synced stays open",
        """        yield descriptor
    finally:
        os.close(descriptor)""",
        """        yield descriptor
    finally:
        pass""",
        "tests/promises/test_soak.py::test_nothing_grows_under_a_mixed_load",
        is_full=True,
    ),
]
