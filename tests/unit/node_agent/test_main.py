import pytest
from click.testing import CliRunner, Result

from node_agent.__main__ import main


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, arguments, env=environment)


def test_help_has_an_example() -> None:
    done = run("--help")

    assert done.exit_code == 0
    assert "BDN_AGENT_CACHE_BYTES=2TB bdn-node-agent" in done.stdout
    assert "--roles" in done.stdout


@pytest.mark.parametrize(("arguments", "environment", "words"), [
    (["--roles", "king"], {}, "error: BDN_AGENT_ROLES: "),
    ([], {"BDN_AGENT_CACHE_BYTES": "lots", "BDN_AGENT_PORT": "x"}, "BDN_AGENT_CACHE_BYTES: not a size"),
    ([], {"BDN_AGENT_HOST": "0.0.0.0"}, "BDN_AGENT_HOST: 0.0.0.0 is not a loopback address"),
    (["--colour"], {}, "No such option"),
])  # fmt: skip
def test_what_makes_no_sense_is_a_usage_error_that_names_it(
    arguments: list[str], environment: dict[str, str], words: str
) -> None:
    done = run(*arguments, **environment)

    assert done.exit_code == 2
    assert words in done.stderr
