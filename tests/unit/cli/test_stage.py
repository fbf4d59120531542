"""What ``bdn stage`` ends with."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from bdn.cli.stage import stage_code
from bdn.wire.errors import ErrorBody
from bdn.wire.stage_schema import StageDocument, StageState

ERROR = ErrorBody(code="NOT_FOUND", message="chunk b3:… does not exist", retryable=True, details={})


@pytest.mark.parametrize(
    ("state", "error", "code"),
    [("READY", None, 0), ("READY", ERROR, 1), ("FAILED", ERROR, 1), ("STAGING", None, 0), ("STAGING", ERROR, 0)],
)
def test_a_ready_stage_that_lacks_something_is_no_success(
    state: StageState, error: ErrorBody | None, code: int
) -> None:
    moment = datetime(2026, 11, 22, tzinfo=UTC)
    stage = StageDocument.model_construct(
        id="stg_1", job_id="job", state=state, created_at=moment, mounts=[], error=error
    )

    assert stage_code(stage) == code
