"""What every Source promises about who may read: whatever the upstream's words, the user meets the same errors."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import ClassVar

import pytest

from bdn.core.errors import AuthRequiredError, BdnError, SourceNotFoundError
from bdn.core.source.upstream import Source
from tests.contract.source_contract import listed, only_file
from tests.doubles.ranges import read_range

SESAME = "sesame"  # stands in every wrong secret, and must stand in no error

# Opens a source of one file, ``a.txt`` with ``b"x"``, in one of these ways:
# - "public": what everybody may read, without credentials
# - "private": what is private, with credentials that may read it
# - "anonymous": the same without credentials
# - "wrong key": the same with credentials that nobody gave out; they contain ``SESAME``
# - "denied": the same with the valid credentials of somebody who may not read it
# - "missing": what does not exist, with valid credentials
Access = Callable[[str], AbstractAsyncContextManager[Source]]


class AccessContract(ABC):
    denial: ClassVar[type[BdnError]] = AuthRequiredError  # some upstreams hide from strangers what exists
    readable: ClassVar[tuple[str, ...]] = ("public", "private")

    @pytest.fixture
    @abstractmethod
    def access(self) -> Access: ...

    async def test_what_may_be_read_is_listed_and_read(self, access: Access) -> None:
        for way in self.readable:
            async with access(way) as source:
                file = await only_file(source)
                assert (file.path, read_range(await source.locate(file), 0, 1).content) == ("a.txt", b"x"), way

    async def test_private_content_asks_strangers_for_a_secret(self, access: Access) -> None:
        async with access("anonymous") as source:
            with pytest.raises(AuthRequiredError, match=r"(?i)secret.*auth_secret_name"):
                await listed(source)

    async def test_a_wrong_key_is_refused_and_not_shown(self, access: Access) -> None:
        async with access("wrong key") as source:
            with pytest.raises(AuthRequiredError) as raised:
                await listed(source)
        assert SESAME not in f"{raised.value!r} {raised.value} {raised.value.details()}"

    async def test_a_valid_key_that_may_not_read_is_denied(self, access: Access) -> None:
        async with access("denied") as source:
            with pytest.raises(self.denial):
                await listed(source)

    async def test_what_is_missing_is_not_found(self, access: Access) -> None:
        async with access("missing") as source:
            with pytest.raises(SourceNotFoundError):
                await listed(source)
