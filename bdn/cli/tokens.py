"""``bdn-admin tokens``: tokens of organisations, job controllers and agents for the mirror."""

from typing import Final

import click

from bdn.cli.clients import reachable_mirror
from bdn.cli.output import Output, check_usage, command_line, fields_of, parsed, table
from bdn.core.units import parse_duration
from bdn.wire.access_schema import Role, TokenRequest

_COLUMNS: Final = "id organisation role cluster team name created_at expires_at revoked_at"


@click.group()
def tokens() -> None:
    """Create and revoke tokens. The operator's token, BDN_TOKEN of the mirror, creates the first ones."""


@tokens.command()
@click.argument("name")
@click.option("--organisation", required=True, metavar="ORG", help="The organisation of the token.")
@click.option(
    "--role",
    required=True,
    type=click.Choice([str(role) for role in Role if role is not Role.POD]),
    help="operator: everything; controller: mirrors of ORG; agent: heartbeats only.",
)
@click.option("--cluster", metavar="NAME", help="Role agent: only for agents of this cluster.")
@click.option("--team", metavar="NAME", help="Role controller: only for projects of this team of ORG.")
@click.option(
    "--expires",
    "expires_seconds",
    metavar="DURATION",
    callback=parsed(parse_duration),
    help="Lifetime (90d, 12h); default: until revoked.",
)
@command_line
async def create(output: Output, **options: object) -> None:
    """Create a token and print it once; the mirror stores only its SHA-256. NAME is a label for people.

    \b
    Example: bdn-admin tokens create ci --organisation acme --role controller --expires 90d
    Example: bdn-admin tokens create trainers --organisation acme --role controller --team research
    Example: bdn-admin tokens create gpu-nodes --organisation default --role agent --cluster gpu
    """
    request = TokenRequest.model_validate(options)
    check_usage(request.check)
    async with reachable_mirror(output) as client:
        made = await client.create_token(request)
    output.say(f"token {made.id} for {made.name}; it is not shown again:")
    output.result(made, [made.token], [made.token])


@tokens.command()
@command_line
async def ls(output: Output) -> None:
    """List all tokens by name and id, never their values.

    \b
    Example: bdn-admin tokens ls --json
    """
    async with reachable_mirror(output) as client:
        found = await client.tokens()
    ids = [token.id for token in found.items]
    rows = [fields_of(token, _COLUMNS) for token in found.items]
    output.result(found, table(rows, "no tokens yet, only the operator token BDN_TOKEN"), ids)


@tokens.command()
@click.argument("token_id", metavar="ID")
@command_line
async def revoke(output: Output, *, token_id: str) -> None:
    """Revoke the token with this id: callers with it are refused from now on. Grants issued before stay valid until they expire.

    \b
    Example: bdn-admin tokens revoke tok_0123456789abcdef01234567
    """
    async with reachable_mirror(output) as client:
        revoked = await client.revoke_token(token_id)
    output.result(revoked, [f"token {revoked.id} for {revoked.name} is revoked"])
