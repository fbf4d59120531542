"""``bdn-admin secrets``: secrets that the mirror stores encrypted. Values are never arguments of a command line."""

import sys
from collections.abc import Sequence
from typing import BinaryIO, Final

import click

from bdn.cli.clients import reachable_mirror
from bdn.cli.output import INTERRUPTED, Output, command_line, fields_of, say_interrupted, table
from bdn.core.errors import InvalidRequestError, LimitExceededError
from bdn.mirror.db.secrets import new_key as made_key
from bdn.wire.access_schema import LIMIT_VALUE_BYTES, SecretBody, SecretEntry, is_secret_name

_LONGEST: Final = LIMIT_VALUE_BYTES + 2  # with a line end, and one more than the limit


# Both are read during parsing: a prompt inside an event loop would ignore Ctrl-C.


def _checked_name(_: click.Context, __: click.Parameter, name: str) -> str:
    if not is_secret_name(name):
        problem = f"{name[:140]!r} cannot name a secret: letters, digits, '_', '.' and '-', at most 128"
        raise click.BadParameter(f"{problem}, not beginning with '.' or '-'")
    return name


def _read_value(context: click.Context, _: click.Parameter, file: BinaryIO | None) -> bytes:
    if file is not None or not sys.stdin.isatty():
        return (file or sys.stdin.buffer).read(_LONGEST)
    try:
        # click processes absent options last, so NAME is parsed already.
        return str(click.prompt(f"value of {context.params['name']}", hide_input=True, err=True)).encode()
    except click.Abort:
        say_interrupted()
        context.exit(INTERRUPTED)


@click.group()
def secrets() -> None:
    """Store secrets for sources in the mirror's database, encrypted with the key in BDN_SECRETS_KEY.

    \b
    export BDN_SECRETS_KEY=$(bdn-admin secrets new-key)     for the mirror and its workers
    """


@secrets.command("set")
@click.argument("name", callback=_checked_name)
@click.option(
    "--from-file",
    "value",
    type=click.File("rb"),
    callback=_read_value,
    metavar="FILE",
    help="Read the value from a file; - is standard input.",
)
@command_line
async def set_(output: Output, *, name: str, value: bytes) -> None:
    """Store a secret under NAME, or replace its value.

    The value comes from a file, from standard input, or from a prompt without echo. One trailing newline is dropped.

    \b
    Example: bdn-admin secrets set hf_token
    Example: bdn-admin secrets set my_keys --from-file keys.json
    """
    body = SecretBody(value=_text(value))
    body.check()
    async with reachable_mirror(output, even_a_new_one=True) as client:
        entry = await client.set_secret(name, body)
        where = client.address
    if entry.outranked:
        output.warn(f"the mirror's environment or BDN_SECRETS_DIR holds {name!r} too, and comes first")
    output.result(entry, [f"secret {name!r} is set, at {where}"])


@secrets.command()
@command_line
async def ls(output: Output) -> None:
    """List the names of the secrets, never their values.

    \b
    Example: bdn-admin secrets ls --json
    """
    async with reachable_mirror(output) as client:
        found = await client.secrets()
    output.result(found, _table(found.items, "no secrets"))


@secrets.command()
@click.argument("name", callback=_checked_name)
@command_line
async def rm(output: Output, *, name: str) -> None:
    """Delete the secret NAME. READY mirrors no longer need it.

    \b
    Example: bdn-admin secrets rm hf_token
    """
    async with reachable_mirror(output) as client:
        await client.remove_secret(name)
    output.result({"name": name, "removed": True}, [f"secret {name!r} is removed"])


@secrets.command()
@command_line
async def rotate(output: Output) -> None:
    """Encrypt all secrets again with the first key of BDN_SECRETS_KEY.

    The older keys can then be removed, unless the command lists secrets that still need them. An operator rotates the secrets of
    all organisations; BDN_ORGANISATION or another token narrows it to one organisation. Every process of the mirror must have the
    new key first: add it as the second key everywhere, restart, make it the first, restart, rotate.

    \b
    Example: bdn-admin secrets rotate
    """
    async with reachable_mirror(output) as client:
        found = await client.rotate_secrets()
    output.result(found, [*_table(found.items), _reach(found.others_left)])


@secrets.command("new-key")
@command_line
async def new_key(output: Output) -> None:
    """Print a new key for BDN_SECRETS_KEY. BDN does not store it: if it is lost, all secrets must be set again.

    \b
    Example: export BDN_SECRETS_KEY=$(bdn-admin secrets new-key)
    """
    key = made_key()
    output.result({"key": key}, [key])


def _text(content: bytes) -> str:
    if len(content) == _LONGEST:
        raise LimitExceededError("bytes of the secret", len(content), LIMIT_VALUE_BYTES)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise InvalidRequestError("the secret's value is not text") from None
    return text.removesuffix("\n").removesuffix("\r")


def _reach(others_left: int | None) -> str:
    if others_left is None:
        return "only the secrets of this organisation were checked; secrets of other organisations may still need the older keys"
    if others_left:
        return f"{others_left} secrets of other organisations stay under keys that the mirror does not have"
    return "all secrets are encrypted with the first key: remove the older keys from BDN_SECRETS_KEY"


def _table(items: Sequence[SecretEntry], empty: str | None = None) -> list[str]:
    return table([fields_of(one, "name updated_at sealed_with outranked") for one in items], empty)
