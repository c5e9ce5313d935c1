"""Make certificates for tests."""

import datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

Pair = tuple[x509.Certificate, Any]


def authority(name: str) -> Pair:
    """Return a certificate that signs itself, also for the host of that name, and its key."""
    return issued(name, None)


def issued(name: str, by: Pair | None, days: int = 2) -> Pair:
    """Return a certificate and its key, signed by an authority; one of negative `days` has expired."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    issuer, signer = (by[0].subject, by[1]) if by is not None else (subject, key)
    builder = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=10))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=by is None, path_length=None), critical=True)
    )
    return builder.sign(signer, hashes.SHA256()), key


def write(folder: Path, name: str, certificate: x509.Certificate, key: Any) -> tuple[Path, Path]:
    """Write <name>.pem and <name>.key, and return their paths."""
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    paths[0].write_bytes(certificate.public_bytes(encoding))
    paths[1].write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain))
    return paths
