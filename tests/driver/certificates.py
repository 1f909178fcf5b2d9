"""Certificates for tests of TLS, made on the spot."""

import subprocess


def write_certificate(folder):
    """Paths of a certificate for "localhost" that has signed itself, and of its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    ask = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*ask, *names], check=True, capture_output=True)
    return cert, key
