"""Commands of an ordinary user: without rights, on a machine that has no container engine."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.support.network.alone import loopback_alone
from tests.support.services.commands import ROOT, TRUSTED, Shell

_UID: Final = "65534"  # nobody's
_ENGINES: Final = ("podman", "docker")
_USED: Final = (ROOT, *(Path(ROOT, name).resolve() for name in (".venv", ".venv-truss")), Path(sys.base_prefix))


@dataclass(frozen=True)
class OrdinaryShell(Shell):
    """BDN has its defaults: no data directory is named, and the certificates are the machine's."""

    @property
    def data(self) -> Path:
        return self.root / "home/.local/share/bdn"

    @property
    def environment(self) -> dict[str, str]:
        unset = {"BDN_DATA_DIR", "BDN_OUTAGE_SECONDS", *TRUSTED}
        return {name: value for name, value in super().environment.items() if name not in unset}


@contextmanager
def ordinary_user(**environment: str) -> Iterator[Shell]:
    """A user with a home directory of their own, and no settings but these. Needs root."""
    with tempfile.TemporaryDirectory(prefix="bdn-ordinary-") as folder:
        root = Path(folder)
        for path in (root, root / "home", root / "empty"):
            path.mkdir(exist_ok=True)
            path.chmod(0o755)
            os.chown(path, int(_UID), int(_UID))
        yield OrdinaryShell(root, environment, prefix=_becoming(root / "empty"))


def _becoming(empty: Path) -> tuple[str, ...]:
    """What to write before a command, whose process stays the same.

    In a mount namespace of its own, folders on the way to our programs that only root may pass (such as ``/root``) have
    the mode of ``empty``, and the engines of the machine are no programs.
    """
    ways = {parent for path in _USED for parent in (path, *path.parents) if not parent.stat().st_mode & 0o001}
    engines = [found for name in _ENGINES if (found := shutil.which(name))]
    steps = [
        *(["mount", "-t", "overlay", "-o", f"lowerdir={empty}:{way}", "overlay", str(way)] for way in sorted(ways)),
        *(["mount", "--bind", "/dev/null", engine] for engine in engines),
        ["exec", "setpriv", "--reuid", _UID, "--regid", _UID, "--clear-groups"],
    ]
    script = " && ".join(map(shlex.join, steps)) + ' "$@"'
    return ("unshare", "--mount", "sh", "-c", script, "sh")


@cache
def why_not_ordinary() -> str | None:
    """Why no ordinary user without a network can run jobs here; None: one can."""
    if os.geteuid() != 0:
        return "needs root, which becomes an ordinary user without a network"
    sandbox = "bwrap --unshare-user --unshare-pid --ro-bind / / --proc /proc --dev /dev --cap-drop ALL"
    try:
        with loopback_alone(), ordinary_user() as user:
            probe = [*user.prefix, *sandbox.split(), sys.executable, "-c", "import bdn.cli.main"]
            done = subprocess.run(
                probe, capture_output=True, text=True, check=False, env=user.environment, cwd=user.root
            )
    except OSError as error:
        return str(error)
    return (done.stderr.strip().splitlines() or ["it failed"])[-1] if done.returncode else None


needs_ordinary_user = pytest.mark.skipif(
    why_not_ordinary() is not None, reason=f"no ordinary user can run jobs here: {why_not_ordinary()}"
)
