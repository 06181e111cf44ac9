"""The page as it is served: whole, from here alone, under a policy; and the live feed, for whom it is."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from gateway_svc.config import GatewayConfig
from tests.gateway.running import Gateway, gateway
from tests.integration.fake_inference import FakeServer


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture(scope="module")
def live(server: FakeServer) -> Iterator[Gateway]:
    with gateway(server.address, live_panel=True) as running:
        yield running


@pytest.fixture(scope="module")
def plain(server: FakeServer) -> Iterator[Gateway]:
    with gateway(server.address) as running:
        yield running


def test_every_file_is_served_as_what_it_is_and_once(live: Gateway) -> None:
    expected = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    names = [file.name for file in files("gateway_svc.page").iterdir() if not file.name.startswith("__")]
    assert len(names) > 10
    for name in names:
        path = "/" if name == "index.html" else f"/page/{name}"
        status, headers, _ = live.ask("GET", path)
        assert (status, headers["content-type"]) == (200, f"{expected[name[name.rindex('.') :]]}; charset=utf-8")
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert headers["x-content-type-options"] == "nosniff"
        again = live.ask("GET", path, if_none_match=headers["etag"])
        assert (again[0], again[2]) == (304, "")


def test_the_page_names_files_that_there_are_and_nothing_from_elsewhere(live: Gateway) -> None:
    folder = {file.name: file for file in files("gateway_svc.page").iterdir()}
    html = live.ask("GET", "/")[2]
    named = re.findall(r'(?:src|href)="([^#"][^"]*)"', html)
    assert named and all(live.ask("GET", path)[0] == 200 for path in named)
    assert "<style" not in html and " style=" not in html and not re.search(r"<script(?! type=\"module\" src)", html)
    assert not re.search(r"\son[a-z]+=", html)
    for name, file in folder.items():
        if name.endswith(".js"):
            imported = re.findall(r'from "\./([^"]+)"', text := file.read_text())
            assert all(each in folder for each in imported)
            assert "innerHTML" not in text, "what comes from a model is text, and nothing else"
        if not name.startswith("__"):
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", file.read_text())


def test_the_page_says_whether_there_is_a_live_panel(live: Gateway, plain: Gateway) -> None:
    assert 'data-live-panel="on"' in live.ask("GET", "/")[2]
    assert 'data-live-panel="off"' in plain.ask("GET", "/")[2]
    assert plain.ask("GET", "/live")[0] == 404


def test_no_page(server: FakeServer) -> None:
    with gateway(server.address, page=False) as running:
        assert [running.ask("GET", path)[0] for path in ("/", "/page/main.js", "/live")] == [404, 404, 404]
        assert running.ask("GET", "/v1/models")[0] == 200
    with pytest.raises(ValueError, match="live_panel"):
        GatewayConfig(page=False, live_panel=True)


def open_feed(where: Gateway, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", where.port, timeout=60)
    connection.request("GET", "/live", headers=headers)
    return connection.getresponse()


def next_frame(response: http.client.HTTPResponse) -> Any:
    line = b""
    while not line.startswith(b"data: "):
        line = response.readline()
        assert line, "the stream has ended"
    return json.loads(line[6:])


def test_a_head_without_the_frames_is_refused(live: Gateway) -> None:
    status, headers, _ = live.ask("HEAD", "/live")
    assert (status, headers["allow"]) == (405, "GET")


def test_frames_over_http_and_what_the_scheduler_is_asked_for(server: FakeServer, live: Gateway) -> None:
    response = open_feed(live)
    assert response.status == 200 and response.headers["content-type"].startswith("text/event-stream")
    assert "access-control-allow-origin" not in response.headers
    assert next_frame(response)["running"] == 3
    server.control.send_step()
    while next_frame(response)["steps"]["num_decode_tokens"] != 2:
        pass
    response.close()


@pytest.mark.parametrize(("name", "status"), [("localhost", 200), ("[::1]", 200), ("evil.example", 403), ("", 403)])
def test_on_loopback_only_for_who_calls_this_machine_by_its_own_name(live: Gateway, name: str, status: int) -> None:
    response = open_feed(live, Host=f"{name}:{live.port}" if name else "")
    assert response.status == status
    response.close()


@pytest.mark.parametrize(("port", "status"), [(0, 200), (1, 403)])
def test_a_page_of_another_origin_gets_nothing_even_where_it_may_call_the_api(
    server: FakeServer, port: int, status: int
) -> None:
    with gateway(server.address, live_panel=True, allow_origin=("*",)) as running:
        response = open_feed(running, Origin=f"http://127.0.0.1:{running.port + port}")
        assert response.status == status
        response.close()


def test_a_cache_is_made_smaller_only_for_a_demonstration_and_by_its_own_page(
    server: FakeServer, live: Gateway
) -> None:
    asked = {"worker": "here:1", "num_blocks": 7}
    assert live.post("/live/withhold", asked)[0] == 404
    with gateway(server.address, live_panel=True, demo=True) as running:
        assert running.post("/live/withhold", asked) == (200, {"num_withheld": 7})
        assert server.control.withheld == [("here:1", 7)]
        assert running.post("/live/withhold", asked, origin="http://evil.example")[0] == 403
        assert running.post("/live/withhold", {**asked, "num_blocks": -1})[1]["error"]["param"] == "num_blocks"
        assert running.post("/live/withhold", {**asked, "blocks": 1})[1]["error"]["param"] == "blocks"
        form = running.ask("POST", "/live/withhold", b"worker=here", content_type="text/plain")
        assert form[0] == 415 and len(server.control.withheld) == 1
        assert next_frame(open_feed(running))["demo"] is True
    with pytest.raises(ValueError, match="demo"):
        GatewayConfig(demo=True)


def test_a_page_that_looks_on_keeps_nobody_from_ending(server: FakeServer) -> None:
    with gateway(server.address, live_panel=True, drain_timeout=60.0) as running:
        response = open_feed(running)
        next_frame(response)
    assert response.read().strip() == b""  # and the service has ended within seconds, or leaving it would have failed
