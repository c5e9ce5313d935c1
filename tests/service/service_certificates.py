"""Make a certificate for tests."""

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def certified(folder: Path, host: str = "localhost") -> tuple[Path, Path]:
    """Write a certificate that signs itself, and its key, and return their paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    )
    paths = folder / "server.pem", folder / "server.key"
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    paths[0].write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(encoding))
    paths[1].write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain))
    return paths
