"""``bdn-admin tokens``: tokens of organisations, job controllers and agents for the mirror."""

import click

from bdn.cli.clients import reachable_mirror
from bdn.cli.output import Output, check_usage, command_line, parsed
from bdn.core.units import format_time, parse_duration
from bdn.wire.access_schema import Role, Token, TokenRequest


@click.group()
def tokens() -> None:
    """Make and revoke tokens. The token in the mirror's own BDN_TOKEN is the operator's, and makes the first ones."""


@tokens.command()
@click.argument("name")
@click.option("--organisation", required=True, metavar="ORG", help="Whose it is.")
@click.option(
    "--role",
    required=True,
    type=click.Choice([str(role) for role in Role]),
    help="operator: everything; controller: what ORG mirrors; agent: heartbeats alone.",
)
@click.option("--cluster", metavar="NAME", help="Of role agent: for the agents of this cluster alone.")
@click.option("--team", metavar="NAME", help="Of role controller: for projects of this team of ORG alone.")
@click.option(
    "--expires",
    "expires_seconds",
    metavar="DURATION",
    callback=parsed(parse_duration),
    help="Good for so long (90d, 12h); else until revoked.",
)
@command_line
async def create(output: Output, **options: object) -> None:
    """Make a token and print it, once: the mirror keeps its SHA-256 alone. NAME is for people.

    \b
    Example: bdn-admin tokens create ci --organisation acme --role controller --expires 90d
    Example: bdn-admin tokens create trainers --organisation acme --role controller --team research
    Example: bdn-admin tokens create gpu-nodes --organisation default --role agent --cluster gpu
    """
    request = TokenRequest.model_validate(options)
    check_usage(request)
    async with reachable_mirror(output) as client:
        made = await client.create_token(request)
    output.say(f"{_line(made)}; it is not shown again:")
    output.result(made, [made.token], [made.token])


@tokens.command()
@command_line
async def ls(output: Output) -> None:
    """List all tokens, never the tokens themselves.

    \b
    Example: bdn-admin tokens ls --json
    """
    async with reachable_mirror(output) as client:
        found = await client.tokens()
    ids = [token.id for token in found.items]
    output.result(
        found, [_line(token) for token in found.items] or ["there is no token but the operator's BDN_TOKEN"], ids
    )


@tokens.command()
@click.argument("token_id", metavar="ID")
@command_line
async def revoke(output: Output, *, token_id: str) -> None:
    """Revoke the token with this id: whoever shows it is refused from now on. Grants that were made stay good until they expire.

    \b
    Example: bdn-admin tokens revoke tok_0123456789abcdef01234567
    """
    async with reachable_mirror(output) as client:
        revoked = await client.revoke_token(token_id)
    output.result(revoked, [_line(revoked)])


def _line(token: Token) -> str:
    whose = f" of cluster {token.cluster}" if token.cluster else f" of team {token.team}" if token.team else ""
    times = (("made", token.created_at), ("expires", token.expires_at), ("revoked", token.revoked_at))
    said = ", ".join(f"{what} {format_time(at.timestamp())}" for what, at in times if at is not None)
    return f"{token.id}  {token.organisation}  {token.role}{whose}  {token.name}  {said}"
