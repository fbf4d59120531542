"""Pages of a hub's tree that are none."""

import json
from collections.abc import Iterator

import pytest
from huggingface_hub import close_session

from bdn.sources.huggingface.source import read_page
from tests.doubles.faults import Script
from tests.doubles.http_origin import Answer, Origin, Request
from tests.doubles.request_log import RequestLog

FILE = {"type": "file", "path": "a", "size": 3, "oid": "d" * 40}


class Pages:
    """Answers every request with ``entries``, and with ``link`` as where the next page is."""

    def __init__(self) -> None:
        self.entries: object = [FILE]
        self.link = ""

    def respond(self, _: Request) -> Answer:
        headers = {"Content-Type": "application/json"} | ({"Link": f'<{self.link}>; rel="next"'} if self.link else {})
        return Answer(200, headers, json.dumps(self.entries).encode())


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def url(pages: Pages) -> Iterator[str]:
    with Origin("pages", pages.respond, log=RequestLog(), script=Script()) as origin:
        yield f"{origin.url}/api/models/o/m/tree/main"
    close_session()


def test_a_page_tells_its_files_and_where_the_next_one_is(pages: Pages, url: str) -> None:
    pages.link = f"{url}?cursor=2"
    page = read_page(url, {})
    assert ([file.path for file in page.files], page.following) == (["a"], pages.link)


def test_a_page_that_comes_after_itself_is_refused(pages: Pages, url: str) -> None:
    pages.link = url
    with pytest.raises(ValueError, match="goes on where it is"):
        read_page(url, {})


@pytest.mark.parametrize("change", [
    {"path": 1}, {"size": -1}, {"size": 1.0}, {"size": True}, {"size": "3"}, {"oid": "x"}, {"oid": None},
    {"lfs": {"oid": 1, "size": 3, "pointerSize": 1}},
])  # fmt: skip
def test_an_entry_that_cannot_be_a_file_is_refused(pages: Pages, url: str, change: dict[str, object]) -> None:
    pages.entries = [FILE | change]
    with pytest.raises((TypeError, ValueError)):
        read_page(url, {})


def test_a_folder_has_a_name_that_is_text(pages: Pages, url: str) -> None:
    pages.entries = [{"type": "directory", "path": 5, "oid": "e" * 40}]
    with pytest.raises(TypeError):
        read_page(url, {})
