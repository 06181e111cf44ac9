"""What gRPC says of a connection that its TLS did not let come about, in one line that names what to change."""

from __future__ import annotations

import re

_VERIFY = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([a-z][a-z -]*)")
_UNKNOWN = ("unable to get", "self-signed", "self signed")  # of whom it is not trusted


def tls_failure(address: str, details: str) -> str | None:
    """None: it was something else. `details`: those of the status."""
    if found := _VERIFY.search(details):
        why = found[1].strip()
        hint = "; --tls-ca-file says whom to trust" if why.startswith(_UNKNOWN) else ""
        return f"the certificate of {address} is not accepted: {why}{hint}"
    if "is not in peer certificate" in details or "Hostname Verification Check failed" in details:
        return f"the certificate of {address} is for other names; --address takes one of them"
    if "WRONG_VERSION_NUMBER" in details:
        return f"{address} speaks no TLS"
    if "security handshaker" in details:
        return "--tls-ca-file, or the client's certificate or key, is no PEM file that TLS could use"
    return None
