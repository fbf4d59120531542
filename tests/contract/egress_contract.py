"""What every way out of the mirror has to keep: nothing is sent to an address that the policy refuses."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import ClassVar

import pytest

from bdn.core.egress import PUBLIC_INTERNET, EgressPolicy
from bdn.core.errors import EgressRefusedError
from tests.doubles.http_origin import Answer, Origin
from tests.support.network.egress_streets import Doorbell, Names, note_attempts
from tests.support.network.raw_server import message
from tests.support.network.tunnels import ConnectProxy

ONE_ADDRESS = EgressPolicy.parse("127.0.0.1")
Door = Callable[[str, EgressPolicy], Awaitable[None]]

WRITTEN = [
    "127.0.0.1", "127.0.0.2", "127.1", "2130706433", "0177.0.0.1", "0x7f.0.0.1", "127.0.0.1.", "0.0.0.0", "10.0.0.1",
    "100.64.0.1", "169.254.169.254", "172.16.0.1", "192.168.0.1", "localhost", "LOCALHOST", "[::1]", "[::]",
    "[fc00::1]", "[fe80::1]", "[::ffff:10.0.0.1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]",
]  # fmt: skip


class EgressContract:
    """``door`` sends one GET with the real client, or whatever that client does first, and may fail in any way."""

    follows_redirects: ClassVar[bool] = True

    @pytest.fixture
    def door(self) -> Door:
        raise NotImplementedError

    @pytest.fixture
    def names(self, monkeypatch: pytest.MonkeyPatch) -> Names:
        return Names(monkeypatch)

    @pytest.fixture
    def attempts(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        return note_attempts(monkeypatch)

    @pytest.fixture
    def forbidden(self) -> Iterator[Doorbell]:
        """A server on an address of this machine that no test allows."""
        with Doorbell("127.0.0.2") as bell:
            yield bell

    @pytest.fixture
    def answers(self) -> list[Answer]:
        """What the allowed server answers, one after the other, the last one for ever; nothing useful at first."""
        return [Answer(404)]

    @pytest.fixture
    def allowed(self, answers: list[Answer]) -> Iterator[Origin]:
        """A server on 127.0.0.1."""
        with Origin("allowed", lambda _: answers.pop(0) if len(answers) > 1 else answers[0]) as origin:
            yield origin

    @pytest.mark.parametrize("host", WRITTEN)
    async def test_a_special_address_is_refused_in_every_spelling(
        self, door: Door, host: str, names: Names, attempts: list[str]
    ) -> None:
        with pytest.raises(EgressRefusedError, match="BDN_EGRESS_ALLOW"):
            await door(f"http://{host}:9", PUBLIC_INTERNET)
        assert not attempts
        assert not names.asked

    @pytest.mark.parametrize("host", ["①②⑦.⓪.⓪.①", "127。0。0。1", "127%2e0%2e0%2e1", "[fe80::1%25eth0]"])
    async def test_a_spelling_that_clients_read_in_their_own_ways_gets_nowhere(
        self, door: Door, host: str, names: Names, attempts: list[str]
    ) -> None:
        with pytest.raises(Exception):  # noqa: B017 - most clients refuse to send it themselves
            await door(f"http://{host}:9", PUBLIC_INTERNET)
        assert not attempts

    @pytest.mark.parametrize("addresses", [
        ["127.0.0.2"], ["10.0.0.5"], ["169.254.169.254"], ["::1"], ["fd00:ec2::254"], ["::ffff:10.0.0.1"],
        ["127.0.0.1", "127.0.0.2"], ["127.0.0.2", "127.0.0.1"], ["8.8.8.8", "10.0.0.5"],
    ])  # fmt: skip
    async def test_a_name_is_refused_when_one_of_its_addresses_is(
        self, door: Door, names: Names, attempts: list[str], allowed: Origin, addresses: list[str]
    ) -> None:
        names.say("hub.example", addresses)
        with pytest.raises(EgressRefusedError, match=r"hub\.example may not be contacted: it resolves to"):
            await door(allowed.url.replace("127.0.0.1", "hub.example"), ONE_ADDRESS)
        assert not attempts

    async def test_the_address_that_was_judged_is_the_one_that_is_connected_to(
        self, door: Door, names: Names, attempts: list[str], allowed: Origin
    ) -> None:
        """DNS rebinding: whoever asks again gets another answer."""
        names.say("hub.example", ["127.0.0.1"], ["127.0.0.2"])
        port = int(allowed.url.rpartition(":")[2])
        with Doorbell("127.0.0.2", port) as forbidden:
            with suppress(Exception):
                await door(f"http://hub.example:{port}", ONE_ADDRESS)
            assert not forbidden.rang
        assert allowed.log.count() >= 1
        assert set(attempts) == {"127.0.0.1"}

    @pytest.mark.parametrize("allow", ["hub.example", "*.example", "127.0.0.0/30"])
    async def test_what_the_operator_allows_is_contacted(
        self, door: Door, names: Names, allowed: Origin, allow: str
    ) -> None:
        names.say("hub.example", ["127.0.0.1"])
        with suppress(Exception):
            await door(allowed.url.replace("127.0.0.1", "hub.example"), EgressPolicy.parse(allow))
        assert allowed.log.count() >= 1

    @pytest.mark.parametrize("host", ["127.0.0.2", "2130706434", "hub.example", "[::ffff:127.0.0.2]"])
    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    async def test_a_redirect_to_a_refused_address_is_not_followed(
        self,
        door: Door,
        names: Names,
        attempts: list[str],
        allowed: Origin,
        answers: list[Answer],
        forbidden: Doorbell,
        host: str,
        status: int,
    ) -> None:
        names.say("hub.example", ["127.0.0.2"])
        answers[:] = [Answer(status, {"Location": f"http://{host}:{forbidden.port}/secrets"})]
        with pytest.raises(EgressRefusedError if self.follows_redirects else Exception):
            await door(allowed.url, ONE_ADDRESS)
        assert allowed.log.count() >= 1
        assert not forbidden.rang
        assert set(attempts) == {"127.0.0.1"}

    async def test_behind_a_proxy_addresses_are_judged_as_written_and_names_are_the_proxys(
        self, door: Door, names: Names, attempts: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refusal = message("403 Forbidden", "Content-Length: 0", "Connection: close")
        with ConnectProxy(("127.0.0.1", 9), refuse=refusal, connections=8) as proxy:
            monkeypatch.setenv("HTTPS_PROXY", proxy.url)
            for host in ("169.254.169.254", "localhost", "0x7f.1", "[::ffff:10.0.0.1]"):
                with pytest.raises(EgressRefusedError):
                    await door(f"https://{host}", PUBLIC_INTERNET)
            assert not attempts
            names.say("hub.example", ["127.0.0.2"])  # the proxy's own resolver may know better
            with pytest.raises(Exception) as raised:
                await door("https://hub.example", PUBLIC_INTERNET)
            assert not isinstance(raised.value, EgressRefusedError)
            assert set(proxy.asked_for) == {"hub.example:443"}
            assert not names.asked

    async def test_a_proxy_may_be_a_private_host(
        self, door: Door, names: Names, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The operator named it, and nobody else can."""
        refusal = message("403 Forbidden", "Content-Length: 0", "Connection: close")
        with ConnectProxy(("127.0.0.1", 9), refuse=refusal, connections=2) as proxy:
            names.say("proxy.corp", ["127.0.0.1"])
            monkeypatch.setenv("HTTPS_PROXY", proxy.url.replace("127.0.0.1", "proxy.corp"))
            with pytest.raises(Exception) as raised:
                await door("https://hub.example", PUBLIC_INTERNET)
            assert not isinstance(raised.value, EgressRefusedError)
            assert set(proxy.asked_for) == {"hub.example:443"}


class FollowingEgressContract(EgressContract):
    """For clients that follow redirects and take plain http to a proxy too."""

    async def test_a_redirect_behind_a_proxy_is_judged_too(
        self, door: Door, names: Names, allowed: Origin, answers: list[Answer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answers[:] = [Answer(302, {"Location": "http://169.254.169.254/latest/meta-data/"}), Answer(404)]
        monkeypatch.setenv("HTTP_PROXY", allowed.url)
        with pytest.raises(EgressRefusedError, match="169"):
            await door("http://hub.example", PUBLIC_INTERNET)
        assert [request.target.startswith("http://hub.example") for request in allowed.log.find()] == [True]
        assert not names.asked
