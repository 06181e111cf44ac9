"""A certificate that is not trusted, is past, is for another name or is none: one line that says what to change."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.commands.flags.tls_failures import tls_failure
from tests.integration.fake_inference import FakeServer
from tests.test_tls import make_expired

COMMANDS = (["generate", "Hi"], ["top", "--once"], ["health"])


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`expired.pem` and `other.pem`, for another name, beside what `octavo certs` makes."""
    folder = tmp_path_factory.mktemp("certs")
    assert main(["certs", str(folder)]) == 0
    make_expired(folder)
    subject = ["-subj", "/CN=other", "-addext", "subjectAltName=DNS:other"]
    own = ["openssl", "req", "-x509", "-key", "scheduler.key", "-out", "other.pem", "-days", "1", *subject]
    subprocess.run(own, cwd=folder, check=True, capture_output=True)
    return folder


def shows(certs: Path, name: str) -> FakeServer:
    return FakeServer(tls=((certs / "scheduler.key").read_bytes(), (certs / f"{name}.pem").read_bytes()))


def said(address: str, ca: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """By each command; all of them fail."""
    found = set()
    for command in COMMANDS:
        assert main([*command, f"--address={address}", f"--tls-ca-file={ca}"]) in (1, 3)
        told = capsys.readouterr()
        line = (told.err.strip() or told.out.strip()).splitlines()[-1]
        found.add(line.partition("error: ")[2] or line.partition("UNAVAILABLE: ")[2])
    return found


@pytest.mark.parametrize(
    ("name", "ca", "why"),
    [
        ("expired", "ca", "the certificate of {} is not accepted: certificate has expired"),
        ("other", "other", "the certificate of {} is for other names; --address takes one of them"),
    ],
)
def test_a_certificate_that_is_past_or_for_another(
    name: str, ca: str, why: str, certs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with shows(certs, name) as server:
        address = f"localhost:{server.port}"
        assert said(address, certs / f"{ca}.pem", capsys) == {why.format(address)}


def test_an_authority_that_has_not_signed_it_and_a_file_that_is_none(
    certs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (none := tmp_path / "none.pem").write_text("nothing")
    with shows(certs, "scheduler") as server:
        address = f"localhost:{server.port}"
        (line,) = said(address, certs / "other.pem", capsys)
        assert line.startswith(f"the certificate of {address} is not accepted: ")
        (line,) = said(address, none, capsys)
        assert line.startswith("--tls-ca-file, or the client's")
    with FakeServer() as server:
        assert said(server.address, certs / "ca.pem", capsys) == {f"{server.address} speaks no TLS"}


def test_what_is_not_of_tls_is_told_as_it_is() -> None:
    assert tls_failure("a:1", "failed to connect to all addresses; last error: Connection refused") is None
