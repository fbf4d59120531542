"""Directory trees as values."""

from pathlib import Path


def names(folder: Path) -> list[str]:
    """The names of all files below ``folder``, in order."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder`` (links followed), by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
