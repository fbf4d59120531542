"""What our servers show and our clients believe: which files are refused, and how they change while they are used."""

import contextlib
import logging
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from bdn.core.errors import InvalidRequestError
from bdn.net.tls import Authorities, Certificate, certificate
from tests.fakes.clock import Clock
from tests.support.network.authority import Authority, new_authority

PEM, PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return new_authority(tmp_path_factory.mktemp("authority"), "unused")


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> tuple[Path, Path]:
    return authority.issue(tmp_path, "localhost")


def shown(context: ssl.SSLContext, authority: Authority) -> tuple[tuple[str, str], ...]:
    """The names that a client sees, which believes the authority."""
    trusting = ssl.create_default_context(cafile=authority.certificates)
    trusting.check_hostname = False
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    found = client.getpeercert()
    assert found
    return found["subjectAltName"]  # type: ignore[return-value]


# --- what cannot be used ---


def another_key(chain: Path, key: Path, _: Authority) -> None:
    key.write_bytes(ec.generate_private_key(ec.SECP256R1()).private_bytes(PEM, PKCS8, serialization.NoEncryption()))


def locked_key(chain: Path, key: Path, _: Authority) -> None:
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(private.private_bytes(PEM, PKCS8, serialization.BestAvailableEncryption(b"secret")))


def no_key(chain: Path, key: Path, _: Authority) -> None:
    key.write_text("sesame")


def half_a_certificate(chain: Path, key: Path, _: Authority) -> None:
    chain.write_bytes(chain.read_bytes()[:300])


def ended(chain: Path, key: Path, authority: Authority) -> None:
    authority.issue(chain.parent, "localhost", ends=datetime.now(UTC) - timedelta(hours=1))


def absent_key(chain: Path, key: Path, _: Authority) -> None:
    key.unlink()


@pytest.mark.parametrize(("spoil", "said"), [
    (another_key, "BDN_TLS_KEY: .*/tls.key is not the key of the certificate"),
    (locked_key, "BDN_TLS_KEY: .*/tls.key holds no key in PEM without a passphrase"),
    (no_key, "BDN_TLS_KEY: .*/tls.key holds no key in PEM"),
    (absent_key, "BDN_TLS_KEY: .*/tls.key cannot be read: No such file"),
    (half_a_certificate, "BDN_TLS_CERT: .*/tls.crt holds no certificate in PEM"),
    (ended, "BDN_TLS_CERT: the certificate in .*/tls.crt is valid from .*, and not now"),
])  # fmt: skip
def test_files_that_every_client_would_refuse_are_refused_with_their_setting(
    files: tuple[Path, Path], authority: Authority, spoil: Callable[[Path, Path, Authority], None], said: str
) -> None:
    spoil(*files, authority)
    with pytest.raises(InvalidRequestError, match=said) as raised:
        certificate("BDN_TLS", *files)
    assert "sesame" not in str(raised.value)


def test_neither_goes_without_the_other_and_none_is_plain_http(files: tuple[Path, Path]) -> None:
    assert certificate("BDN_TLS", None, None) is None
    with pytest.raises(InvalidRequestError, match="BDN_TLS_CERT needs BDN_TLS_KEY"):
        certificate("BDN_TLS", files[0], None)
    with pytest.raises(InvalidRequestError, match="BDN_AGENT_TLS_KEY needs BDN_AGENT_TLS_CERT"):
        certificate("BDN_AGENT_TLS", None, files[1])


@pytest.mark.parametrize(("content", "said"), [(None, "cannot be read"), ("no PEM", "no certificates of authorities")])
def test_authorities_that_are_none_are_refused_with_their_setting(
    tmp_path: Path, content: str | None, said: str
) -> None:
    file = tmp_path / "ca.crt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidRequestError, match=f"BDN_TLS_CA: {file} .*{said}"):
        Authorities(file)


def test_nothing_older_than_tls_1_2_is_spoken(files: tuple[Path, Path], authority: Authority) -> None:
    contexts = [Certificate("BDN_TLS", *files).context(), Authorities(authority.certificates).context()]
    assert [context.minimum_version for context in contexts] == [ssl.TLSVersion.TLSv1_2] * 2


# --- what changes ---


def test_a_certificate_is_renewed_once_both_of_its_files_are(
    files: tuple[Path, Path], authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Between the one file and the other, and while one is half-written, the certificate before stays; a line says so."""
    caplog.set_level(logging.INFO)
    clock = Clock()
    served = Certificate("BDN_TLS", *files, clock)
    (other := tmp_path / "other").mkdir()
    ends = (datetime.now(UTC) + timedelta(days=9)).replace(microsecond=0)
    new = authority.issue(other, "renewed", ends=ends)
    files[0].write_bytes(new[0].read_bytes()[:100])
    assert shown(served.context(), authority) == (("DNS", "localhost"),)
    assert not caplog.records  # it is not looked at all the time
    for _ in range(3):
        clock.advance(1)
        assert shown(served.context(), authority) == (("DNS", "localhost"),)
    files[0].write_bytes(new[0].read_bytes())
    clock.advance(1)
    assert shown(served.context(), authority) == (("DNS", "localhost"),)
    assert 0 < served.expires_at < ends.timestamp()  # of the one in use
    new[1].replace(files[1])
    clock.advance(1)
    assert shown(served.context(), authority) == (("DNS", "renewed"),)
    assert served.expires_at == ends.timestamp()
    half, mismatched, used = [record.getMessage() for record in caplog.records]
    assert half.startswith("cannot reload changed TLS files: BDN_TLS_CERT")
    assert mismatched.startswith("cannot reload changed TLS files: BDN_TLS_KEY")
    assert used == "changed TLS files loaded"


def test_a_renewal_that_is_refused_is_tried_again_and_told_once(
    files: tuple[Path, Path], authority: Authority, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    served = Certificate("BDN_TLS", *files, clock)
    authority.issue(files[0].parent, "renewed")
    with monkeypatch.context() as early:
        early.setattr(time, "time", lambda: 0.0)  # this machine's clock is not set yet
        for _ in range(3):
            clock.advance(1)
            assert shown(served.context(), authority) == (("DNS", "localhost"),)
    assert len(caplog.records) == 1
    clock.advance(1)
    assert shown(served.context(), authority) == (("DNS", "renewed"),)


def test_a_link_that_leads_elsewhere_is_a_change(authority: Authority, tmp_path: Path) -> None:
    """As Kubernetes changes a mounted secret: the files are links by way of one that is replaced."""
    clock, link = Clock(), tmp_path / "..data"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        authority.issue(tmp_path / name, name)
    link.symlink_to("one")
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    served = Certificate("BDN_TLS", tmp_path / "tls.crt", tmp_path / "tls.key", clock)
    (tmp_path / "..new").symlink_to("two")
    (tmp_path / "..new").replace(link)
    clock.advance(1)
    assert shown(served.context(), authority) == (("DNS", "two"),)


@pytest.mark.parametrize("is_of_system", [True, False])
def test_byte_threads_and_an_event_loop_never_share_a_context(authority: Authority, is_of_system: bool) -> None:
    """The loop's clients set what theirs offers with each connection, while OpenSSL may read it for another thread."""
    believed = Authorities(None if is_of_system else authority.certificates)
    of_threads = believed.context(is_for_threads=True)
    assert believed.context(is_for_threads=True) is of_threads
    assert believed.context() is not of_threads


def test_authorities_that_change_are_believed_and_those_that_go_are_not(
    files: tuple[Path, Path], authority: Authority, tmp_path: Path
) -> None:
    clock, file = Clock(), tmp_path / "ca.crt"
    (other := tmp_path / "other").mkdir()
    file.write_bytes(new_authority(other, "x").certificates.read_bytes())
    believed = Authorities(file, clock)
    before = believed.context()
    assert believed.context() is before
    file.write_bytes(authority.certificates.read_bytes())
    clock.advance(1)
    now = believed.context()
    assert [one["subject"] for one in now.get_ca_certs()] == [
        one["subject"] for one in ssl.create_default_context(cafile=authority.certificates).get_ca_certs()
    ]
    assert now is not before
    assert len(now.get_ca_certs()) == 1
