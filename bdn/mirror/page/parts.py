"""Parts of a view: elements with an id, of which viewers receive those whose text changed."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Final, Literal

Frame = Literal["", "svg", "table"]

_ROOT: Final = re.compile(r'<([a-z][a-z0-9]*) id="([A-Za-z0-9_-]+)"')
# An element parsed alone is HTML, so a part of an SVG image or of a table is sent within its frame.
_FRAMES: Final[Mapping[Frame, tuple[str, str]]] = {
    "": ("", ""),
    "svg": ("<svg>", "</svg>"),
    "table": ("<table><tbody>", "</tbody></table>"),
}


@dataclass(frozen=True, slots=True)
class Part:
    """One element. ``html`` begins with its tag and its id."""

    html: str
    frame: Frame = ""

    @property
    def id(self) -> str:
        found = _ROOT.match(self.html)
        if found is None:
            raise ValueError(f"a part has to begin with a tag and an id: {self.html[:60]!r}")
        return found[2]

    @property
    def update(self) -> str:
        """The element as a fragment that replaces its earlier form, and keeps the keyboard's focus."""
        before, after = _FRAMES[self.frame]
        return before + _ROOT.sub(r'<\1 hx-swap-oob="outerMorph" id="\2"', self.html, count=1) + after


@dataclass(frozen=True)
class Group:
    """One element with many parts in it, such as the rows of a table. ``head`` begins with its tag and its id."""

    head: str
    parts: Sequence[Part]
    tail: str

    @property
    def id(self) -> str:
        return Part(self.head).id

    @cached_property
    def html(self) -> str:
        return "".join([self.head, *(part.html for part in self.parts), self.tail])

    @property
    def update(self) -> str:
        return Part(self.html).update

    def changed(self, before: "Group") -> Iterator[Part]:
        """The parts that changed; the whole element if others came, went or moved."""
        if (self.head, self.tail, len(self.parts)) != (before.head, before.tail, len(before.parts)):
            yield Part(self.html)
            return
        changed = [one for one, old in zip(self.parts, before.parts, strict=True) if one.html != old.html]
        old_ids = [old.id for one, old in zip(self.parts, before.parts, strict=True) if one.html != old.html]
        if [one.id for one in changed] == old_ids:
            yield from changed
        else:
            yield Part(self.html)


@dataclass(frozen=True)
class Snapshot:
    """A view at one moment, by the ids of its parts. ``live`` is the line that says of when it is."""

    parts: Mapping[str, Part | Group]
    live: Part
    _updates: dict[str, str] = field(default_factory=dict, repr=False)  # by the name of the snapshot before

    @cached_property
    def name(self) -> str:
        """Equal for equal views, so that a viewer which has the view already receives nothing."""
        found = blake2b(digest_size=12)
        for part in self.parts.values():
            found.update(part.html.encode(errors="surrogatepass"))
        return found.hexdigest()

    @property
    def whole(self) -> str:
        return "".join(part.update for part in (*self.parts.values(), self.live))

    def since(self, before: "Snapshot") -> str:
        """What changed since then. Made once for all viewers that saw the same."""
        if self is before:
            return ""
        if before.name not in self._updates:
            changed = [part for name in self.parts for part in _changed(self.parts[name], before.parts.get(name))]
            self._updates[before.name] = "".join(part.update for part in (*changed, self.live))
        return self._updates[before.name]


def _changed(part: Part | Group, before: Part | Group | None) -> Iterator[Part | Group]:
    if isinstance(part, Group) and isinstance(before, Group):
        yield from part.changed(before)
    elif before is None or part.html != before.html:
        yield part
