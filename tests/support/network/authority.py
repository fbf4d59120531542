"""A certificate authority of our own, for servers that answer under any name."""

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


_ISSUER = _named("a test's authority")
_BEGINS, _ENDS = (datetime.now(UTC) + timedelta(days=days) for days in (-1, 1))


@dataclass(frozen=True)
class Authority:
    """``certificates`` is what a client has to trust; ``server`` is a TLS context for the names."""

    certificates: Path
    server: ssl.SSLContext
    key: ec.EllipticCurvePrivateKey

    def issue(self, folder: Path, *names: str, ends: datetime = _ENDS) -> tuple[Path, Path]:
        """The files of a certificate and its key in ``folder``; each takes the place of the one before at once."""
        return _issue(self.key, folder, *names, ends=ends)


def new_authority(folder: Path, *names: str) -> Authority:
    """Writes the authority's certificate and the server's into ``folder``."""
    key = ec.generate_private_key(ec.SECP256R1())
    authority = (
        _begin(_ISSUER, key.public_key(), _ENDS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    certificates = folder / "authority.pem"
    certificates.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*_issue(key, folder, *names, ends=_ENDS))
    return Authority(certificates, context, key)


def _issue(authority: ec.EllipticCurvePrivateKey, folder: Path, *names: str, ends: datetime) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    certificate = (
        _begin(_named(names[0]), key.public_key(), ends)
        .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .sign(authority, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    files = folder / "tls.crt", folder / "tls.key"
    for file, content in zip(files, (certificate.public_bytes(serialization.Encoding.PEM), private), strict=True):
        new = file.with_suffix(".new")
        new.write_bytes(content)
        new.replace(file)
    return files


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _begin(subject: x509.Name, key: ec.EllipticCurvePublicKey, ends: datetime) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(_ISSUER)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(_BEGINS, ends - timedelta(days=1)))
        .not_valid_after(ends)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
