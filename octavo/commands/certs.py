"""`octavo certs`: a development set of certificates: an authority of its own, and one for each service and a client.

For trying TLS out. Where it counts, certificates come from an authority that others guard.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

ROLES = ("scheduler", "worker", "gateway", "client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where they go, and for whom they are."""
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="made if it is not there; what it has is kept while it lasts"
    )
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="NAME",
        help="a host name or address that they are for, beside localhost and 127.0.0.1; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print what was made as JSON")
    parser.add_argument("--days", type=int, default=30, metavar="N", help="how long they last (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Raises CommandError where openssl is missing or fails."""
    from octavo.cli import CommandError

    if shutil.which("openssl") is None:
        raise CommandError("openssl is missing, which makes the certificates: apt-get install openssl")
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    # What is there is replaced once all is made: it may be in use, and the authority's key may be elsewhere.
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as inside:
        new, authority = Path(inside), folder.absolute()
        if not _is_good(folder, "ca", []):
            subject = ["-subj", "/CN=Octavo development authority", "-addext", "keyUsage=critical,keyCertSign,cRLSign"]
            days = ["-days", str(10 * arguments.days)]
            _openssl(new, "req", "-x509", *_new_key("ca"), "-out", "ca.pem", *days, *subject)
            made.append("ca")
            authority = new
        for role in ROLES:
            if "ca" in made or not _is_good(folder, role, arguments.name):
                names = [*arguments.name, *_names_of(folder / f"{role}.pem")]
                _sign(new, authority.absolute(), role, names, arguments.days)
                made.append(role)
        for file in (*new.glob("*.key"), *new.glob("*.pem"), *new.glob("*.srl")):
            file.replace(folder / file.name)
    kept = [name for name in ("ca", *ROLES) if name not in made]
    for key in folder.glob("*.key"):
        key.chmod(0o600)
    if arguments.json:
        print(json.dumps({"folder": str(folder), "made": made, "kept": kept}))
    else:
        and_kept = f"; kept as they were: {', '.join(kept)}" if kept else ""
        print(f"{folder}: {', '.join(made) or 'nothing new'}{and_kept}")
    return 0


def _is_good(folder: Path, name: str, names: list[str]) -> bool:
    """Whether a certificate is there that has not expired and is for all these names."""
    checks = [["-checkend", "0"], *(["-checkip" if _is_address(each) else "-checkhost", each] for each in names)]
    answers = [_asked(folder / f"{name}.pem", *check) for check in checks if (folder / f"{name}.pem").exists()]
    return bool(answers) and all(done.returncode == 0 and "NOT match" not in done.stdout for done in answers)


def _names_of(cert: Path) -> list[str]:
    """Those of a certificate that is to be signed anew: who asked for them needs them still."""
    return re.findall(r"(?:DNS|IP Address):([^,\s]+)", _asked(cert, "-ext", "subjectAltName").stdout)


def _asked(cert: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["openssl", "x509", "-in", str(cert), "-noout", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _sign(folder: Path, authority: Path, role: str, names: list[str], days: int) -> None:
    """Asks the authority in its folder for the certificate of one role."""
    alternatives = [f"DNS:{role}", "DNS:localhost", "IP:127.0.0.1", "IP:::1", f"URI:spiffe://octavo/{role}"]
    alternatives += [f"IP:{ipaddress.ip_address(name)}" if _is_address(name) else f"DNS:{name}" for name in names]
    alternatives = list(dict.fromkeys(alternatives))
    with tempfile.TemporaryDirectory() as other:
        extensions, request = Path(other) / "extensions", Path(other) / "request"
        extensions.write_text(f"subjectAltName={','.join(alternatives)}\nextendedKeyUsage=serverAuth,clientAuth\n")
        _openssl(folder, "req", *_new_key(role), "-out", str(request), "-subj", f"/CN={role}")
        signed_by = ["-CA", str(authority / "ca.pem"), "-CAkey", str(authority / "ca.key"), "-CAcreateserial"]
        made = ["-out", f"{role}.pem", "-days", str(days), "-extfile", str(extensions)]
        _openssl(folder, "x509", "-req", "-in", str(request), *signed_by, *made)


def _new_key(name: str) -> list[str]:
    return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key"]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _openssl(folder: Path, *arguments: str) -> None:
    from octavo.cli import CommandError

    before = os.umask(0o077)
    try:
        done = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    finally:
        os.umask(before)
    if done.returncode:
        raise CommandError(f"openssl {arguments[0]}: {' '.join(done.stderr.split())[-300:]}")
