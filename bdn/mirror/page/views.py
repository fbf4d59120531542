"""What a view of the page is: what it reads for a caller, and the parts that it is shown in."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from bdn.core.errors import InvalidRequestError
from bdn.mirror.access.callers import Caller
from bdn.mirror.page.parts import Group, Part
from bdn.mirror.page.rendering import PATHS, Templates
from bdn.mirror.page.sources import Sources

LONGEST: Final = 4096  # characters of a value in an address
Asked = Mapping[str, str]  # the query: a value for each name of ``PageView.asked``, empty if it is absent
Show = Callable[[Templates], Iterable[Part | Group]]  # runs in a thread


@dataclass(frozen=True)
class PageView:
    """One view, at ``PATHS[name]``. ``template`` is its page, which places the parts by their ids.

    ``read`` raises what the API would raise for this caller. ``title`` is also its entry in the menu, if it has one;
    the menu of a team leaves out views that are not ``is_for_teams``.
    """

    name: str
    title: str
    template: str
    read: Callable[[Sources, Caller, Asked], Awaitable[Show]]
    asked: tuple[str, ...] = ()
    is_in_menu: bool = True
    is_for_teams: bool = True

    @property
    def path(self) -> str:
        return PATHS[self.name]

    def asked_by(self, query: Mapping[str, str]) -> dict[str, str]:
        """The values of the view's own names; all others are ignored. Raises ``InvalidRequestError``."""
        found = {name: query.get(name, "") for name in self.asked}
        for name, value in found.items():
            if len(value) > LONGEST or "\0" in value:
                raise InvalidRequestError(f"{name} is too long, or contains a NUL character: correct the address")
        return found
