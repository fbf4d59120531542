"""The login of an image's registry, in a secret as people write it."""

import base64

import pytest

from bdn.core.errors import SecretMalformedError
from bdn.mirror.training.runs import login_of


@pytest.mark.parametrize("value", ["user:pass:word", " user:pass:word\n", base64.b64encode(b"user:pass:word").decode()])
def test_login_of__is_user_and_password_plain_or_in_base64(value: str) -> None:
    login = login_of("registry.example", "login", value)
    assert (login.registry, login.username, login.password) == ("registry.example", "user", "pass:word")
    assert "pass:word" not in repr(login)


@pytest.mark.parametrize("value", ["", "user", "dXNlcg==", "%%%"])
def test_login_of__a_secret_of_another_form_is_named_without_its_value(value: str) -> None:
    with pytest.raises(SecretMalformedError, match="'login' is not user:password") as caught:
        login_of("registry.example", "login", value)
    assert not value or value not in str(caught.value).replace("user:password", "")
