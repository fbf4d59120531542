"""The stages of a job on its nodes, as operators and tenants see them at the mirror while the agents fill."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bdn.client import Client, JobStage
from tests.doubles.hub import Hub
from tests.support.content.noise import MIB, noise
from tests.support.services.cluster import Cluster
from tests.support.services.commands import Shell, wait_until
from tests.support.services.services import agent_client

TOKEN: Final = "operator-token-9"
MODEL: Final = {f"{number}.safetensors": noise(MIB, number) for number in range(60)}  # at 500 kB/s two minutes
SIZE: Final = sum(map(len, MODEL.values()))


def client_of(cluster: Cluster, organisation: str) -> Client:
    named = ("--organisation", organisation, "--role", "controller")
    made = cluster.shell("operator").told("bdn-admin", "tokens", "create", organisation, *named)
    return Client(cluster.url, made["token"])


def begin(node: Shell, grant: str | None) -> Any:
    with agent_client(Path(node.extra["BDN_AGENT_SOCKET"])) as agent:
        return agent.post("/stages", json={"job_id": "train", "grant": grant}).raise_for_status().json()


def seen(client: Client, is_it: Callable[[list[JobStage]], bool]) -> list[JobStage]:
    found: list[JobStage] = []

    def looked() -> bool:
        found[:] = client.stages("train")
        return is_it(found)

    wait_until(looked, what="the state of the stages")
    return found


def test_a_stage_is_seen_while_it_fills_and_when_it_is_done_by_its_own_organisation_alone(tmp_path: Path) -> None:
    """Both organisations mirror the same content. The agent fills so slowly that only a restart without the limit ends it."""
    with Hub() as hub:
        hub.repo("org/model").commit(MODEL)
        cluster = Cluster(tmp_path, {"HF_ENDPOINT": hub.url, "BDN_AUTH": "token", "BDN_TOKEN": TOKEN})
        with (
            cluster.mirror(),
            client_of(cluster, "acme") as acme,
            client_of(cluster, "rival") as rival,
            Client(cluster.url, TOKEN) as operator,
        ):
            mirror, theirs = (one.mirror(["hf://org/model"]).wait() for one in (acme, rival))
            with cluster.agent("slow", BDN_AGENT_CLUSTER="east", BDN_AGENT_DOWNLOAD_RATE="500kB") as node:
                stage = begin(node, mirror.grant)
                (one,) = seen(acme, lambda found: any(0 < one.bytes_done < SIZE for one in found))
                assert (one.cluster, one.node, one.id, one.job) == ("east", "slow", stage["id"], "train")
                assert (one.organisation, one.mirror_id, one.alive) == ("acme", mirror.id, True)
                assert one.manifests == [mirror.sources[0].manifest] == [theirs.sources[0].manifest]
                assert (one.state, one.bytes_total) == ("STAGING", SIZE)
                assert one.bytes_per_second
                assert one.eta_seconds
                assert [one.id for one in operator.stages("train")] == [stage["id"]]
                assert rival.stages("train") == operator.stages("another") == []

            with cluster.agent("slow", BDN_AGENT_CLUSTER="east") as node:
                (one,) = seen(acme, lambda found: any(one.state == "READY" for one in found))
                assert (one.id, one.bytes_done, one.bytes_total, one.error) == (stage["id"], SIZE, SIZE, None)

                begin(node, theirs.grant)  # under the same name
                (one,) = seen(rival, lambda found: any(one.state == "READY" for one in found))
                assert (one.organisation, one.mirror_id) == ("rival", theirs.id)
                assert {one.organisation for one in acme.stages("train")} <= {"acme"}
