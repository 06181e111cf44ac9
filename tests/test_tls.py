"""TLS files: which fit each other, and that new ones count while broken ones change nothing."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from octavo.cli import main
from octavo.commands.certs import ROLES
from octavo.shared.access.tls import (
    ServerTls,
    TlsError,
    TlsFiles,
    check_name,
    client_context,
    client_credentials,
    shown_by,
)
from octavo.shared.watched_files import LOOK_AGAIN_S


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    assert main(["certs", str(folder), "--name", "10.1.2.3", "--name", "host.example"]) == 0
    return folder


@pytest.fixture
def certs(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "certs"))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def files(folder: Path, cert: str = "scheduler", key: str = "scheduler", ca: str | None = None) -> TlsFiles:
    return TlsFiles(folder / f"{cert}.pem", folder / f"{key}.key", None if ca is None else folder / f"{ca}.pem")


def make_expired(folder: Path) -> None:
    """`expired.pem` has the key of the scheduler, and ended a day ago."""
    request = ["openssl", "req", "-new", "-key", "scheduler.key", "-subj", "/CN=late", "-out", "late.csr"]
    sign = ["openssl", "x509", "-req", "-in", "late.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-days", "-1"]
    subprocess.run(request, cwd=folder, check=True, capture_output=True)
    subprocess.run([*sign, "-out", "expired.pem"], cwd=folder, check=True, capture_output=True)


def test_what_does_not_fit_is_refused_in_a_line_that_names_it(certs: Path) -> None:
    make_expired(certs)
    (certs / "empty.pem").write_text("")
    for wrong, complaint in (
        (files(certs, key="worker"), "key values mismatch"),
        (files(certs, cert="nowhere"), "nowhere.pem: No such file or directory"),
        (files(certs, cert="empty"), "empty.pem"),
        (files(certs, ca="empty"), "empty.pem"),
        (files(certs, cert="expired"), "expired.pem: certificate has expired"),
    ):
        with pytest.raises(TlsError, match=complaint) as raised:
            ServerTls(wrong)
        assert "\n" not in str(raised.value)
    ServerTls(files(certs, ca="ca"))


def test_certificates_that_cannot_be_made_anew_stay_as_they_are(
    certs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where the authority's key is kept elsewhere."""
    (certs / "ca.key").unlink()
    before = {file.name: file.read_bytes() for file in certs.iterdir() if file.suffix in (".key", ".pem")}
    assert main(["certs", str(certs), "--name", "gpu-9"]) == 1
    assert "openssl x509" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in certs.iterdir() if file.suffix in (".key", ".pem")} == before


@pytest.mark.parametrize("make", [client_credentials, client_context])
def test_half_a_pair_and_files_that_are_empty_are_refused_before_grpc_aborts_over_them(
    make: Callable[..., object], certs: Path
) -> None:
    ca, cert, key, empty = (certs / name for name in ("ca.pem", "client.pem", "client.key", "empty"))
    empty.touch()
    for files, complaint in (
        ((ca, cert, None), "client.pem: a certificate and its key are needed together"),
        ((ca, None, key), "client.key: a certificate and its key are needed together"),
        ((ca, cert, empty), "empty is empty"),
        ((ca, empty, key), "empty is empty"),
        ((empty, cert, key), "empty is empty"),
        ((certs / "nowhere", None, None), "nowhere: No such file"),
    ):
        with pytest.raises(TlsError, match=complaint):
            make(*files)
    make(ca, cert, key)
    make(ca)


@pytest.mark.parametrize("url", ["127.0.0.1:1", "https://127.0.0.1:1"])
def test_files_of_a_command_that_cannot_be_used_are_its_usage(
    url: str, certs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = certs / "client.key"
    for option, complaint in (
        (f"--tls-client-key-file={key}", "client.key: a certificate and its key are needed together"),
        (f"--tls-ca-file={certs}/nowhere", "nowhere: No such file or directory"),
    ):
        assert main(["health", url, option]) == 2
        said = capsys.readouterr()
        assert complaint in said.err and not said.out


def shown_to_a_client(context: ssl.SSLContext) -> bytes:
    """The certificate, in DER, that a server with this context shows."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        context.wrap_socket(theirs, server_side=True).close()

    thread = threading.Thread(target=serve)
    thread.start()
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    with anybody.wrap_socket(ours) as client:
        shown = client.getpeercert(binary_form=True)
    thread.join(10)
    assert shown is not None
    return shown


def der(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


def test_new_files_count_and_broken_ones_leave_the_old_in_force(certs: Path) -> None:
    make_expired(certs)
    clock, old = Clock(), der(certs / "scheduler.pem")
    tls = ServerTls(files(certs), clock)
    context = tls.context()
    assert shown_to_a_client(context) == old
    for broken in ("worker.pem", "expired.pem"):  # of another key, and too late
        shutil.copy(certs / broken, certs / "scheduler.pem")
        clock.now_s += LOOK_AGAIN_S
        for _ in range(3):  # one line, and not again until they change
            tls.look_again()
            clock.now_s += LOOK_AGAIN_S
        assert shown_to_a_client(context) == old
    assert tls.num_failures == 2
    shutil.copy(certs / "worker.pem", certs / "scheduler.pem")
    shutil.copy(certs / "worker.key", certs / "scheduler.key")
    tls.look_again()
    assert shown_to_a_client(context) == der(certs / "worker.pem") and tls.num_failures == 2


def test_files_that_are_replaced_while_they_are_read_or_do_not_count_yet_are_read_again(
    certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, old = Clock(), der(certs / "scheduler.pem")
    tls = ServerTls(files(certs), clock)
    context = tls.context()

    def replaced_meanwhile(path: Path) -> bytes:
        data = read_bytes(path)
        if path.name == "scheduler.key":  # the certificate was read; these two are what is tried on each other
            shutil.copy(certs / "worker.pem", certs / "scheduler.pem")
            shutil.copy(certs / "worker.key", certs / "scheduler.key")
        return data

    read_bytes = Path.read_bytes
    (certs / "scheduler.pem").touch()
    clock.now_s += LOOK_AGAIN_S
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Path, "read_bytes", replaced_meanwhile)
        tls.look_again()
    assert shown_to_a_client(context) == old and tls._read_files.content.cert != (certs / "worker.pem").read_bytes()
    for fault in (ssl.SSLError(1, "not yet valid"), OSError(5, "Input/output error")):
        with monkeypatch.context() as now:
            now.setattr(ssl.SSLObject, "do_handshake", Mock(side_effect=fault))
            clock.now_s += LOOK_AGAIN_S
            tls.look_again()
        assert shown_to_a_client(context) == old and tls.num_failures == 1
    clock.now_s += LOOK_AGAIN_S
    tls.look_again()
    assert shown_to_a_client(context) == der(certs / "worker.pem")


def test_authorities_of_clients_that_are_taken_away_count_for_new_connections(certs: Path, tmp_path: Path) -> None:
    """Of servers that are not gRPC's, too."""
    other, clock = tmp_path / "other", Clock()
    assert main(["certs", str(other)]) == 0
    tls = ServerTls(files(certs, ca="ca"), clock)
    context = tls.context()
    assert is_let_in(context, certs) and not is_let_in(context, other)
    shutil.copy(other / "ca.pem", certs / "ca.pem")
    clock.now_s += LOOK_AGAIN_S
    tls.look_again()
    assert is_let_in(context, other) and not is_let_in(context, certs)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_nor_is_who_takes_up_a_session_of_before(certs: Path, tmp_path: Path, version: ssl.TLSVersion) -> None:
    """Nobody looks at the certificate of one that does."""
    other, clock = tmp_path / "other", Clock()
    assert main(["certs", str(other)]) == 0
    tls = ServerTls(files(certs, ca="ca"), clock)
    context, client = tls.context(), context_of_client(certs)
    client.maximum_version = version
    session = shake_hands(client, context).session
    with (certs / "scheduler.pem").open("a") as own:
        own.write("\n")
    clock.now_s += LOOK_AGAIN_S
    tls.look_again()
    shake_hands(client, context, session)  # which the same authorities take, whatever else is new
    shutil.copy(other / "ca.pem", certs / "ca.pem")
    clock.now_s += LOOK_AGAIN_S
    tls.look_again()
    with pytest.raises(ssl.SSLError):
        shake_hands(client, context, session)


def context_of_client(folder: Path) -> ssl.SSLContext:
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    anybody.load_cert_chain(folder / "client.pem", folder / "client.key")
    return anybody


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, session: ssl.SSLSession | None = None) -> ssl.SSLObject:
    """The end of the client, which has read something."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking, asked = client.wrap_bio(back, there, session=session), server.wrap_bio(there, back, server_side=True)
    left = [asking, asked]
    while left:
        for end in list(left):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                left.remove(end)
    asked.write(b"a")
    asking.read(1)
    return asking


def is_let_in(context: ssl.SSLContext, folder: Path) -> bool:
    """Whether the certificate of the client in `folder` is accepted."""
    try:
        shake_hands(context_of_client(folder), context)
    except ssl.SSLCertVerificationError:
        return False
    return True


def test_a_key_with_a_pass_phrase_is_refused_without_a_question(certs: Path) -> None:
    encrypt = ["openssl", "ec", "-in", "scheduler.key", "-aes256", "-passout", "pass:secret", "-out", "locked.key"]
    subprocess.run(encrypt, cwd=certs, check=True, capture_output=True)
    with pytest.raises(TlsError, match=r"locked\.key"):
        ServerTls(files(certs, key="locked"))


def test_versions_before_1_2_are_refused(certs: Path) -> None:
    context = ServerTls(files(certs)).context()
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_certificates_are_for_the_names_that_were_asked_for_and_nobody_else_reads_the_keys(made: Path) -> None:
    text = subprocess.run(
        ["openssl", "x509", "-in", made / "worker.pem", "-noout", "-text"], check=True, capture_output=True, text=True
    ).stdout
    for name in ("DNS:worker", "IP Address:127.0.0.1", "DNS:host.example", "10.1.2.3", "URI:spiffe://octavo/worker"):
        assert name in text
    assert all(key.stat().st_mode & 0o077 == 0 for key in made.glob("*.key"))
    before = (made / "worker.pem").read_bytes()
    assert main(["certs", str(made)]) == 0 and (made / "worker.pem").read_bytes() == before


def test_certificates_that_are_past_or_lack_a_name_are_made_anew_with_the_names_that_they_had(
    certs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def names(role: str) -> tuple[str, ...]:
        return shown_by(certs / f"{role}.pem", certs / f"{role}.key").names

    had, before = names("worker"), (certs / "worker.pem").read_bytes()
    assert main(["certs", str(certs), "--name", "host.example", "--name", "10.1.2.3"]) == 0
    assert capsys.readouterr().out == f"{certs}: nothing new; kept as they were: ca, {', '.join(ROLES)}\n"
    assert (certs / "worker.pem").read_bytes() == before
    make_expired(certs)
    shutil.copy(certs / "expired.pem", certs / "scheduler.pem")
    assert main(["certs", str(certs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["made"] == ["scheduler"]
    assert "localhost" in names("scheduler")
    assert main(["certs", str(certs), "--name", "gpu-9"]) == 0
    assert set(names("worker")) == {*had, "gpu-9"} and len(names("worker")) == len(had) + 1
    (certs / "ca.pem").unlink()
    assert main(["certs", str(certs)]) == 0
    assert set(names("worker")) == {*had, "gpu-9"}
    ServerTls(files(certs, ca="ca"))


def test_a_name_of_the_certificate_has_to_be_one_that_is_allowed() -> None:
    shown = {"x509_subject_alternative_name": [b"a.example", b"spiffe://octavo/scheduler"], "x509_common_name": [b"s"]}
    assert check_name(shown, ["b", "spiffe://octavo/scheduler"]) == "spiffe://octavo/scheduler"
    assert check_name(shown, ["s"]) is None and check_name({"x509_common_name": [b"s"]}, ["s"]) == "s"
    assert check_name(shown, ["example", "spiffe://octavo"]) is None and check_name({}, ["s"]) is None
