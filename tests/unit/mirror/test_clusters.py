"""The file ``BDN_KUBERNETES``: what it may say, and the one error of a file that says something else."""

import re
from pathlib import Path
from typing import Any, Final

import pytest

from bdn.core.errors import InvalidRequestError
from bdn.mirror.access.clusters import KubernetesCluster, load_clusters
from bdn.mirror.access.service_accounts import ServiceAccounts
from bdn.mirror.app import load_trusted_clusters
from bdn.mirror.settings import MirrorSettings

GOOD: Final = """
[clusters.gpu]
issuer = "https://kubernetes.default.svc"
audience = "bdn"
keys = "https://kubernetes.default.svc/openid/v1/jwks"
agents = "bdn/bdn-agent"
organisation = "default"

[clusters.gpu.namespaces.research]
organisation = "acme"
team = "vision"

[clusters.gpu.jobs]
image = "bdn"
url = "http://mirror.bdn.svc:8460"

[clusters.gpu.jobs.gpus.H100]
node_labels = {"nvidia.com/gpu.product" = "H100"}

[clusters.gpu.namespaces.tuning]
organisation = "acme"
team = "vision"
jobs = true

[clusters.gpu.namespaces.training]
organisation = "acme"
jobs = true
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "kubernetes.toml"
    file.write_text(text)
    return file


def test_load__good_file__has_the_place_of_each_namespace(tmp_path: Path) -> None:
    (name, cluster), *_ = load_clusters(written(tmp_path, GOOD)).items()
    assert (name, cluster.agents) == ("gpu", "bdn/bdn-agent")
    assert cluster.place_of(name, "research") == ("acme", "vision")
    assert cluster.place_of(name, "lab") == ("default", "gpu.lab")
    assert cluster.place_of(name, "training") == ("acme", None)


def test_load__namespaces_of_jobs__are_chosen_by_team_and_then_by_organisation(tmp_path: Path) -> None:
    cluster = load_clusters(written(tmp_path, GOOD))["gpu"]
    found = [cluster.jobs_in(*of) for of in (("acme", "vision"), ("acme", "speech"), ("rival", "vision"))]
    assert found == ["tuning", "training", None]
    assert cluster.jobs is not None
    h100, unknown = cluster.jobs.gpu("h100"), cluster.jobs.gpu("B200")
    assert (h100 and h100.resource, unknown) == ("nvidia.com/gpu", None)
    assert cluster.jobs.api == "https://kubernetes.default.svc"


def test_load__example_of_the_documentation__is_valid(tmp_path: Path) -> None:
    """But for its file of authorities, which a pod has."""
    page = (Path(__file__).parents[3] / "docs/authentication.md").read_text()
    (example,) = re.findall(r"```toml\n(.+?)```", page, re.DOTALL)
    (cluster,) = load_clusters(written(tmp_path, example)).values()
    assert cluster.place_of("gpu", "research") == ("acme", "vision")
    assert {name for name in KubernetesCluster.model_fields if name not in example} == set()


@pytest.mark.parametrize(("old", "new", "problem"), [
    (GOOD, "", "clusters"),
    (GOOD, "[clusters]", "clusters"),
    (GOOD, "x = ", "is not TOML"),
    (GOOD, "x = " + "[" * 10_000, "is not TOML"),
    ("issuer", "isuer", "clusters.gpu.isuer"),
    ('audience = "bdn"\n', "", "clusters.gpu.audience: Field required"),
    ("[clusters.gpu]", '[clusters."../x"]', "clusters"),
    ("https://kubernetes.default.svc/openid", "http://kubernetes.default.svc/openid", "clusters.gpu.keys"),
    ("https://kubernetes.default.svc/openid", "ftp://x/openid", "clusters.gpu.keys"),
    ("https://kubernetes.default.svc/openid", "https://me:secret@x/openid", "clusters.gpu.keys"),
    ('"bdn/bdn-agent"', '"bdn-agent"', "clusters.gpu.agents"),
    ('"acme"', '"a:b"', "clusters.gpu.namespaces.research.organisation"),
    ('"vision"', '"a/b"', "clusters.gpu.namespaces.research.team"),
    ("namespaces.research", "namespaces.Research", "clusters.gpu.namespaces"),
    ('team = "vision"', "team = 7", "clusters.gpu.namespaces.research.team"),
    ('keys = "https://kubernetes.default.svc/openid/v1/jwks"', 'keys = "/jwks"\nkeys_ca = "/ca"', "keys is a file"),
    ('image = "bdn"\n', "", "clusters.gpu.jobs.image: Field required"),
    ("http://mirror.bdn.svc:8460", "mirror:8460", "clusters.gpu.jobs.url"),
    ('image = "bdn"', 'image = "bdn"\napi = "http://api.example"', "clusters.gpu.jobs.api"),
    ('image = "bdn"', 'image = "bdn"\nurl_ca = "authorities"', "url_ca is for an https url"),
    ('image = "bdn"', 'image = "bdn"\nqueue = "A queue"', "clusters.gpu.jobs.queue"),
    ('image = "bdn"', 'image = "bdn"\ncache_claim = "../x"', "clusters.gpu.jobs.cache_claim"),
    ('image = "bdn"', 'image = "bdn"\nimagePullPolicy = "x"', "clusters.gpu.jobs.imagePullPolicy"),
    ('{"nvidia.com/gpu.product" = "H100"}', '{"a b" = "H100"}', "clusters.gpu.jobs.gpus.H100.node_labels"),
    ("node_labels", "resource = 'a b'\nnode_labels", "clusters.gpu.jobs.gpus.H100.resource"),
    ("jobs = true", 'jobs = "yes"', "clusters.gpu.namespaces.tuning.jobs"),
    ("jobs = true", "jobs = false", "jobs needs a namespace with jobs = true"),
    ('"bdn/bdn-agent"', '"training/bdn-agent"', "agents may not be in a namespace with jobs"),
    (GOOD[GOOD.index("[clusters.gpu.jobs]") : GOOD.index("[clusters.gpu.namespaces.tuning]")], "", "namespaces.tuning.jobs needs"),
])  # fmt: skip
def test_load__bad_file__is_one_line_that_names_setting_file_and_field(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    assert old in GOOD
    file = written(tmp_path, GOOD.replace(old, new))
    with pytest.raises(InvalidRequestError) as raised:
        load_clusters(file)
    text = str(raised.value)
    assert text.startswith(f"BDN_KUBERNETES: {file}")
    assert problem in text
    assert "\n" not in text
    assert len(text) < 1000


def test_load__missing_and_huge_files__are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"^BDN_KUBERNETES: .*No such file"):
        load_clusters(tmp_path / "none")
    with pytest.raises(InvalidRequestError, match="larger than"):
        load_clusters(written(tmp_path, "#" * (1024 * 1024 + 1)))


def test_load__authorities_that_are_none__are_named_with_their_field(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data_dir": tmp_path, "auth": "token", "token": "t"}
    text = GOOD.replace("agents =", f'keys_ca = "{tmp_path}/none.pem"\nagents =')
    with pytest.raises(InvalidRequestError, match=r"^BDN_KUBERNETES: clusters\.gpu\.keys_ca: .*none\.pem"):
        ServiceAccounts(load_trusted_clusters(MirrorSettings(kubernetes=written(tmp_path, text), **settings)))


def test_load__without_tokens__is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="BDN_KUBERNETES needs BDN_AUTH=token"):
        load_trusted_clusters(MirrorSettings(data_dir=tmp_path, kubernetes=written(tmp_path, GOOD)))
    assert load_trusted_clusters(MirrorSettings(data_dir=tmp_path)) == {}
