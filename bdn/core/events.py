"""Events: decisions about a manifest, a file or a chunk, with their reasons, and the table of all kinds.

For each kind the table lists the required facts, and the sentence that they make: a clause without its subject, the
manifest. So ``bdn-admin why`` prints only recorded facts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self

from bdn.core.chunk import Digest
from bdn.core.errors import Fact
from bdn.core.units import format_size, format_time

# The event's statement about the manifest at its place: present or on its way; absent; refused (and present only if
# present before).
Presence = Literal["here", "absent", "refused"]
_Given = Mapping[str, Any]  # the facts of an event
_Sentence = str | Callable[[_Given], str]
Ending = Literal["released", "expired", "abandoned", "replaced", "forced", "interrupted"]

EVICTED: Final = frozenset({"made_room", "trimmed", "evicted"})  # recorded before bytes are deleted
_LONGEST_TEXT: Final = 1000
_LONGEST_NAME: Final = 256
_LONGEST_LIST: Final = 20


@dataclass(frozen=True, slots=True)
class _FactType:
    """A fact's value types, format and default. An ellipsis as default: the fact is required."""

    types: tuple[type, ...]
    show: Callable[[Any], str] = str
    default: Any = ...

    @property
    def hidden(self) -> Fact:
        """The replacement for organisations that may not see the value."""
        return [] if list in self.types else ""

    def fits(self, value: object) -> bool:
        if isinstance(value, list):
            return list in self.types and all(isinstance(one, str) for one in value)
        return type(value) in self.types


_FACT_TYPES: Final = {
    "text": _FactType((str,)),
    "name": _FactType((str,), default=""),
    "revision": _FactType((str, type(None))),
    "list": _FactType((list,), ", ".join),
    "names": _FactType((list,), ", ".join, default=[]),
    "size": _FactType((int,), format_size),
    "count": _FactType((int,)),
    "files": _FactType((int, type(None)), default=None),
    "flag": _FactType((bool,)),
    "since": _FactType((float, int), format_time, default=0.0),  # 0: unknown
    "until": _FactType((float, int, type(None)), format_time, default=None),
}


@dataclass(frozen=True, slots=True)
class EventKind:
    sentence: _Sentence  # a format string over the facts, or a function that selects one
    facts: Mapping[str, _FactType]
    presence: Presence | None = None  # whether the manifest is at the event's place
    is_private: bool = False  # visible only to its own organisation
    names: tuple[str, ...] = ()  # facts that identify an organisation, hidden from the other organisations

    def complete(self, facts: Mapping[str, Fact]) -> dict[str, Fact]:
        """Return the facts with defaults filled in. Raises ``ValueError`` if one is missing or has a wrong type."""
        found: dict[str, Fact] = {}
        for name, known in self.facts.items():
            value = facts.get(name, known.default)
            if not known.fits(value):
                raise ValueError(f"the fact {name} cannot be {value!r}")
            found[name] = value
        return found

    def say(self, digest: str | None, facts: _Given) -> str:
        shown = {name: "None" if value is None else self.facts[name].show(value) for name, value in facts.items()}
        if "stage" in facts:
            shown["holder"] = _holder(facts["job"], facts["stage"])
        sentence = self.sentence if isinstance(self.sentence, str) else self.sentence(facts)
        return sentence.format(**shown, digest=digest)


@dataclass(frozen=True, slots=True)
class Event:
    """One decision, with the facts that it is based on.

    ``manifest`` and ``digest`` (of a file, a chunk or a slab) are written ``b3:…``. ``organisation`` is the requester.
    ``at`` is in seconds since the epoch. ``cluster`` and ``node`` are None in the mirror's own events. ``id`` and
    ``at`` are set when the event is recorded.
    """

    kind: str
    manifest: str | None = None
    digest: str | None = None
    organisation: str | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)
    id: str = ""
    at: float = 0.0
    cluster: str | None = None
    node: str | None = None

    @classmethod
    def of(
        cls,
        kind: str,
        facts: Mapping[str, Fact],
        *,
        manifest: Digest | str | None = None,
        digest: Digest | str | None = None,
        organisation: str | None = None,
    ) -> Self:
        """An event of the current decision. Raises ``ValueError`` when the facts do not match the kind."""
        if unknown := facts.keys() - KINDS[kind].facts.keys():
            raise ValueError(f"an event {kind!r} has no facts {sorted(unknown)}")
        return cls(
            kind,
            str(manifest) if manifest else None,
            str(digest) if digest else None,
            organisation and _clean(organisation, _LONGEST_NAME),
            KINDS[kind].complete({name: _storable(fact) for name, fact in facts.items()}),
        )

    def _understood(self) -> tuple[EventKind, dict[str, Fact]] | None:
        """The event's kind and facts.

        Returns:
            None: another version wrote it, with an unknown kind or other facts.
        """
        try:
            return KINDS[self.kind], KINDS[self.kind].complete(self.facts)
        except (KeyError, ValueError):
            return None

    @property
    def shown_facts(self) -> Mapping[str, Fact]:
        """The facts known to this version; all facts when the kind is unknown."""
        understood = self._understood()
        return understood[1] if understood else self.facts

    @property
    def presence(self) -> Presence | None:
        understood = self._understood()
        return understood[0].presence if understood else None

    @property
    def sentence(self) -> str:
        """The decision and its reason, as a clause about the manifest."""
        if (understood := self._understood()) is None:
            given = ", ".join(f"{name}={value}" for name, value in self.facts.items())
            return f"{self.kind} ({given[:_LONGEST_TEXT]})"
        kind, facts = understood
        return kind.say(self.digest, facts)

    def seen_by(self, organisation: str) -> Self | None:
        """The event as ``organisation`` may see it: without names of other organisations, or None."""
        if self.organisation in (None, organisation):
            return self
        understood = self._understood()
        if understood is None or understood[0].is_private:
            return None
        kind, facts = understood
        hidden = {name: kind.facts[name].hidden for name in kind.names}
        return replace(self, facts=facts | hidden, organisation=None)


def _storable(fact: Fact) -> Fact:
    if isinstance(fact, str):
        return _clean(fact, _LONGEST_TEXT)
    return [_clean(one, _LONGEST_TEXT) for one in fact[:_LONGEST_LIST]] if isinstance(fact, list) else fact


def _clean(text: str, longest: int) -> str:
    """Make text that every journal and database can store: file names may hold any bytes, and problems may be long."""
    return text.encode(errors="replace").decode().replace("\0", "?")[:longest]


# --- the kinds ---


def _holder(job: str, stage: str) -> str:
    """The stage's job or the prefetch that needs a manifest; without names it belongs to another organisation."""
    if not stage:
        return "a job of another organisation"
    return f"prefetch {stage}" if stage.startswith("pre_") else f"job {job} (stage {stage})"


def _admitted(facts: _Given) -> str:
    missing = "{bytes_missing} of {bytes_total} were missing"
    if not facts["bytes_missing"]:
        missing = "all of its {bytes_total} were there"
    cache = "{committed} held and {reserved} promised, of {budget}"
    return f"was leased for {{holder}}: {missing}; with it the cache has {cache}"


def _refused(facts: _Given) -> str:
    if facts["code"] == "CACHE_TOO_SMALL":
        why = "{needed} can never fit a cache of {budget}"
    elif facts["needed_files"] is not None:
        why = "{needed_files} more files did not fit: the file system had inodes for {free_files}"
    else:
        why = "{needed} more did not fit: of {budget}, {free} were free and {leased} in use"
    way = ", by {in_the_way}" if facts["in_the_way"] else ""
    return f"was not admitted for {{holder}} [{{code}}]: {why}{way}"


def _renewed(facts: _Given) -> str:
    return "stays leased for {holder} until " + ("it is released" if facts["expires_at"] is None else "{expires_at}")


_ENDINGS: Final[dict[str, str]] = {
    "released": "it was released",
    "expired": "its lease expired",
    "abandoned": "the directory that it was pulled to is gone",
    "replaced": "another pull replaced its directory",
    "forced": "a forced eviction ended its lease",
    "interrupted": "the command that pulled it has ended",
}


def _ended(facts: _Given) -> str:
    at = " at {expires_at}" if facts["ending"] == "expired" and facts["expires_at"] is not None else ""
    return f"is not leased for {{holder}} any more: {_ENDINGS.get(facts['ending'], '{ending}')}{at}"


def _gone(facts: _Given) -> str:
    chunks = "its chunks for the cluster were evicted" if facts["tier"] == "cluster" else "was evicted"
    return chunks + (" ({bytes}, used last at {last_used})" if facts["last_used"] else " ({bytes})")


def _made_room(facts: _Given) -> str:
    if facts["tier"] == "cluster":
        whom = "chunks of " + ("{newcomer}" if facts["newcomer"] else "another manifest")
    else:
        whom = "{holder}" + (", which brought {newcomer}" if facts["newcomer"] else "")
    return f"{_gone(facts)} as the least recently used, to make room for {whom}"


def _trimmed(facts: _Given) -> str:
    why = "its budget is {budget} now"
    if facts["budget"] < facts["allowed"]:
        why = "other data fills the disk, which left the tier {budget} of {allowed}"
    return f"{_gone(facts)} because the tier held {{held}} and {why}"


def _evicted(facts: _Given) -> str:
    force = "by force " if facts["forced"] else ""
    asked = "as {asked_by} requested ({eviction})" if facts["eviction"] else "on request"
    return f"{_gone(facts)} {force}{asked}" + (", although it was in use by {holders}" if facts["holders"] else "")


def _eviction_refused(facts: _Given) -> str:
    asked = "that {asked_by} requested ({eviction})" if facts["eviction"] else "on request"
    return f"was spared by an eviction {asked}: it was in use by " + ("{holders}" if facts["holders"] else "other jobs")


def _found(facts: _Given) -> str:
    whole = "whole" if facts["bytes_whole"] == facts["bytes_total"] else "{bytes_whole} of it whole"
    return f"was found when the agent started: {{bytes_total}}, {whole}"


def _lost(facts: _Given) -> str:
    again = "neither an agent nor its upstream has now" if facts["tier"] == "mirror" else "the next stage fetches again"
    return f"lost a part, which {again}: {_part(facts)}"


def _part(facts: _Given) -> str:
    return "{digest}" + (" of {path}" if facts["path"] else "") + " in the tier {tier} ({reason})"


def _source(facts: _Given) -> str:
    return "{source}" + ("" if facts["revision"] is None else " at {revision}")


def _tombstoned(facts: _Given) -> str:
    until = "" if facts["restorable_until"] is None else ", and can be restored until {restorable_until}"
    return "was evicted from the mirror ({eviction})" + until


def _facts(names: str) -> dict[str, _FactType]:
    """Parse ``name:type`` pairs; a fact without a type is text."""
    pairs = (name.partition(":") for name in names.split())
    return {name: _FACT_TYPES[kind or "text"] for name, _, kind in pairs}


def _private(sentence: _Sentence, facts: str, presence: Presence | None = None) -> EventKind:
    """A kind visible to one organisation: about its stage, its mirror, or damage in a slab that only it may read."""
    return EventKind(sentence, _facts(facts), presence, is_private=True)


def _stage(sentence: _Sentence, facts: str, presence: Presence | None = None) -> EventKind:
    return _private(sentence, f"stage job {facts}", presence)


def _left(sentence: _Sentence, facts: str, *names: str) -> EventKind:
    """A kind for a manifest that leaves a tier."""
    return EventKind(sentence, _facts(f"tier bytes:size last_used:since {facts}"), "absent", names=names)


_REQUEST: Final = "eviction asked_by"
# A chunk, slab or file whose bytes do not match its name; ``tier`` is its place.
_DAMAGE: Final = "tier reason path:name"
_STRANGERS: Final = ("eviction", "asked_by", "holders")

KINDS: Final[dict[str, EventKind]] = {
    # ``committed`` and ``reserved`` count the whole cache, this stage included.
    "admitted": _stage(
        _admitted, "bytes_total:size bytes_missing:size budget:size committed:size reserved:size", "here"
    ),
    # ``in_the_way``: holders of what could not be evicted. The numbers of files are set where inodes ran short.
    "refused": _stage(
        _refused,
        "code needed:size free:size leased:size budget:size in_the_way:names needed_files:files free_files:files",
        "refused",
    ),
    # READY, with the bytes per source tier.
    "arrived": _stage(
        "was READY for {holder}: {node} were on this node, {cluster} came from its cluster, {mirror} from the mirror",
        "node:size cluster:size mirror:size",
        "here",
    ),
    "failed": _stage("was given up for {holder}: {problem} [{code}]", "code problem"),
    # Files of a READY stage were lost, and cannot be fetched now.
    "not_mended": _stage("stays staged for {holder}, although files were lost: {problem} [{code}]", "code problem"),
    "renewed": _stage(_renewed, "expires_at:until"),
    "ended": _stage(_ended, "ending expires_at:until"),
    "resumed": _stage("was {state} for {holder} when the agent restarted, and was resumed", "state"),
    # Three reasons: a newcomer needs room, the budget fell, a caller requested it. ``holders``: owners of leases that
    # force broke.
    "made_room": _left(_made_room, "stage:name job:name newcomer:name", "stage", "job", "newcomer"),
    "trimmed": _left(_trimmed, "held:size budget:size allowed:size"),
    "evicted": _left(_evicted, f"{_REQUEST} forced:flag holders:names", *_STRANGERS),
    "eviction_refused": EventKind(_eviction_refused, _facts(f"tier {_REQUEST} holders:list"), names=_STRANGERS),
    "kept": EventKind("is still here: it could not be evicted ({problem})", _facts("problem"), "here"),
    "dropped": EventKind("was dropped: {why}", _facts("why"), "absent"),
    "found": EventKind(_found, _facts("bytes_total:size bytes_whole:size"), "here"),
    "damaged": _private(lambda facts: f"has a damaged part: {_part(facts)}", _DAMAGE),
    "repaired": _private(lambda facts: f"was repaired: {_part(facts)}", _DAMAGE),
    "lost": _private(_lost, _DAMAGE),
    # ``transferred`` bytes came from the upstream; ``reused`` bytes were in the store before.
    "mirrored": _private(
        lambda facts: (
            f"was mirrored from {_source(facts)} by {{mirror}}: {{files}} files, {{transferred}} were downloaded and "
            "{reused} were in the store"
        ),
        "mirror source revision:revision files:count transferred:size reused:size",
        "here",
    ),
    "pushed": _private(
        "was pushed as {source} by {mirror}: {files} files, {transferred} were sent and {reused} were in the store",
        "mirror source files:count transferred:size reused:size",
        "here",
    ),
    "replaced": _private("is not a checkpoint any more: {why}", "source why", "absent"),
    "reused": _private(
        lambda facts: f"was requested again by {{mirror}}: {_source(facts)}, which was in the store",
        "mirror source revision:revision",
        "here",
    ),
    "tombstoned": _private(_tombstoned, "eviction restorable_until:until", "absent"),
    "restored": _private("was restored on the mirror", "", "here"),
    # About no manifest: which secrets left the mirror, by their names.
    "secrets_given": _private(
        "gave the secrets {names} to rank {rank} of job {job} on {node}", "job rank:count node names:list"
    ),
    "collected": EventKind(
        "was collected from the mirror's store, which freed {bytes}", _facts("bytes:size"), "absent"
    ),
}


# --- why a manifest is, or is not, at a place ---


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a manifest is at a place, and the event that proves it.

    ``refused`` is the last refusal after that event.
    """

    is_here: bool
    because: Event | None = None
    refused: Event | None = None


def verdict(story: Iterable[Event], tier: str = "node") -> Verdict:
    """Evaluate one place's events about one manifest, oldest first. A refusal leaves the earlier state unchanged."""
    found = Verdict(is_here=False)
    for event in story:
        presence = event.presence
        if presence is None or event.facts.get("tier", tier) != tier:
            continue
        if presence == "refused":
            found = Verdict(found.is_here, found.because, refused=event)
        else:
            found = Verdict(is_here=presence == "here", because=event)
    return found


def explanation(story: Sequence[Event], place: str, *, is_here: bool) -> str:
    """One sentence on why the manifest is or is not cached at ``place``.

    ``is_here`` is what the place reports; ``story`` is as in ``verdict``.
    """
    said = verdict(story)
    opening = f"is {'' if is_here else 'not '}cached on {place}"
    if not is_here and said.refused is not None:
        return f"{opening}: at {format_time(said.refused.at)} it {said.refused.sentence}"
    if said.because is None:
        return f"{opening}: {'it arrived before the oldest recorded event' if is_here else 'no recorded event says that it ever arrived'}"
    link = " because" if said.is_here == is_here else "; the last recorded event says otherwise:"
    return f"{opening}{link} at {format_time(said.because.at)} it {said.because.sentence}"
