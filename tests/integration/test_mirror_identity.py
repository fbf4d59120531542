"""AWS_OIDC, AWS_ASSUME_ROLE and GCP_OIDC through the whole mirror, against token services that check what they are sent."""

from pathlib import Path

from tests.doubles.s3 import S3Bucket
from tests.support.content.cloud_identity import (
    ASSUMED_ROLE,
    ROLE,
    Clouds,
    aws_assume_role,
    aws_oidc,
    gcp_oidc,
    trusted_mirror,
)

pytest_plugins = ("tests.support.mirror.fixtures", "tests.support.content.cloud_fixtures")


async def test_a_role_is_taken_with_the_mirror_s_own_identity_token(
    clouds: Clouds, bucket: S3Bucket, tmp_path: Path
) -> None:
    bucket.put({"w/a.bin": b"weights"})
    async with trusted_mirror(clouds, tmp_path) as mirror:
        document = await mirror.ready(aws_oidc(f"s3://{bucket.name}/w"))
        assert await mirror.tree(document["sources"][0]["manifest"]) == {"a.bin": b"weights"}
        (session,) = clouds.sts.sessions
        assert session.role == ROLE
        assert session.subject == f"v=1:org=default:job={document['id']}:type=mirror"
        assert session.name == f"default@{document['id']}"
        assert "authorization" not in clouds.sts.log.find()[0].headers


async def test_a_dry_run_names_no_mirror(clouds: Clouds, bucket: S3Bucket, tmp_path: Path) -> None:
    bucket.put({"w/a.bin": b"weights"})
    async with trusted_mirror(clouds, tmp_path, work=False) as mirror:
        assert (await mirror.plan(aws_oidc(f"s3://{bucket.name}/w")))["files"] == 1
    assert clouds.sts.sessions[0].subject == "v=1:org=default:job=plan:type=mirror"


async def test_a_role_is_assumed_with_the_mirror_s_own_keys_and_the_organisation_s_external_id(
    clouds: Clouds, bucket: S3Bucket, tmp_path: Path
) -> None:
    bucket.put({"w/a.bin": b"weights"})
    async with trusted_mirror(clouds, tmp_path, issuer_url="") as mirror:
        document = await mirror.ready(aws_assume_role(f"s3://{bucket.name}/w"))
        (session,) = clouds.sts.sessions
        assert (session.role, session.name) == (ASSUMED_ROLE, f"default@{document['id']}")
        assert clouds.sts.bodies[0]["ExternalId"] == "bdn:default"


async def test_a_service_account_is_impersonated_with_the_mirror_s_own_identity_token(
    clouds: Clouds, tmp_path: Path
) -> None:
    bucket = clouds.gcs.bucket("weights")
    bucket.put({"w/a.bin": b"weights"})
    async with trusted_mirror(clouds, tmp_path) as mirror:
        document = await mirror.ready(gcp_oidc("gs://weights/w", clouds.gcs.account.email))
        assert await mirror.tree(document["sources"][0]["manifest"]) == {"a.bin": b"weights"}
        (federated,) = clouds.google.federated.values()
        assert federated[1] == f"v=1:org=default:job={document['id']}:type=mirror"
        assert len(clouds.google.issued) == 1
