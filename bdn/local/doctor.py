"""What ``bdn doctor`` examines: settings, this machine, the services that answer, and the rates between them.

Requests go to the configured mirror and agent alone. A check that fails is a finding, not an error.
"""

import asyncio
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final, Protocol, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

import bdn
from bdn.core.chunk import Digest, chunk_range
from bdn.core.errors import BdnError, InvalidRequestError, NotFoundError, UnauthenticatedError
from bdn.core.findings import (
    Examination,
    Fact,
    Finding,
    Measured,
    judge_certificate,
    judge_clock,
    judge_directory,
    judge_rates,
    judge_settings,
)
from bdn.core.manifest import PageEntry, Root, read_page
from bdn.core.units import counted, format_size
from bdn.disk.durable import nearest_folder, opened
from bdn.disk.syscalls import file_system_name
from bdn.local.hub_cache import hub_cache_root
from bdn.mirror.settings import MirrorSettings
from bdn.net.ambient import check_authorities, check_proxies
from bdn.net.api_clients import AgentClient, MirrorClient
from bdn.net.client import ServiceClient, at_port
from bdn.net.http1.pool import ConnectionPool
from bdn.net.tls import Authorities, certificate, valid_until
from bdn.settings import ClientSettings, FileSettings, SettingsError
from bdn.transfer.chunk_readers import PartialChunk
from bdn.transfer.http_chunks import HttpChunkReader
from bdn.wire.stage_schema import TERMINAL

_ANSWER_SECONDS: Final = 10.0  # for each answer of a service
_MOST_BYTES: Final = 64 * 1024**2  # read from the mirror
_LONGEST_SECONDS: Final = 2.0
_HUB: Final = "https://huggingface.co"
_USER: Final = re.compile(r"(?<=//).*@", re.DOTALL)  # to the last @: passwords may hold any character
_HUB_VARIABLES: Final = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_ENDPOINT")
_OFFLINE_VARIABLES: Final = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_Settings = TypeVar("_Settings", bound=FileSettings)


class ExamineAgent(Protocol):
    """The entry point ``doctor`` of ``bdn.embedded``, which the agent's package provides."""

    def __call__(self, *, measure: bool) -> Examination: ...


async def examine(*, measure: bool) -> list[Finding]:
    """All findings, in the order of the report. Without ``measure`` no rate is measured."""
    findings: list[Finding] = []
    client = _loaded(ClientSettings, findings)
    mirror = _loaded(MirrorSettings, findings)
    machine = await asyncio.to_thread(_machine, measure=measure)
    findings += machine.findings
    if mirror is not None:
        findings += await asyncio.to_thread(lambda: list(_of_mirror(mirror)))
    findings += await asyncio.to_thread(lambda: list(_environment(os.environ)))
    network = Measured(reason="the settings are wrong")
    if client is not None:
        network = await _services(client, findings, measure=measure)
    findings.append(judge_rates(machine.write, machine.read, network))
    said = {(one.check, one.message): one for one in findings}  # programs share settings
    return [_without_users(finding) for finding in said.values()]


def _without_users(finding: Finding) -> Finding:
    """The finding without users and passwords of its addresses."""

    def hidden(fact: Fact) -> Fact:
        return _USER.sub("…@", fact) if isinstance(fact, str) else fact

    return replace(
        finding,
        message=_USER.sub("…@", finding.message),
        facts={name: hidden(fact) for name, fact in finding.facts.items()},
    )


# --- settings ---


def _loaded(kind: Callable[[], _Settings], findings: list[Finding]) -> _Settings | None:
    try:
        return kind()
    except SettingsError as error:
        findings += judge_settings(str(error))
        return None


def _machine(*, measure: bool) -> Examination:
    (entry,) = entry_points(group="bdn.embedded", name="doctor")
    examine_agent: ExamineAgent = entry.load()
    return examine_agent(measure=measure)


def certificate_findings(prefix: str, chain: Path | None, key: Path | None, program: str) -> Iterator[Finding]:
    """About the certificate of the settings that begin with ``prefix``; none if the program has no certificate."""
    try:
        certificate(prefix, chain, key)
        if chain is not None:
            left = valid_until(f"{prefix}_CERT", chain) - time.time()
            yield judge_certificate(f"{prefix}_CERT", str(chain), left)
    except BdnError as error:
        advice = f"Correct the files: the {program} does not start with them."
        yield Finding(f"certificate of {prefix}_CERT", "problem", str(error), advice)


def _of_mirror(settings: MirrorSettings) -> Iterator[Finding]:
    """The store's disk, the certificate, and what upstreams may be."""
    parts = urlsplit(settings.effective_store)
    if parts.scheme == "file":
        place = nearest_folder(Path(parts.path))
        try:
            with opened(place, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
                name, disk = file_system_name(descriptor), os.fstatvfs(descriptor)
            free = disk.f_bavail * disk.f_frsize
            yield judge_directory("store", parts.path, file_system=name, free=free, budgets=None, setting="BDN_STORE")
        except OSError as error:
            advice = "Run bdn doctor as the user of the mirror, or name another directory in BDN_STORE."
            yield Finding("store", "note", f"{place}: {error.strerror}", advice)
    yield from certificate_findings("BDN_TLS", settings.tls_cert, settings.tls_key, "mirror")
    try:
        _ = settings.upstreams
    except (BdnError, ValueError) as error:
        yield Finding("upstreams", "problem", str(error), "Correct the variable, or unset it.")
    allowed = settings.egress_allow
    yield Finding(
        "egress", "ok", f"the public internet{f' and {allowed}' if allowed else ''}", None, {"allow": allowed}
    )


# --- the environment ---


def _environment(environ: Mapping[str, str]) -> Iterator[Finding]:
    try:
        check_proxies()
        used = getproxies_environment()
        named = {kind: used[kind].rpartition("@")[2] for kind in ("https", "all", "no") if used.get(kind)}
        shown = ", ".join(f"{kind} {address}" for kind, address in named.items()) or "none"
        yield Finding("proxies", "ok", shown, None, {f"{kind}_proxy": address for kind, address in named.items()})
    except BdnError as error:
        yield Finding("proxies", "problem", str(error), "Correct the variable, or unset it.")
    try:
        check_authorities(environ, "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
    except BdnError as error:
        yield Finding("authorities", "problem", str(error), "Correct the variable, or unset it.")
    yield _hub(environ)


def _hub(environ: Mapping[str, str]) -> Finding:
    given = {name: environ[name] for name in _HUB_VARIABLES if environ.get(name)}
    facts: dict[str, Fact] = {**given, "hub_cache": str(hub_cache_root(environ))}
    shown = ", ".join(f"{name}={value}" for name, value in given.items())
    offline = [name for name in _OFFLINE_VARIABLES if environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")]
    endpoint = environ.get("HF_ENDPOINT") or _HUB
    if urlsplit(endpoint).scheme not in ("http", "https"):
        return Finding(
            "hub", "problem", f"{shown}: HF_ENDPOINT is not an address", "Correct HF_ENDPOINT, or unset it.", facts
        )
    if offline:
        advice = f"Unset {' and '.join(offline)} to mirror from the hub."
        message = f"offline: {', '.join([*offline, *given])} set; sources of the hub are refused"
        return Finding("hub", "note", message, advice, facts)
    if endpoint.rstrip("/") != _HUB:
        advice = "Unset HF_ENDPOINT to mirror from huggingface.co."
        return Finding("hub", "note", f"{shown}: hf:// means another hub", advice, facts)
    return Finding("hub", "ok", shown or f"{_HUB}, cache {facts['hub_cache']}", None, facts)


# --- services ---


async def _services(settings: ClientSettings, findings: list[Finding], *, measure: bool) -> Measured:
    """Adds the findings about mirror, clock and agent. Returns the rate from the mirror."""
    try:
        authorities = await asyncio.to_thread(Authorities, settings.tls_ca)
        if settings.tls_ca is not None:
            left = await asyncio.to_thread(valid_until, "BDN_TLS_CA", settings.tls_ca) - time.time()
            findings.append(judge_certificate("BDN_TLS_CA", str(settings.tls_ca), left))
        client = MirrorClient(
            settings.url,
            settings.token,
            organisation=settings.organisation,
            timeout_seconds=_ANSWER_SECONDS,
            authorities=authorities,
        )
    except InvalidRequestError as error:
        findings.append(Finding("mirror", "problem", str(error), "Correct the setting, or unset it."))
        network = Measured(reason="no mirror can be requested")
    else:
        async with client:
            offset = await _offset(client)
            found = await _mirror(client, settings)
            findings += [found, judge_clock(offset)]
            network = Measured(reason="not measured" if offset is not None else "no mirror answers")
            if measure and offset is not None:
                network = await _network(client, settings, authorities)
    async with AgentClient(f"unix:{settings.effective_agent_socket}", timeout_seconds=_ANSWER_SECONDS) as agent:
        findings.append(await _agent(agent, settings))
    return network


async def _offset(client: MirrorClient) -> float | None:
    """Seconds that this clock is ahead of the mirror's, which ``Date`` cuts to a second; None: no answer."""
    before = time.time()
    try:
        served = await client.served_at()
    except BdnError:
        return None
    return None if served is None else (before + time.time()) / 2 - served - 0.5


async def _mirror(client: MirrorClient, settings: ClientSettings) -> Finding:
    facts: dict[str, Fact] = {"address": client.base_url, "ready": False}
    try:
        await client.check_ready()
    except BdnError as error:
        is_named = "url" in settings.model_fields_set
        if not is_named and error.code == "STORE_UNAVAILABLE":
            advice = "Start 'bdn up' or 'bdn serve' for a mirror that stays, or set BDN_URL; bdn pull needs none."
            return Finding("mirror", "note", f"none answers at {client.base_url}", advice, facts)
        return Finding("mirror", "problem", str(error), "Start the mirror, or correct BDN_URL.", facts)
    facts["ready"] = True
    version = await _version(client)
    try:
        running = await client.mirrors("SYNCING")
    except BdnError as error:
        message = f"{version or 'unknown version'} at {client.base_url}, ready; what it does is unknown: {error}"
        advice = "Set BDN_TOKEN to a valid token of a controller or an operator."
        is_refused = error.code == UnauthenticatedError.code and settings.token is not None
        if is_refused and await _is_of_an_agent(client):
            is_refused, advice = False, "For this check alone set BDN_TOKEN to a token of a controller or an operator."
        return Finding("mirror", "problem" if is_refused else "note", message, advice, {**facts, "version": version})
    rate = sum(mirror.bytes_per_second or 0 for mirror in running)
    facts |= {"version": version, "mirrors_running": len(running), "bytes_per_second": rate}
    doing = (
        f"{counted(len(running), 'mirror')} running at {format_size(int(rate))}/s" if running else "no mirror running"
    )
    return _of_version("mirror", f"at {client.base_url}, ready, {doing}", version, facts)


async def _is_of_an_agent(client: MirrorClient) -> bool:
    """Whether the token is valid for agents, by a request that only they may send."""
    try:
        await client.project_uses("doctor")
    except BdnError as error:
        return error.code == NotFoundError.code
    return True


async def _agent(client: AgentClient, settings: ClientSettings) -> Finding:
    socket = settings.effective_agent_socket
    facts: dict[str, Fact] = {"address": client.address, "ready": False}
    try:
        await client.check_ready()
        stages, cache, version = (await client.stages()).items, await client.cache(), await _version(client)
    except BdnError as error:
        if "agent_socket" not in settings.model_fields_set and not await asyncio.to_thread(os.path.lexists, socket):
            advice = "Start 'bdn up' or 'bdn-node-agent' for an agent that stays; bdn pull needs none."
            return Finding("agent", "note", f"none: there is no {socket}", advice, facts)
        if await asyncio.to_thread(os.path.exists, socket) and not os.access(socket, os.W_OK):
            advice = "Run bdn doctor as the agent's user, or as a member of its group."
            return Finding("agent", "note", f"{socket} is closed to user {os.geteuid()}", advice, facts)
        return Finding("agent", "problem", str(error), "Start the agent, or correct BDN_AGENT_SOCKET.", facts)
    filling = [stage for stage in stages if stage.state not in TERMINAL]
    rate = sum(stage.bytes_per_second or 0 for stage in filling)
    held = sum(tier.committed for tier in cache.tiers.values())
    budget = sum(tier.budget for tier in cache.tiers.values())
    facts |= {
        "ready": True,
        "version": version,
        "stages_filling": len(filling),
        "bytes_per_second": rate,
        "held_bytes": held,
        "budget_bytes": budget,
    }
    doing = f"{counted(len(filling), 'stage')} filling at {format_size(int(rate))}/s" if filling else "no stage filling"
    message = f"at {client.address}, ready, {doing}, holds {format_size(held)} of {format_size(budget)}"
    problems = [f"tier {name}: {tier.problem}" for name, tier in cache.tiers.items() if tier.problem]
    if problems:
        advice = "Mend the disk of BDN_AGENT_CACHE_DIR: the agent admits nothing new."
        return Finding("agent", "problem", f"{message}; {'; '.join(problems)}", advice, facts)
    return _of_version("agent", message, version, facts)


async def _version(client: ServiceClient) -> str | None:
    try:
        return await client.version()
    except BdnError:
        return None


def _of_version(check: str, message: str, version: str | None, facts: Mapping[str, Fact]) -> Finding:
    if version == bdn.__version__:
        return Finding(check, "ok", f"{version} {message}", None, facts)
    advice = "Run the same version of BDN on all machines."
    message = f"{version or 'unknown version'} {message}; this command is {bdn.__version__}"
    return Finding(check, "note", message, advice, facts)


# --- the rate from the mirror ---


async def _network(client: MirrorClient, settings: ClientSettings, authorities: Authorities) -> Measured:
    """Reads chunks of the newest READY mirror, at most 64 MiB and about two seconds, one after the other."""
    try:
        newest = await client.mirrors("READY", limit=1)
        if not newest:
            return Measured(reason="the mirror has no READY mirror to read from")
        mirror = await client.mirror(newest[0].id)
        manifest = next((source.manifest for source in mirror.sources if source.manifest), None)
        if mirror.grant is None or manifest is None:
            return Measured(reason="the newest READY mirror has nothing to read")
        root, plane = await client.root(Digest.parse(manifest), mirror.grant)
        if root is None:
            raise NotFoundError(f"manifest {manifest}")
        with closing(ConnectionPool(timeout_seconds=_ANSWER_SECONDS, authorities=authorities)) as pool:
            reader = HttpChunkReader(pool, at_port(settings.url, plane.port), mirror.grant)
            return await asyncio.to_thread(_read_chunks, reader, root)
    except (BdnError, ValueError) as error:
        return Measured(reason=str(error))


def _read_chunks(reader: HttpChunkReader, root: Root) -> Measured:
    page = root.pages[0]
    content = bytearray(page.size)
    first = PartialChunk(page.digest, memoryview(content))
    reader.read_into(first)
    first.check()
    chunks = dict(chunk for entry in read_page(content) for chunk in _chunks_of(entry))
    done, began = 0, time.monotonic()
    for digest, size in chunks.items():
        if done >= _MOST_BYTES or (done and time.monotonic() - began >= _LONGEST_SECONDS):
            break
        with mmap.mmap(-1, size) as area, memoryview(area) as buffer:
            reader.read_into(PartialChunk(digest, buffer))
        done += size
    if not done:
        return Measured(reason="the newest READY mirror has no bytes")
    return Measured(done / max(time.monotonic() - began, 1e-6))


def _chunks_of(entry: PageEntry) -> Iterator[tuple[Digest, int]]:
    """Names and sizes of the chunks to fetch."""
    if entry.slice is not None:
        yield entry.slice.slab, entry.slice.slab_size
    for index, digest in enumerate(entry.chunks, entry.start):
        yield digest, chunk_range(entry.size, index).size
