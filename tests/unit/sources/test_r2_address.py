import pytest

from bdn.sources.settings import CLOUDFLARE_R2, check_r2_template, r2_address


@pytest.mark.parametrize(("template", "without", "with_jurisdiction"), [
    (CLOUDFLARE_R2, "https://4cc0.r2.cloudflarestorage.com", "https://4cc0.eu.r2.cloudflarestorage.com"),
    ("https://{account}.{jurisdiction}.r2.test", "https://4cc0.r2.test", "https://4cc0.eu.r2.test"),
    ("https://r2.test/{account}/{jurisdiction}", "https://r2.test/4cc0/", "https://r2.test/4cc0/eu"),
    ("https://r2.test:8443", "https://r2.test:8443", "https://r2.test:8443"),
    ("http://[::1]:9000", "http://[::1]:9000", "http://[::1]:9000"),
])  # fmt: skip
def test_placeholders_are_filled_in_and_an_absent_jurisdiction_takes_its_dot_along(
    template: str, without: str, with_jurisdiction: str
) -> None:
    assert check_r2_template(f"{template}/") == template
    assert r2_address(template, "4cc0", "") == without
    assert r2_address(template, "4cc0", "eu") == with_jurisdiction


@pytest.mark.parametrize("template", [
    "", "r2.test", "ftp://r2.test", "https://", "https://r2.test?x", "https://key@r2.test",
    "https://{acount}.r2.test",
])  # fmt: skip
def test_what_does_not_become_an_address_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="must be an http or https address"):
        check_r2_template(template)
