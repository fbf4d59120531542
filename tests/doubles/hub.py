"""A double of the Hugging Face hub that the real ``huggingface_hub`` client cannot tell from the real one.

    with Hub() as hub:
        repo = hub.repo("org/model")
        sha = repo.commit({"config.json": b"{}", "model.safetensors": GeneratedContent(20 * 1024**3)})
        HfApi(endpoint=hub.url, token=False).repo_info("org/model")

LFS files are redirected to a second origin, the "CDN", by signed links that expire. Repositories with ``is_xet`` say so in
listings and heads, as the hub's do, and are served by the CDN all the same: that is the hub's bridge for clients that do not
speak xet. There is no xet behind it. What the real hub does was read from the client's source, its issues
(huggingface_hub #4815, huggingface.js #945) and its documentation.
"""

from contextlib import ExitStack
from typing import Literal, Self

from tests.doubles.cdn import Cdn
from tests.doubles.faults import Fault, Script
from tests.doubles.http_origin import Origin
from tests.doubles.hub_api import HubApi
from tests.doubles.hub_repository import HubRepository, Kind
from tests.doubles.request_log import RequestLog


class Hub:
    """Hub and CDN on free ports of the loopback, from ``with`` until its end.

    ``token`` belongs to the owner of every repository; ``stranger_token`` is valid, but may read only what is open and
    what :meth:`HubRepository.allow` gives it.
    """

    token = "hf_owner"
    stranger_token = "hf_stranger"

    def __init__(self, *, page_size: int = 1000) -> None:
        self.log = RequestLog()
        self.script = Script()
        self._cdn = Cdn()
        self._api = HubApi(self._cdn, owner=self.token, stranger=self.stranger_token, page_size=page_size)
        self._hub_origin = Origin("hub", self._api.respond, log=self.log, script=self.script)
        self._cdn_origin = Origin("cdn", self._cdn.respond, log=self.log, script=self.script)
        self._api.url, self._cdn.url = self.url, self.cdn_url
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._cdn_origin)
        self._stack.enter_context(self._hub_origin)
        return self

    def __exit__(self, *_: object) -> None:
        self.release_stalled()
        self._stack.close()

    @property
    def url(self) -> str:
        return self._hub_origin.url

    @property
    def cdn_url(self) -> str:
        return self._cdn_origin.url

    def repo(
        self,
        repo_id: str,
        *,
        kind: Kind = "model",
        private: bool = False,
        gated: Literal["auto", "manual"] | bool = False,
    ) -> HubRepository:
        """A new, empty repository."""
        repository = HubRepository(repo_id, kind, private, "manual" if gated is True else gated)
        self._api.repositories[kind, repo_id] = repository
        return repository

    def fail(
        self, fault: Fault, path: str = "", *, times: int | None = 1, skip: int = 0, origin: str | None = None
    ) -> None:
        """Order a failure; see :class:`tests.doubles.faults.Script`."""
        self.script.add(fault, path, times=times, skip=skip, origin=origin)

    def clear(self) -> None:
        """Forget repositories, requests and ordered failures; addresses stay. Stalls stall again."""
        self._hub_origin.go_on.clear()
        self._cdn_origin.go_on.clear()
        self._api.repositories.clear()
        self.log.clear()
        self.script.clear()

    def expire_links(self) -> None:
        """Every link of the CDN that was given out so far answers 403 from now on."""
        self._cdn.expire_links()

    @property
    def most_at_once(self) -> dict[str, int]:
        """The most requests that were under way at the same time, by origin."""
        return {origin.name: origin.most_at_once for origin in (self._hub_origin, self._cdn_origin)}

    def release_stalled(self) -> None:
        """Stalled answers go on, and no later one stalls before :meth:`clear`."""
        self._hub_origin.go_on.set()
        self._cdn_origin.go_on.set()
