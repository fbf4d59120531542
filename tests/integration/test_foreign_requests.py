"""What web pages of others may ask of services that ask for no token: nothing."""

import asyncio
from pathlib import Path

from bdn.local.services import running_mirror
from bdn.mirror.settings import MirrorSettings
from node_agent.api import serving_api
from tests.support.agent.mirror import fresh_mirror
from tests.support.agent.rig import Rig
from tests.support.network.ports import free_port

pytest_plugins = ("tests.support.mirror.fixtures", "tests.support.agent.fixtures")
mirror = fresh_mirror
CHUNK = f"/chunks/b3:{'0' * 64}"


async def told(address: int | Path, line: str, *headers: str) -> str:
    """The whole answer on a connection of its own."""
    connecting = (
        asyncio.open_unix_connection(address)
        if isinstance(address, Path)
        else asyncio.open_connection("127.0.0.1", address)
    )
    reader, writer = await connecting
    try:
        writer.write("\r\n".join((line, "Connection: close", *headers, "", "")).encode())
        return (await reader.read()).decode()
    finally:
        writer.close()


OWN = ("localhost:{port}", "127.0.0.1:{port}", "LOCALHOST.:{port}", "[::1]")
FOREIGN = (
    ("Host: rebound.example",),
    ("Host: rebound.example:{port}", "Origin: http://rebound.example:{port}"),
    ("Host: localhost:{port}", "Origin: https://page.example"),
    ("Host: localhost:{port}", "Origin: http://localhost:1"),
    ("Host: localhost:{port}", "Origin: null"),
    ("Host: localhost:{port}", "Origin: http://localhost:{port}", "Origin: http://page.example"),
)


async def check_door(path: str, port: int, served: int, *, is_closed: bool = True) -> None:
    """Its own names and pages get ``served``, and so do foreign ones unless it ``is_closed`` to them."""
    head = f"HTTP/1.1 {served}"
    for host in (each.format(port=port) for each in OWN):
        assert (await told(port, f"GET {path} HTTP/1.1", f"Host: {host}", f"Origin: http://{host}")).startswith(head)
    assert (await told(port, f"GET {path} HTTP/1.0")).startswith(head)  # no browser leaves its Host away
    for headers in ([each.format(port=port) for each in some] for some in FOREIGN):
        answer = await told(port, f"GET {path} HTTP/1.1", *headers)
        assert answer.startswith("HTTP/1.1 403" if is_closed else head), (path, headers)
        assert not is_closed or ("FOREIGN_REQUEST" in answer and "BDN_AUTH=token" in answer)


async def test_a_mirror_without_tokens_answers_no_foreign_page(upstreams: None, tmp_path: Path) -> None:
    async with running_mirror(MirrorSettings(data_dir=tmp_path, port=0, data_port=0)) as mirror:
        port = int(mirror.url.rpartition(":")[2])
        await check_door("/healthz", port, 200)
        await check_door(CHUNK, mirror.service.data_port or 0, 404)
        body = '{"all": true}'
        evicting = ("Host: rebound.example", "Content-Type: application/json", f"Content-Length: {len(body)}", "", body)
        assert (await told(port, "POST /evictions HTTP/1.1", *evicting)).startswith("HTTP/1.1 403")


async def test_a_mirror_with_tokens_has_any_name(upstreams: None, tmp_path: Path) -> None:
    settings = MirrorSettings(data_dir=tmp_path, port=0, data_port=0, auth="token", token="secret")
    async with running_mirror(settings) as mirror:
        await check_door("/healthz", int(mirror.url.rpartition(":")[2]), 200, is_closed=False)
        await check_door(CHUNK, mirror.service.data_port or 0, 401, is_closed=False)


async def test_an_agent_answers_no_foreign_page_except_by_its_socket(rig: Rig) -> None:
    port, path = free_port(), rig.root / "agent.sock"
    async with rig.agent(port=port, socket=path) as agent, serving_api(agent):
        await check_door("/healthz", port, 200)
        await check_door(CHUNK, agent.data_port, 404)
        assert (await told(path, "GET /healthz HTTP/1.1", "Host: anything")).startswith("HTTP/1.1 200")


async def test_the_control_api_of_an_agent_asks_for_no_token_and_is_closed_where_its_data_plane_is_not(
    rig: Rig,
) -> None:
    port = free_port()
    async with rig.agent(port=port, socket=rig.root / "agent.sock", auth="token") as agent, serving_api(agent):
        await check_door("/healthz", port, 200)
        await check_door(CHUNK, agent.data_port, 401, is_closed=False)
