"""Places for work, granted round robin over organisations: no organisation delays another by more than a round."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Place:
    """One place that ``owner`` waits for, and holds once ``is_granted``."""

    owner: str
    is_granted: bool = False


class Shares:
    """``count`` places; the caller may change ``count`` later. Not thread-safe.

    ``spares`` is for places that clients hold arbitrarily long. An owner gets a place only while it holds fewer than are
    free (Choudhury and Hahne, "Dynamic Queue Length Thresholds", 1998): one owner gets half of all, two get a third
    each, and the next owner finds a free one. Without ``spares`` all places are used, which fits places that are
    released soon.
    """

    def __init__(self, count: int, *, spares: bool = False) -> None:
        self.count = count
        self.taken = 0
        self._spares = spares
        self._held: dict[str, int] = {}
        self._waiting: dict[
            str, dict[Place, None]
        ] = {}  # owners in the order of their turns, and places as they were requested

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def request(self, owner: str) -> Place:
        """Queue up; a later ``grant`` returns the place."""
        place = Place(owner)
        self._waiting.setdefault(owner, {})[place] = None
        return place

    def grant(self) -> list[Place]:
        granted = []
        while (owner := next(self._next_owners(), None)) is not None:
            queue = self._waiting.pop(owner)
            place = next(iter(queue))
            del queue[place]
            if queue:  # behind the other waiting owners
                self._waiting[owner] = queue
            place.is_granted = True
            self.taken += 1
            self._held[owner] = self._held.get(owner, 0) + 1
            granted.append(place)
        return granted

    def release(self, place: Place) -> None:
        """Release a place, granted or not. Call ``grant`` afterwards."""
        owner = place.owner
        if place.is_granted:
            self.taken -= 1
            self._held[owner] -= 1
            if not self._held[owner]:
                del self._held[owner]
            return
        queue = self._waiting[owner]
        del queue[place]
        if not queue:
            del self._waiting[owner]

    def _next_owners(self) -> Iterator[str]:
        free = self.count - self.taken
        if free > 0:
            yield from (one for one in self._waiting if not self._spares or self._held.get(one, 0) < free)
