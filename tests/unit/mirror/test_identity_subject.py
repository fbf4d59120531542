"""Names in tokens, sessions and trust policies: nobody's name reads like another's."""

import re

import pytest

from bdn.core.errors import InvalidRequestError
from bdn.mirror.upstream.issuer import TokenSubject

JOB = "mir_0123456789abcdef01234567"


def test_the_names_of_a_subject() -> None:
    subject = TokenSubject("acme", JOB)
    assert subject.claim == f"v=1:org=acme:job={JOB}:type=mirror"
    assert subject.pattern == "v=1:org=acme:job=*:type=mirror"
    assert subject.session_name == f"acme@{JOB}"
    assert subject.external_id == "bdn:acme"


@pytest.mark.parametrize("organisation", ["a", "A.b-c_9", "o" * 63])
def test_names_stay_inside_the_limits_of_the_clouds(organisation: str) -> None:
    subject = TokenSubject(organisation, JOB)
    assert len(subject.claim) <= 127  # Google's for google.subject
    assert re.fullmatch(r"[\w+=,.@-]{2,64}", subject.session_name, re.ASCII)  # STS: RoleSessionName
    assert re.fullmatch(r"[\w+=,.@:/-]{2,1224}", subject.external_id, re.ASCII)  # STS: ExternalId
    assert subject.session_name.endswith(f"@{JOB}")


@pytest.mark.parametrize(
    "organisation", ["", "*", "a:job=b", "a=b", "a b", "a\n", "é", "-a", "o" * 64, "a/b", "a@b", "?"]
)
def test_a_name_that_could_be_read_otherwise_is_refused(organisation: str) -> None:
    with pytest.raises(InvalidRequestError):
        TokenSubject(organisation, JOB)


@pytest.mark.parametrize("job", ["", "*", "mir:x", "mir_x\n", "MIR", "m" * 33])
def test_a_job_that_could_be_read_otherwise_is_refused(job: str) -> None:
    with pytest.raises(InvalidRequestError):
        TokenSubject("acme", job)
