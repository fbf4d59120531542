"""Source URIs, the paths of a tree and the mounts of a request. What is none of them is tried in ``tests/fuzz`` as well."""

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.chunk import UnsafePathError, check_tree, normalise_path
from bdn.core.errors import InvalidMountError, InvalidSourceError
from bdn.core.source.uri import SCHEMES, SourceUri, check_mounts, parse_source

words = st.text("abAB01-_.", min_size=1, max_size=6)
names = words.map("x{}".format)
folders = st.lists(st.one_of(words, st.sampled_from(["é", "a b", "", "%2e", "a:b"])), max_size=4).map("/".join)
hugging_face = st.builds(
    "hf://{}{}/{}{}".format,
    st.sampled_from(["", "datasets/", "spaces/"]),
    names,
    names,
    st.one_of(st.just(""), st.one_of(names, st.sampled_from(["refs/pr/1", "a@b", "0" * 40])).map("@{}".format)),
)
buckets = st.builds(
    "{}://{}{}".format, st.sampled_from(["s3", "gs", "cw"]), names, st.one_of(st.just(""), folders.map("/{}".format))
)
r2_names = st.text("ab01-", min_size=2, max_size=6).filter(lambda name: name[0] != "-")
r2 = st.builds(
    "r2://{}.{}{}{}".format, r2_names, st.sampled_from(["", "eu.", "fedramp."]), r2_names, st.one_of(st.just(""), folders.map("/{}".format))
)  # fmt: skip
azure = st.builds(
    "azure://acc{}/{}x{}".format, st.text("ab01", max_size=4), st.text("ab01", min_size=2, max_size=4), st.one_of(st.just(""), folders.map("/{}".format))
)  # fmt: skip
hub_buckets = st.builds("hf://buckets/{}/{}{}".format, names, names, st.one_of(st.just(""), folders.map("/{}".format)))
https = st.builds("https://{}.example/{}x".format, names.map(str.lower), folders)


def read(text: str) -> SourceUri | None:
    try:
        return parse_source(text)
    except InvalidSourceError as error:
        assert json.loads(json.dumps(error.details())) == error.details()  # noqa: PT017 - a refusal is a result as well
        return None


@given(st.one_of(hugging_face, buckets, hub_buckets, r2, azure, https))
def test_what_fits_the_grammar_is_accepted_unless_it_climbs_and_survives_a_round_trip(text: str) -> None:
    source = read(text)
    if source is None:
        assert ".." in text
    else:
        assert parse_source(str(source)) == source
        assert str(source) == text.removesuffix("/") or str(source) == text


@given(
    st.sampled_from([*SCHEMES, "https", "x", "S3"]),
    st.text(string.ascii_letters + "/+=@:.-", max_size=8),
    st.text(string.ascii_letters + "/+=@:.-", max_size=8),
    st.sampled_from(["bucket", "owner/repo@main", "account.bucket/p", "", "a@b"]),
)
def test_a_password_in_a_uri_never_comes_back_in_the_error(scheme: str, before: str, after: str, rest: str) -> None:
    text = f"{scheme}://key:{before}HUNTER2{after}@{rest}"
    try:
        parse_source(text)
    except InvalidSourceError as error:
        shown = str(error) + repr(error) + json.dumps(error.details())
        assert "HUNTER2" not in shown
    else:
        raise AssertionError(text)


tidy = st.lists(st.sampled_from(["a", "b", "ab", "a-b", "a b", "a!"]), min_size=1, max_size=4).map("/".join)


@given(st.lists(tidy, max_size=7))
def test_a_tree_is_accepted_exactly_when_no_path_equals_or_lies_inside_another(paths: list[str]) -> None:
    collides = any(
        one == other or one.startswith(f"{other}/")
        for at, one in enumerate(paths)
        for other in paths[:at] + paths[at + 1 :]
    )
    assert [normalise_path(path) for path in paths] == paths
    if collides:
        with pytest.raises(UnsafePathError):
            check_tree(paths)
    else:
        check_tree(paths)


@given(st.lists(tidy.map("/{}".format), max_size=6))
def test_mounts_are_accepted_exactly_when_none_equals_or_lies_inside_another(mounts: list[str]) -> None:
    clashing = {
        one
        for at, one in enumerate(mounts)
        for other in mounts[:at] + mounts[at + 1 :]
        if one == other or one.startswith(f"{other}/")
    }
    if clashing:
        with pytest.raises(InvalidMountError) as caught:
            check_mounts(mounts)
        assert caught.value.mount_location in clashing
    else:
        check_mounts(mounts)
