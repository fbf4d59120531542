"""deploy/Dockerfile without a container engine: its instructions run in a root directory, in a mount namespace of their own."""

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PATH: Final = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MOUNTS: Final = """set -eu
root=$1; lower=$2; upper=$3; wheels=$4; script=$5; shift 5
if [ -n "$lower" ]; then mount -t overlay overlay -o "lowerdir=$lower,upperdir=$upper,workdir=$upper.work" "$root"; else mount --bind "$root" "$root"; fi
mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"; mount --bind "$wheels" "$root/mnt"
for file in "$@"; do touch "$root$file"; mount --bind "$file" "$root$file"; done
exec chroot "$root" /bin/sh -ec "$script"
"""


@dataclass(frozen=True, slots=True)
class Instruction:
    word: str
    text: str


def read_dockerfile(file: Path) -> list[Instruction]:
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines()]


def split_base(instructions: list[Instruction]) -> tuple[list[Instruction], list[Instruction]]:
    """The instructions up to the first RUN, which installs the locked requirements, and the instructions of the project."""
    first = next(number for number, each in enumerate(instructions) if each.word == "RUN") + 1
    return instructions[:first], instructions[first:]


def config_of(instructions: list[Instruction]) -> dict[str, object]:
    """The image's configuration, as its ``config`` spells it."""
    last = {each.word: each.text for each in instructions}
    environment = [each.text for each in instructions if each.word == "ENV"]
    return {
        "Env": [_PATH, *environment],
        "Cmd": json.loads(last["CMD"]),
        "User": last["USER"],
        "WorkingDir": last["WORKDIR"],
    }


def copy_files(instructions: list[Instruction], checkout: Path, root: Path, workdir: str) -> None:
    """COPY, all of it before RUN: no RUN of this Dockerfile changes what a COPY brings."""
    for each in instructions:
        if each.word != "COPY":
            continue
        *sources, target = each.text.split()
        place = root / workdir.strip("/") / target
        for source in (checkout / source for source in sources):
            if source.is_dir():
                shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                to = place / source.name if target.endswith("/") else place
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, to)


def run_in(
    root: Path, script: str, wheels: Path, *, lower: Path | None = None, upper: Path | None = None, network: bool
) -> None:
    """Run ``script`` with ``root`` as its root directory and ``wheels`` at /mnt; with ``lower``, changes go to ``upper``."""
    given = dict(
        entry.split("=", 1) for entry in (_PATH, "HOME=/root", "LC_ALL=C.UTF-8", "PIP_ROOT_USER_ACTION=ignore")
    )
    files: list[str] = []
    if network:
        files = [name for name in ("/etc/resolv.conf", "/etc/hosts", os.environ.get("PIP_CERT", "")) if name]
        given |= {name: os.environ[name] for name in ("PIP_CERT", "PIP_INDEX_URL") if name in os.environ}
    else:
        given |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/mnt"}
    places = [str(root), str(lower or ""), str(upper or ""), str(wheels), script, *files]
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNTS, "sh", *places]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{shlex.quote(script)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


def script_of(instructions: list[Instruction], workdir: str) -> str:
    """The RUN instructions, one after the other."""
    exports = [f"export {each.text}" for each in instructions if each.word == "ENV"]
    runs = [f"( {each.text} )" for each in instructions if each.word == "RUN"]
    return "\n".join([f"cd {workdir}", *exports, *runs])
