"""The format of a cache directory. Imports little: a pull that finds its files in place needs no more of the cache."""

from typing import Final

from bdn.core.errors import InvalidRequestError
from bdn.disk.durable import disk_errors, write_durably
from node_agent.disk.places import Places

FORMAT: Final = b"3\n"


def check_format(places: Places) -> None:
    """Check the format before anything is made, locked or tidied up.

    Raises:
        InvalidRequestError: another version wrote the directory; nothing was touched.
        DiskFailedError: the format file cannot be read.
    """
    with disk_errors(places.format):
        try:
            found = places.format.read_bytes()
        except FileNotFoundError:
            return
    if found != FORMAT:
        name = found[:20].decode("ascii", "replace").strip()
        raise InvalidRequestError(
            f"the cache directory {places.root} has the format {name!r} of another version of BDN; this version reads only "
            f"{FORMAT.decode().strip()!r}. Nothing was changed: delete the directory once its jobs have ended, or name another one in "
            "BDN_AGENT_CACHE_DIR"
        )


def keep_format(places: Places) -> None:
    """Write the format file, if absent, for later versions. The caller holds the directory's lock."""
    with disk_errors(places.format):
        if not places.format.exists():
            write_durably(places.format, FORMAT, mode=0o644)
