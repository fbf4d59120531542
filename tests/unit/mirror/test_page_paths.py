"""Which models a path on a node, or in a job, may belong to."""

from datetime import UTC, datetime

from bdn.mirror.page.model_paths import mounted_at, stage_and_place
from bdn.wire.mirror_schema import Mirror, MirrorSource

ONE, TWO = f"b3:{'1' * 64}", f"b3:{'2' * 64}"
STAGE = "stg_0123456789abcdef01234567"


def mirror(**mounts: tuple[str, str]) -> Mirror:
    sources = [
        MirrorSource(source=f"hf://org/{name}", mount_location=mount, status="READY", manifest=manifest)
        for name, (mount, manifest) in mounts.items()
    ]
    return Mirror(id=f"mir_{'0' * 24}", status="READY", created_at=datetime.now(UTC), sources=sources)


def test_a_path_of_a_view__has_the_stage_and_the_path_that_the_job_sees() -> None:
    assert stage_and_place(f"/var/lib/bdn/cache/mounts/{STAGE}/app/models/m/x.json") == (STAGE, "/app/models/m/x.json")
    assert stage_and_place(f"/var/lib/bdn/cache/mounts/{STAGE}") == (STAGE, "/")
    assert stage_and_place("/app/models/m") == (None, "/app/models/m")


def test_a_path__finds_what_is_mounted_around_or_below_it_each_manifest_once() -> None:
    mirrors = [
        mirror(one=("/app/models/m", ONE), other=("/app/models/mm", TWO)),
        mirror(older=("/app/models/m", ONE)),
    ]

    def found(place: str) -> list[str]:
        return [one.source for one in mounted_at(place, mirrors)]

    assert found("/app/models/m") == found("/app/models/m/deep/x.json") == ["hf://org/one"]
    assert found("/app/models") == found("/app/") == found("/") == ["hf://org/one", "hf://org/other"]
    assert found("/data") == []
