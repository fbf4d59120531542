"""Layouts over the API: made once for all who ask together, compressed for who reads gzip, and not sent to who has them."""

import asyncio

from bdn.core.chunk import digest_of
from tests.doubles.hub import Hub
from tests.support.mirror.service import MirrorUnderTest, source, statements_of

pytest_plugins = ("tests.support.mirror.fixtures",)

ASKING = 20


async def layout_path(mirror: MirrorUnderTest, hub: Hub) -> str:
    hub.repo("org/model").commit({f"{number}.bin": bytes([number]) for number in range(50)})
    document = await mirror.ready(source("hf://org/model"))
    return f"/manifests/{document['sources'][0]['manifest']}/layout"


async def test_a_layout_is_made_at_most_twice_for_all_who_ask_at_the_same_time(
    mirror: MirrorUnderTest, hub: Hub
) -> None:
    path = await layout_path(mirror, hub)
    with statements_of(mirror) as seen:
        answers = await asyncio.gather(*(mirror.http.get(path) for _ in range(ASKING)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    read = [one for one in seen if "slab_slices" in one and "GROUP BY" in one]  # which is asked once for each layout
    assert 1 <= len(read) <= 2  # the one under way when the others came, and one for all of them


async def test_who_reads_a_manifest_again_writes_nothing(mirror: MirrorUnderTest, hub: Hub) -> None:
    path = (await layout_path(mirror, hub)).removesuffix("/layout")
    first = await mirror.http.get(path)
    with statements_of(mirror) as seen:
        again = await mirror.http.get(path)
    assert (first.status_code, again.content) == (200, first.content)
    assert [one for one in seen if "manifest" in one and not one.startswith("SELECT")] == []


async def test_a_layout_comes_as_its_reader_takes_it_or_not_at_all_where_it_is_known(
    mirror: MirrorUnderTest, hub: Hub
) -> None:
    path = await layout_path(mirror, hub)
    plain = await mirror.http.get(path, headers={"Accept-Encoding": "gzip;q=0, identity"})
    packed = await mirror.http.get(path, headers={"Accept-Encoding": "br, gzip;q=0.5"})
    assert plain.content == packed.content
    assert (plain.headers.get("content-encoding"), packed.headers["content-encoding"]) == (None, "gzip")
    assert int(packed.headers["content-length"]) < len(packed.content) / 2
    name = digest_of(plain.content)
    assert [answer.headers["etag"] for answer in (plain, packed)] == [f'"{name}"', f'"{name}-gzip"']
    for known in (plain, packed):
        headers = {"Accept-Encoding": known.headers.get("content-encoding", "identity")}
        again = await mirror.http.get(path, headers=headers | {"If-None-Match": f'"other", {known.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
        other = await mirror.http.get(path, headers=headers | {"If-None-Match": '"other"'})
        assert other.content == plain.content
