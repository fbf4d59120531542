"""What a user and an operator see of the egress guard."""

from pathlib import Path

from tests.doubles.hub import Hub
from tests.support.services.commands import Shell


def test_a_refused_upstream_ends_a_command_with_1_and_says_what_the_operator_can_do(
    shell: Shell, hub: Hub, tmp_path: Path
) -> None:
    hub.repo("org/model").commit({"config.json": b"{}"})

    pulled = shell.run("bdn", "pull", "hf://org/model", "out", "--json", BDN_EGRESS_ALLOW="")

    assert pulled.code == 1
    assert "EGRESS_REFUSED" in pulled.out + pulled.err
    assert "127.0.0.1 may not be contacted: it is a loopback address" in pulled.out + pulled.err
    assert "BDN_EGRESS_ALLOW" in pulled.out + pulled.err
    assert hub.log.count() == 0
    assert not (tmp_path / "out").exists()


def test_an_entry_that_cannot_be_read_is_told_at_the_start(shell: Shell) -> None:
    serving = shell.run("bdn", "serve", BDN_EGRESS_ALLOW="minio.corp, http://10.0.0.5:9000")

    assert serving.code == 2
    assert "BDN_EGRESS_ALLOW" in serving.err
    assert "'http://10.0.0.5:9000'" in serving.err
