"""What another version left is refused before anything is touched."""

import json
from pathlib import Path

import pytest

from bdn.core.errors import InvalidRequestError
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig, staged

pytestmark = [
    pytest.mark.promise("upgrades"),
    pytest.mark.usefixtures("backend"),
    pytest.mark.embedded("it has no mirror of its own"),
]
FILES = {"config.json": b"{}", "model.bin": b"weights" * 1000}


@pytest.mark.parametrize("content", [b"1\n", b"9\n", b"", b"\xff\x00"])
async def test_a_cache_of_an_unknown_format_is_refused(content: bytes, tmp_path: Path) -> None:
    with AgentMirror().running() as mirror:
        manifest, rig = mirror.publish(FILES), Rig(mirror, tmp_path)
        async with rig.agent() as agent:
            await staged(agent, mirror, manifest)
        (rig.cache / "format").write_bytes(content)
        (rig.cache / "files/of-a-later-version").write_bytes(b"which we would take for rubbish")
        before = everything(rig.cache)
        with pytest.raises(InvalidRequestError, match="Nothing was changed"):
            async with rig.agent():
                pass
        assert everything(rig.cache) == before


def everything(root: Path) -> str:
    """Names, sizes, times, links and owners of all that is below."""
    found = [(str(path), *path.lstat()[:7], path.lstat().st_mtime_ns) for path in sorted(root.rglob("*"))]
    return json.dumps(found)
