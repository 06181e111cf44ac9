"""A service that others can reach does not start without a lock, unless somebody says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway_svc import server as gateway
from gateway_svc.config import GatewayConfig
from octavo.shared.access.exposure import check_exposure
from octavo.shared.options import OptionError
from scheduler_svc import server as scheduler
from scheduler_svc.config import SchedulerConfig
from worker_svc import server as worker
from worker_svc.config import WorkerConfig


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.9.1"])
def test_nobody_else_reaches_loopback(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_exposure(host, is_locked=False, insecure=False, locks="keys")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "some-host"])
def test_an_open_service_is_refused_or_warned_of(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OptionError, match=f"host is {host}, .* lock it with keys; --insecure"):
        check_exposure(host, is_locked=False, insecure=False, locks="keys")
    check_exposure(host, is_locked=True, insecure=False, locks="keys")
    check_exposure(host, is_locked=False, insecure=True, locks="keys")
    said = capsys.readouterr()
    assert (said.out + said.err).count("everybody who reaches this port may use it") == 1


def test_every_service_asks(tmp_path: Path) -> None:
    here = "0.0.0.0"
    with pytest.raises(OptionError, match="lock it with --keys-file, --jwt-jwks-url and --tls-client-ca-file;"):
        scheduler.main(SchedulerConfig(host=here, worker=("127.0.0.1:1",)))
    with pytest.raises(OptionError, match="lock it with --token-file and --tls-client-ca-file;"):
        worker.main(WorkerConfig(host=here, model=str(tmp_path)))
    with pytest.raises(OptionError, match="lock it with --tls-cert-file;"):
        gateway.main(GatewayConfig(host=here))
    # With a lock each goes on to the next thing that is wrong.
    with pytest.raises(OptionError, match=r"--keys-file: .*nowhere"):
        scheduler.main(SchedulerConfig(host=here, worker=("127.0.0.1:1",), keys_file=tmp_path / "nowhere"))


def test_tls_alone_is_no_lock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says who a service is, and nothing of who calls."""
    cert, key = tmp_path / "a.pem", tmp_path / "a.key"
    with pytest.raises(OptionError, match="lock it with --token-file and --tls-client-ca-file;"):
        worker.main(WorkerConfig(host="0.0.0.0", model=str(tmp_path), tls_cert_file=cert, tls_key_file=key))
    config = SchedulerConfig(host="0.0.0.0", worker=("127.0.0.1:1",), tls_cert_file=cert, tls_key_file=key)
    with pytest.raises(OptionError, match=r"TLS: .*a\.pem"):
        scheduler.main(config)
    assert "everybody who reaches this port may use it" in "".join(capsys.readouterr())
