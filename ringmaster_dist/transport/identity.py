"""The identity of both ends: two certificates that are derived from the run's token, which is the only secret.

scrypt turns the token into one Ed25519 key for the server and one for all workers. Each key has a self-signed
certificate, which is the same wherever it is made. Both ends of a TLS 1.3 connection present their own certificate and
accept only the other role's. A holder of the token can make both certificates, and nobody else can make either. scrypt
makes it expensive to guess a weak token from the public certificate. A random token cannot be guessed.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import os
import ssl

from ringmaster_dist.transport import AuthenticationFailed

SERVER, WORKER = "server", "worker"
TUNNEL, ABOUT = "ringmaster-tunnel/1", "ringmaster-about/1"  # ALPN: what the connection is for
_PARTIAL_CHAIN = 0x80000  # trust the certificate itself; ssl has the name from Python 3.10 on only in some builds
_BEGIN, _END = datetime.datetime(2000, 1, 1), datetime.datetime(2100, 1, 1)  # so clocks need not agree


def server_context(token: str) -> ssl.SSLContext:
    """The TLS context of the server's end."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, token, own=SERVER, other=WORKER)
    context.num_tickets = 0  # every connection proves the token, none is resumed
    context.set_alpn_protocols([TUNNEL, ABOUT])
    return context


def worker_context(token: str, purpose: str = TUNNEL) -> ssl.SSLContext:
    """The TLS context of a worker's end."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, token, own=WORKER, other=SERVER)
    context.set_alpn_protocols([purpose])
    return context


def unverified_context() -> ssl.SSLContext:
    """A TLS context that reads a server's certificate without trusting it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def is_ours(certificate: bytes | None) -> bool:
    """Whether a certificate (DER) is that of a ringmaster server, with any token."""
    return certificate is not None and _common_name(SERVER).encode() in certificate


def _common_name(role: str) -> str:
    return f"ringmaster {role}"


def _context(protocol: int, token: str, *, own: str, other: str) -> ssl.SSLContext:
    if not token:
        raise AuthenticationFailed("the token is empty")
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is pinned, so its name adds nothing
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= _PARTIAL_CHAIN
    pairs = _pairs(token)
    context.load_verify_locations(cadata=pairs[other][0].decode())
    # The ssl module reads keys from files only. This file is in memory, and no other user can open it.
    descriptor = os.memfd_create("ringmaster-identity", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, b"".join(pairs[own]))
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context


@functools.lru_cache(maxsize=4)  # a worker that reconnects does not pay for scrypt again
def _pairs(token: str) -> dict[str, tuple[bytes, bytes]]:
    """The certificate and the key of each role, as PEM."""
    seeds = hashlib.scrypt(token.encode(), salt=b"ringmaster identity 1", n=2**14, r=8, p=1, dklen=64)
    return {SERVER: _pair(SERVER, seeds[:32]), WORKER: _pair(WORKER, seeds[32:])}


def _pair(role: str, seed: bytes) -> tuple[bytes, bytes]:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _common_name(role))])
    usage = ExtendedKeyUsageOID.SERVER_AUTH if role == SERVER else ExtendedKeyUsageOID.CLIENT_AUTH
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
        .sign(key, None)
    )
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(encoding), private
