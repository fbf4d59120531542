"""The comment of a job: what it names, and what is refused."""

import re

import pytest

from bdn.core.errors import BdnError, InvalidRequestError, InvalidSourceError
from bdn.slurm.comment import MOST_SOURCES, NamedSource, Requested, requested
from tests.support.services.commands import ROOT


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("bdn:hf://org/model@main", [("BDN_WEIGHTS", "hf://org/model@main")]),
        ("bdn:MODEL=hf://org/model", [("MODEL", "hf://org/model")]),
        (
            "bdn: A=s3://bucket/a=b  B_2=bt://project@job/step-10 ",
            [("A", "s3://bucket/a=b"), ("B_2", "bt://project@job/step-10")],
        ),
        ("bdn:s3://bucket/a=b://c", [("BDN_WEIGHTS", "s3://bucket/a=b://c")]),
    ],
)
def test_comment__names_sources_and_variables(comment: str, expected: list[tuple[str, str]]) -> None:
    assert requested(comment) == Requested(tuple(NamedSource(*one) for one in expected))


@pytest.mark.parametrize(
    "comment",
    [
        *("bdn:", "bdn:   ", "bdn:A=", "bdn:=hf://org/model", "bdn:hf://org/model hf://org/other"),
        *("bdn:A=hf://org/model A=hf://org/other", "bdn:a=hf://org/model", "bdn:2A=hf://org/model", f"bdn:{'A' * 65}=hf://org/model"),
        *("bdn:PATH=hf://org/model", "bdn:LD_PRELOAD=hf://org/model", "bdn:SLURM_JOB_ID=hf://org/model", "bdn:BDN_TOKEN=hf://org/model"),
        *("bdn:../etc=hf://org/model", "bdn:A;B=hf://org/model", "bdn:$(id)=hf://org/model", "bdn:A=B=hf://org/model"),
        *("bdn:A=hf://org/model\nB=hf://org/model", "bdn:A=hf://org/model\tB=hf://org/model", "bdn:s3://bucket/mod\u00e9l", "bdn:\udcff"),
        "bdn:hf://org/" + "m" * 5000,
        "bdn:" + " ".join(f"A{number}=hf://org/model" for number in range(MOST_SOURCES + 1)),
    ],
)  # fmt: skip
def test_comment__of_another_form__is_refused(comment: str) -> None:
    with pytest.raises((InvalidRequestError, InvalidSourceError)):
        requested(comment)


@pytest.mark.parametrize(
    "source", ["/etc/passwd", "file:///etc/passwd", "../model", "hf://user:secret@org/model", "s3://bucket/../x"]
)
def test_source__that_no_mirror_copies__is_refused(source: str) -> None:
    with pytest.raises(BdnError) as raised:
        requested(f"bdn:{source}")
    assert raised.value.code == "INVALID_SOURCE"


def test_secret__that_the_operator_permits__opens_all_sources_and_another_is_refused() -> None:
    comment = "bdn:secret=hub A=hf://org/model B=hf://org/other"
    assert requested(comment, {"hub", "s3"}).secret == "hub"
    for permitted in (set[str](), {"s3"}):
        with pytest.raises(InvalidRequestError, match="may not name the secret 'hub'"):
            requested(comment, permitted)
    for wrong in ("bdn:secret=hub", "bdn:secret=hub secret=hub hf://org/model", "bdn:hf://org/model secret=hub"):
        with pytest.raises((InvalidRequestError, InvalidSourceError)):
            requested(wrong, {"hub"})


def test_page__has_comments_that_are_accepted() -> None:
    page = (ROOT / "docs/slurm.md").read_text()
    examples = re.findall(r"--comment='(bdn:[^']+)'", page)
    assert len(examples) > 2
    for comment in examples:
        assert requested(comment, {"hub"}).sources
