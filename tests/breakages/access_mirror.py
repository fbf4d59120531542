"""Ways to let the mirror give what is somebody else's: its keys, its tokens, its settings, and what its upstreams hold."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_MIRROR: Final = "tests/integration/test_mirror_access.py::"
_TOKENS: Final = "tests/integration/test_mirror_tokens.py::"
_EVICTION: Final = (
    "tests/promises/test_access_matrix.py::test_an_eviction_of_another_s_manifest_takes_nothing_and_says_nothing"
)
_VERIFICATION: Final = (
    "tests/promises/test_access_matrix.py::test_a_verification_neither_reads_nor_tells_of_another_s_private_slab"
)
_NEVER: Final = "tests/promises/test_restoring.py::test_what_was_never_mirrored_is_not_found"
_BINDING: Final = f"{_MIRROR}test_a_mirror_that_would_be_open_to_others_does_not_start"


def _broken(file: str, what: str, old: str, new: str, test: str, *also: str) -> Breakage:
    return Breakage("access", file, what, old, new, test, also)


BREAKAGES: Final = [
    _broken("bdn/wire/grants.py", "agents are told the key that signs", "OKPAlgorithm.to_jwk(key.public_key(), as_dict=True)",
            "OKPAlgorithm.to_jwk(key, as_dict=True)", f"{_MIRROR}test_a_grant_is_verified_with_the_public_key_alone"),
    _broken("bdn/mirror/keys.py", "everybody on the machine reads the key that signs", "partial.touch(mode=0o600, exist_ok=False)",
            "partial.touch(exist_ok=False)",
            f"{_MIRROR}test_the_signing_key_survives_a_restart_and_is_readable_by_its_owner_alone"),
    _broken("bdn/mirror/ingest/requests.py", "a grant is given for what is left of a mirror",
            "if not all(source.manifest in held for source in sources):",
            "if not any(source.manifest in held for source in sources):",
            f"{_MIRROR}test_there_is_no_grant_for_what_was_evicted"),
    _broken("bdn/mirror/access/access.py", "who sends no token is the operator", "is_his = bearer is not None and hmac",
            "is_his = bearer is None or hmac", "tests/promises/test_access_matrix.py::test_every_route_is_closed_to_whoever_has_not_its_role"),
    _broken("bdn/mirror/access/access.py", "a replica remembers the tokens that it has seen",
            "known = await self.tokens.caller(bearer)",
            'known = self._objects.get(("token", bearer)) or self._objects.setdefault(\n'
            '                ("token", bearer), await self.tokens.caller(bearer)\n            )',
            f"{_TOKENS}test_a_token_that_is_revoked_at_one_replica_ends_at_the_other",
            f"{_TOKENS}test_what_is_revoked_or_expired_is_refused_like_what_never_was[sqlite]"),
    _broken("bdn/wire/grants.py", "a grant goes on for a minute after its end", "if grant.expires_at <= now:",
            "if grant.expires_at <= now - 60:", "tests/promises/test_access_matrix.py::test_who_may_read_which_manifest"),
    _broken("bdn/sources/huggingface/source.py", "private content is everybody's", "PUBLIC if repository.public else scope_of(self._organisation)",
            "PUBLIC", f"{_MIRROR}test_private_content_is_never_found_through_another_organisation_s_identity"),
    _broken("bdn/sources/huggingface/source.py", "public content is read once for each organisation",
            "PUBLIC if repository.public else scope_of(self._organisation)", "scope_of(self._organisation)",
            f"{_MIRROR}test_public_content_of_the_hub_is_shared_between_organisations"),
    _broken("bdn/mirror/db/mirrors.py", "a mirror that runs for somebody else is joined",
            "MirrorRow.organisation == organisation, MirrorRow.request_key == request_key, MirrorRow",
            "MirrorRow.request_key == request_key, MirrorRow",
            f"{_MIRROR}test_the_same_request_of_two_organisations_is_two_mirrors"),
    _broken("bdn/mirror/app.py", "every address is taken for this machine's", '("127.0.0.1", "::1", "localhost")',
            '("127.0.0.1", "::1", "localhost", "0.0.0.0")', f"{_BINDING}[any address]"),
    _broken("bdn/mirror/app.py", "an empty token opens the mirror", 'settings.auth == "token" and not settings.token:',
            'settings.auth == "token" and settings.token is None:', f"{_BINDING}[empty token]"),
    _broken("bdn/mirror/app.py", "tenants read with the credentials of the process", 'ambient_credentials=settings.auth == "off",',
            "ambient_credentials=True,", f"{_MIRROR}test_with_authentication_the_process_s_own_credentials_are_nobody_s"),
    _broken("bdn/wire/access_schema.py", "an organisation's name is looked at in front alone",
            'Field(pattern=f"^{ORGANISATION_PATTERN}$")', 'Field(pattern=f"^{ORGANISATION_PATTERN}")',
            f"{_TOKENS}test_a_request_that_makes_no_sense_makes_no_token"),
    _broken("bdn/net/chunk_server/connection.py", "the data plane answers each verb like GET", 'if head.method not in ("GET", "HEAD"):',
            'if head.method in ("CONNECT", "TRACE"):',
            "tests/promises/test_access_matrix.py::test_no_other_verb_tells_what_exists_or_does_anything"),
    _broken("bdn/mirror/db/mirrors.py", "what others mirrored is told from what nobody did",
            ".where(MirrorRow.organisation == organisation, MirrorSourceRow.manifest.is_not(None))",
            ".where(MirrorSourceRow.manifest.is_not(None))", _EVICTION, _NEVER),
    _broken("bdn/mirror/db/objects.py", "a verification tells of everybody's slabs with a file of the manifest",
            "inside.where(is_of(scope_of(reach.organisation)))", "inside", _VERIFICATION),
]  # fmt: skip
