"""Looking up names: one thread a question, a time for each who waits, a bound for all."""

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from bdn.net.host_lookups import AddressInfo, HostLookups, NameSilentError, Question, ServiceLoop, run_program
from tests.support.mirror.service import until
from tests.support.network.egress_streets import Names

SILENT, OTHER = Question("silent", 80, kind=socket.SOCK_STREAM), Question("other", 80, kind=socket.SOCK_STREAM)
FOUND = [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 80))]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    names = Names(monkeypatch, ("silent", "other"), silent=["silent"])
    yield names
    names.speak()


class Counted(HostLookups):
    callers = 0

    def _asked(self, question: Question) -> Future[list[AddressInfo]]:
        self.callers += 1
        return super()._asked(question)


def seeking() -> threading.Thread:
    return next(thread for thread in threading.enumerate() if thread.name == "MainThread resolves silent")


async def test_all_who_ask_one_question_wait_for_one_thread_and_get_its_answer(names: Names) -> None:
    lookups = Counted()
    with ThreadPoolExecutor(4) as threads:
        blocking = [threads.submit(lookups.find, SILENT) for _ in range(4)]
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(lookups.find_soon(SILENT)) for _ in range(4)]
            await until(lambda: lookups.callers == 8)
            names.speak()

    assert names.asked.count("silent") == 1
    assert [answer.result() for answer in blocking] + [task.result() for task in waiting] == [FOUND] * 8
    assert lookups.find(SILENT) == FOUND
    assert names.asked.count("silent") == 2  # nothing is kept


async def test_who_has_waited_long_enough_hears_which_name_it_is(names: Names) -> None:
    lookups = HostLookups(longest_seconds=0.01)
    for _ in range(3):
        with pytest.raises(NameSilentError, match=r"name silent does not resolve: no answer within 0\.01 s") as caught:
            lookups.find(SILENT)
        assert caught.value.errno == socket.EAI_AGAIN
        with pytest.raises(NameSilentError, match=r"silent .* within 0\.005 s"):
            lookups.find(SILENT, 0.005)
        with pytest.raises(NameSilentError, match=r"silent .* within 0\.01 s"):
            await lookups.find_soon(SILENT)

    assert names.asked.count("silent") == 1


def test_more_names_than_the_limit_are_refused_at_once_until_one_has_answered(names: Names) -> None:
    lookups = HostLookups(limit=1)
    with pytest.raises(NameSilentError):
        lookups.find(SILENT, 0.01)
    with pytest.raises(NameSilentError, match="the name other does not resolve: too many unanswered look-ups \\(1\\)"):
        lookups.find(OTHER)
    assert "other" not in names.asked

    names.speak()
    seeking().join(20)
    assert lookups.find(OTHER) == FOUND


async def test_a_name_that_does_not_exist_is_told_to_all_as_the_system_says_it(names: Names) -> None:
    names.lost = 2
    with pytest.raises(socket.gaierror, match="not known") as caught:
        HostLookups().find(OTHER)
    assert caught.value.errno == socket.EAI_NONAME
    with pytest.raises(socket.gaierror, match="Temporary"):
        await HostLookups().find_soon(OTHER)


@pytest.mark.parametrize("host", ["a" * 64, "a..b", "b\u00fccher..example"])
def test_what_cannot_be_a_name_is_none(host: str) -> None:
    with pytest.raises(socket.gaierror) as caught:
        HostLookups().find(Question(host, 80))
    assert caught.value.errno == socket.EAI_NONAME


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", None])
async def test_an_address_needs_no_thread(host: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("a thread"))
    question = Question(host, 80, kind=socket.SOCK_STREAM)

    assert HostLookups().find(question) == await HostLookups().find_soon(question) == question.ask()


def test_a_loop_that_has_ended_is_not_told_the_answer(names: Names, caplog: pytest.LogCaptureFixture) -> None:
    async def given_up() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ServiceLoop)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await loop.getaddrinfo(b"silent", 80)

    with caplog.at_level(logging.DEBUG):
        run_program(given_up())
        thread = seeking()
        assert thread.daemon
        names.speak()
        thread.join(20)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_programs_connect_by_name_on_such_a_loop(names: Names) -> None:
    async def connect(port: int) -> None:
        with pytest.raises(OSError) as caught:
            await asyncio.open_connection("other", port)
        assert caught.value.errno == errno.ECONNREFUSED

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        run_program(connect(bound.getsockname()[1]))
    assert names.asked.count("other") == 1
