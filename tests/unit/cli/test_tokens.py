"""``bdn-admin tokens``: the token alone on standard output, once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
from click.testing import CliRunner

from bdn.cli import admin
from bdn.cli import tokens as commands
from bdn.wire.access_schema import NewToken, Token, TokenRequest
from bdn.wire.shapes import Items

MADE = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


class Client:
    """What a mirror would answer."""

    def __init__(self) -> None:
        self.asked: list[TokenRequest] = []

    async def create_token(self, request: TokenRequest) -> NewToken:
        self.asked.append(request)
        return NewToken(**self._token(request).model_dump(), token="bdn_sesame")

    async def tokens(self) -> Items[Token]:
        return Items[Token](items=[self._token(request) for request in self.asked])

    @staticmethod
    def _token(request: TokenRequest) -> Token:
        return Token(
            id="tok_1", name=request.name, organisation=request.organisation, role=request.role, cluster=request.cluster,
            created_at=MADE, expires_at=None, revoked_at=None,
        )  # fmt: skip


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    client = Client()

    @asynccontextmanager
    async def reachable_mirror(_: object) -> AsyncIterator[Client]:
        yield client

    monkeypatch.setattr(commands, "reachable_mirror", reachable_mirror)
    return client


def test_a_new_token_stands_alone_on_standard_output_for_a_shell_to_take(client: Client) -> None:
    arguments = ["tokens", "create", "ci", "--organisation", "acme", "--role", "controller", "--expires", "90d"]
    done = CliRunner().invoke(admin.main, arguments)

    assert (done.exit_code, done.stdout) == (0, "bdn_sesame\n")
    assert "tok_1  acme  controller  ci  made 2026-01-02 03:04:05Z; it is not shown again" in done.stderr
    assert client.asked[0].expires_seconds == 90 * 24 * 3600
    assert json.loads(CliRunner().invoke(admin.main, [*arguments, "--json"]).stdout)["token"] == "bdn_sesame"


def test_a_list_never_shows_a_token(client: Client) -> None:
    arguments = ["tokens", "create", "gpu", "--organisation", "default", "--role", "agent", "--cluster", "c"]
    CliRunner().invoke(admin.main, arguments)

    for options in ([], ["--json"]):
        listed = CliRunner().invoke(admin.main, ["tokens", "ls", *options])
        assert listed.exit_code == 0
        assert "tok_1" in listed.stdout
        assert "sesame" not in listed.stdout


@pytest.mark.parametrize(
    "options",
    [
        ["--role", "controller"],
        ["--organisation", "acme"],
        ["--organisation", "acme", "--role", "king"],
        ["--organisation", "a:b", "--role", "agent"],
        ["--organisation", "acme", "--role", "controller", "--cluster", "c"],
        ["--organisation", "acme", "--role", "agent", "--expires", "soon"],
    ],
)
def test_what_makes_no_sense_is_a_matter_of_usage(client: Client, options: list[str]) -> None:
    assert CliRunner().invoke(admin.main, ["tokens", "create", "n", *options]).exit_code == 2
    assert client.asked == []
