"""Ways to read what is somebody else's."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_MATRIX: Final = "tests/promises/test_access_matrix.py"
_TOKENS: Final = "tests/integration/test_mirror_tokens.py"
_MANIFESTS: Final = f"{_MATRIX}::test_who_may_read_which_manifest"
_CHUNKS: Final = f"{_MATRIX}::test_who_may_read_which_chunk_on_the_api_and_on_the_data_plane"
_COSTS: Final = f"{_MATRIX}::test_what_is_not_yours_costs_what_costs_nothing"
_ROLES: Final = "tests/promises/test_access_matrix.py::test_every_route_is_closed_to_whoever_has_not_its_role"
_OTHERS: Final = "tests/promises/test_access_matrix.py::test_what_another_organisation_has_is_answered_like_nothing"
_LISTS: Final = "tests/promises/test_access_matrix.py::test_lists_hold_one_s_own_and_the_metrics_name_nobody"
_AGENTS: Final = "tests/promises/test_access_agents.py"
_SLAB: Final = f"{_AGENTS}::test_a_slab_with_another_organisations_files_is_read_by_nobody_else"
_ACCESS: Final = "bdn/mirror/access/access.py"
_TABLE: Final = "bdn/mirror/access/tokens.py"


def _broken(file: str, what: str, old: str, new: str, test: str, *also: str) -> Breakage:
    return Breakage("access", file, what, old, new, test, also)


BREAKAGES: Final = [
    _broken("node_agent/cache/held_chunks.py", "an agent gives each slab to whoever may read one of its files",
            "if self._verify is not None and is_closed_to(", "if False and is_closed_to(", _SLAB),
    _broken("node_agent/cache/held_chunks.py", "what an owner has brought and may not give is looked for again and again",
            "self._given_to(request, found[0]).file.close()", "found[0].file.close()",
            f"{_AGENTS}::test_a_layout_that_names_another_organisations_slab_opens_it_to_nobody"),
    _broken("node_agent/serve/owner.py", "what one organisation's layout names is every organisation's",
            "key = manifest, organisation", 'key = manifest, ""', _SLAB),
    _broken(_ACCESS, "a grant reads each manifest of its organisation", "if not reader.allows(manifest):", "if False:", _MANIFESTS),
    _broken(_ACCESS, "what others mirrored is readable", "if not await mirrors.may_read(session, owner, manifest.hex):",
            "if False:", _MANIFESTS),
    _broken(_ACCESS, "each role reads chunks", "reader.acting(Role.OPERATOR, None)", "pass", _CHUNKS),
    _broken(_ACCESS, "a digest is enough", "and await self._opens(manifest, owner, chunk):", "or True:", _CHUNKS),
    _broken(_ACCESS, "a grant outlives its manifest", "stands = await mirrors.may_read(session, organisation, manifest.hex)",
            "stands = True", _CHUNKS),
    _broken("bdn/mirror/db/layouts.py", "what exists is looked at more closely",
            "if (await session.execute(content)).first() is not None:",
            "if await session.get(ContentRow, digest) and (await session.execute(content)).first() is not None:", _COSTS),
    _broken("bdn/mirror/db/layouts.py", "a packed file opens all slabs that hold it",
            ".where(SlabSliceRow.slab == digest, ManifestContentRow.manifest == manifest, is_of(scope_of(organisation)))",
            ".where(SlabSliceRow.slab == digest, ManifestContentRow.manifest == manifest)", _CHUNKS),
    _broken("bdn/core/caller.py", "agents read like controllers", "if self.role is not needed:", "if False:", _MANIFESTS),
    _broken("bdn/core/caller.py", "a header makes anybody anyone", "if organisation not in (None, self.organisation):",
            "if False:", f"{_TOKENS}::test_an_operator_acts_for_the_organisation_that_it_names[sqlite]"),
    _broken("bdn/core/caller.py", "an agent speaks for each cluster", "if self.cluster not in (None, cluster):", "if False:",
            f"{_TOKENS}::test_an_agent_s_token_beats_for_its_cluster_and_reads_nothing[sqlite]"),
    _broken(_TABLE, "a revoked token goes on", "if row is None or row.revoked_at is not None:", "if row is None:", _MANIFESTS),
    _broken(_TABLE, "a token never expires", "row.expires_at <= self.clock()", "row.expires_at <= 0", _MANIFESTS),
    _broken(_TABLE, "the token itself is kept", "return sha256(token.encode()).hexdigest()", "return token",
            f"{_TOKENS}::test_a_token_is_shown_once_and_kept_as_its_digest[sqlite]"),
    _broken("bdn/wire/grants.py", "a signature is not looked at", '"verify_exp": False}',
            '"verify_exp": False, "verify_signature": False}', f"{_MATRIX}::test_a_grant_with_one_sign_changed_is_worth_nothing",
            f"{_AGENTS}::test_a_stage_takes_a_grant_that_is_whole_and_signed_and_not_over"),
    _broken("bdn/wire/grants.py", "tokens for clouds are grants", "audience=AUDIENCE,\n                issuer=ISSUER,",
            'audience=[AUDIENCE, "sts.amazonaws.com"],\n                issuer=ISSUER,', _MANIFESTS),
    _broken("bdn/wire/grants.py", "grants of whatever issuer", "issuer=ISSUER,\n", "\n", _MANIFESTS),
    _broken("bdn/mirror/access/access.py", "a controller empties the nodes", '(request.tier != "mirror" or request.force)',
            "request.force", f"{_TOKENS}::test_a_controller_evicts_what_its_organisation_has_on_the_mirror_and_nothing_else[sqlite]"),
    _broken("bdn/mirror/operations/operations.py", "evictions, verifications and prefetches are everybody's",
            "(row.kind, row.organisation) != (kind.name, organisation)", "row.kind != kind.name", _OTHERS,
            f"{_TOKENS}::test_a_controller_evicts_what_its_organisation_has_on_the_mirror_and_nothing_else[sqlite]"),
    _broken("bdn/wire/mirror_schema.py", "everybody sees others' jobs", 'update={"held_by": []}', "update={}",
            f"{_TOKENS}::test_jobs_that_hold_the_same_content_are_shown_to_operators_alone[sqlite]"),
    _broken("bdn/mirror/db/mirrors.py", "mirrors are everybody's", "MirrorRow.id == mirror_id, MirrorRow.organisation == organisation)",
            "MirrorRow.id == mirror_id)", _OTHERS),
    _broken("bdn/mirror/db/secrets.py", "secrets are everybody's", "SecretRow.organisation == organisation, SecretRow.name == name)",
            "SecretRow.name == name)", _OTHERS, f"{_TOKENS}::test_a_secret_of_one_organisation_opens_nothing_for_another"),
    _broken("bdn/mirror/db/mirrors.py", "a list holds others' mirrors",
            "query = select(MirrorRow).where(MirrorRow.organisation == organisation)\n    if status:",
            "query = select(MirrorRow)\n    if status:", _LISTS),
    _broken("bdn/mirror/api/parameters.py", "controllers make tokens", ".acting(Role.OPERATOR, organisation)",
            ".acting(Role.CONTROLLER, organisation)", _ROLES,
            f"{_TOKENS}::test_an_operator_s_token_makes_others_and_a_controller_s_does_not[sqlite]"),
    _broken("bdn/mirror/api/parameters.py", "controllers beat", ".acting(Role.AGENT, None)", "", _ROLES),
    _broken("node_agent/cache/held_chunks.py", "a peer gives to each grant", "if not any(grant.allows(manifest) for manifest in manifests):",
            "if False:", f"{_AGENTS}::test_an_agent_gives_chunks_to_grants_that_name_their_manifest_alone"),
    _broken("node_agent/cache/held_chunks.py", "a manifest in the header opens each chunk",
            "if request.manifest is not None and request.manifest not in self.names(request.digest):", "if False:",
            f"{_AGENTS}::test_an_agent_gives_chunks_to_grants_that_name_their_manifest_alone"),
    _broken("node_agent/cache/held_chunks.py", "a peer tells each grant what is in a manifest",
            "if not self.verify(request.bearer).allows(request.manifest):", "if False:",
            f"{_AGENTS}::test_an_agent_gives_manifests_and_layouts_to_grants_that_name_them_alone"),
    _broken("node_agent/trust.py", "what expired is remembered as good", "if grant.expires_at <= now:", "if False:",
            "tests/unit/node_agent/test_trust.py"),
    _broken("bdn/wire/errors.py", "what the mirror has not got is a peer's own failure",
            "_KINDS.get(error.code, BdnError) if isinstance(error, ReportedError) else type(error)", "type(error)",
            f"{_AGENTS}::test_an_agent_gives_chunks_to_grants_that_name_their_manifest_alone"),
    _broken("bdn/mirror/db/names.py", "what others have is looked at more closely",
            "ManifestContentRow.content == content, is_mirrored_for(organisation))", "ManifestContentRow.content == content)", _OTHERS),
]  # fmt: skip
