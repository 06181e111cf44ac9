"""What `octavo serve` says of how to call it: each lock is in the commands, and names are those of the certificate."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from octavo.serving.announcement import Announcement
from octavo.shared.options import OptionError
from scheduler_svc.config import SchedulerConfig


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    assert main(["certs", str(folder)]) == 0
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1", "-subj", "/CN=own"]
    names = ["-addext", "subjectAltName=DNS:*.example.com,DNS:gpu-1.example.com"]
    own = ["-keyout", str(folder / "own.key"), "-out", str(folder / "own.pem")]
    subprocess.run(["openssl", "req", "-x509", *curve, *names, *own], check=True, capture_output=True)
    return folder


def announced(certs: Path | None, role: str = "", address: str = "127.0.0.1:5", **options: Any) -> Announcement:
    if certs is not None:
        options |= {"tls_cert_file": certs / f"{role}.pem", "tls_key_file": certs / f"{role}.key"}
    return Announcement.of(SchedulerConfig(**options), "m", 2, address, "127.0.0.1:6")


def test_without_locks_nothing_is_said_of_them() -> None:
    text = announced(None).as_text(1.25)
    assert "m at 127.0.0.1:5, 2 workers" in text and "after 1.2 s" in text
    assert "http://127.0.0.1:6/v1" in text and "grpcurl -plaintext -d" in text
    assert not any(word in text for word in ("tls", "KEY", "CA.pem"))
    said = json.loads(announced(None).as_json(1.25))
    assert (said["http"], said["tls"], said["keys"], said["seconds"]) == ("http://127.0.0.1:6/v1", False, False, 1.25)


def test_the_model_is_called_as_requests_name_it() -> None:
    plain = announced(None)
    assert ": m at " in plain.as_text(1.0) and json.loads(plain.as_json(1.0))["model"] == "m"
    file = dataclasses.replace(plain, source="/models/4-bit.gguf", model="4-bit")
    assert ": 4-bit (/models/4-bit.gguf) at " in file.as_text(1.0) and json.loads(file.as_json(1.0))["model"] == "4-bit"


def test_a_certificate_of_an_authority(certs: Path) -> None:
    text = announced(certs, "scheduler").as_text(1.0)
    assert "CA.pem has the authority of its certificate" in text and "https://127.0.0.1:6/v1" in text
    assert "--address 127.0.0.1:5 --tls-ca-file CA.pem\n" in text and "grpcurl -cacert CA.pem -d" in text


def test_certificates_of_clients_and_keys(certs: Path) -> None:
    locks: dict[str, Any] = {"tls_client_ca_file": certs / "ca.pem", "keys_file": Path("keys.yaml")}
    text = announced(certs, "scheduler", **locks).as_text(1.0)
    assert "  OCTAVO_API_KEY=KEY octavo chat" in text
    assert "--tls-client-cert-file CLIENT.pem --tls-client-key-file CLIENT.key\n" in text
    assert "-cert CLIENT.pem -key CLIENT.key -H 'authorization: Bearer KEY'" in text


def test_a_certificate_of_its_own_is_whom_to_trust_and_gives_the_name(certs: Path) -> None:
    text = announced(certs, "own").as_text(1.0)
    assert f"--address gpu-1.example.com:5 --tls-ca-file {certs / 'own.pem'}\n" in text
    assert "https://gpu-1.example.com:6/v1" in text and "CA.pem" not in text
    assert announced(certs, "scheduler", address="[::1]:5").address == "localhost:5"


def test_certificates_that_cannot_be_used_are_told_before_anything_starts(certs: Path) -> None:
    options: dict[str, Any] = {"tls_cert_file": certs / "own.pem", "tls_key_file": certs / "ca.key"}
    with pytest.raises(OptionError, match=r"TLS: .*own\.pem.*key values mismatch"):
        Announcement.of(SchedulerConfig(**options), "m", 1, "127.0.0.1:5", None)
