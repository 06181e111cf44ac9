"""Ports that are free, taken or nobody's, and how a listener is reached."""

from __future__ import annotations

import itertools
import random
import socket
import subprocess
import sys
from subprocess import PIPE

import pytest

from octavo.shared import ports
from octavo.shared.ports import BindError, PortInUse, check_port_is_free, free_port, free_ports, reachable


def test_a_port_in_use_is_said_before_anything_starts() -> None:
    port = free_port()  # which the system hands to nobody once it is free again
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(PortInUse, match=f"port {port} on 127.0.0.1 is in use"):
            check_port_is_free("127.0.0.1", port)
    check_port_is_free("127.0.0.1", port)
    check_port_is_free("127.0.0.1", 0)
    with pytest.raises(BindError, match="cannot listen on no-such-host"):
        check_port_is_free("no-such-host.invalid", 50051)


def test_a_free_port_can_be_had() -> None:
    port = free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        assert listener.getsockname()[1] == port != 0


def test_ports_of_several_listeners_are_not_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([11_315, 11_280, 11_315, 11_316, 11_316, 11_317])  # which no other test is given meanwhile
    monkeypatch.setattr("octavo.shared.ports._random.randrange", lambda *_: next(drawn))
    assert free_ports(2, besides=[11_280, None]) == [11_315, 11_316]
    assert free_ports(1, besides=[11_316]) == [11_317]


def test_no_port_is_given_twice_whoever_seeds_random_numbers() -> None:
    random.seed(0)
    first = free_ports(3)
    random.seed(0)
    assert not set(first) & {*free_ports(3), free_port()}


@pytest.mark.skipif(sys.platform != "linux", reason="ports are marked on Linux alone")
def test_a_port_that_another_process_was_given_is_free_again_when_that_one_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say = "from octavo.shared.ports import free_port; print(free_port(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", say], stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdout is not None
        given = int(other.stdout.readline())
        drawn = itertools.cycle([given, 11_318])
        monkeypatch.setattr("octavo.shared.ports._random.randrange", lambda *_: next(drawn))
        assert free_port() == 11_318
        other.communicate("\n", timeout=20)
    assert free_port() == given


def test_only_so_many_ports_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.shared.ports.MAX_GIVEN", 3)
    given = free_ports(5)
    assert [port for port, _ in ports._given] == given[2:]


def test_addresses_by_which_a_server_is_reached() -> None:
    assert reachable("0.0.0.0", 1) == "127.0.0.1:1"
    assert reachable("::", 1) == "127.0.0.1:1"
    assert reachable("::1", 1) == "[::1]:1"
