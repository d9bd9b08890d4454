"""Certificates for tests of TLS: an authority, and what it signs for a host. Made by the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=100)


def authority(folder: Path, name: str) -> None:
    """`NAME.pem` and `NAME.key`, signed by itself."""
    subject = ["-subj", f"/CN={name}", "-days", "1", "-nodes", "-addext", "keyUsage=critical,keyCertSign"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    _openssl(folder, "req", "-x509", *key, *subject, "-keyout", f"{name}.key", "-out", f"{name}.pem")


def certificate(folder: Path, name: str, authority: str, names: str = "DNS:localhost", days: int = 1) -> None:
    """`NAME.pem` and `NAME.key` for localhost, or others, signed by an authority in the same folder. `days`: negative
    for one that has expired.
    """
    (folder / "names").write_text(f"subjectAltName={names}\nauthorityKeyIdentifier=keyid\n")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=localhost"]
    _openssl(folder, "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr")
    signed = ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial", "-extfile", "names"]
    _openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signed, "-days", str(days), "-out", f"{name}.pem")
