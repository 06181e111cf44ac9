"""The page in a browser where things go wrong: networks that fall silent, models that change, answers that break off.

Before a scheduler of known answers, which a test makes say what it wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from gateway_svc.live import live_feeds
from protos import inference_pb2 as pb
from tests.chaos.tcp_proxy import TcpProxy
from tests.chromium import MISSING, Chromium, Page, chromium, find_chromium
from tests.gateway.running import Gateway, gateway
from tests.integration.fake_inference import FakeServer

pytestmark = pytest.mark.skipif(find_chromium() is None, reason=MISSING)

COMMENT_INTERVAL_S = 0.4
SILENT_S = 2.5 * COMMENT_INTERVAL_S + 2.0  # after which the page takes a connection for dead
STATUS = "document.querySelector('#live-status').textContent"
QUEUES = "document.querySelector('#queues').textContent"
MODELS = "[...document.querySelector('[name=model]').options].map(option => option.value).join(' ')"
TITLES = "[...document.querySelectorAll('.answer h3')].map(title => title.textContent).join('; ')"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def served(server: FakeServer) -> Iterator[Gateway]:
    with gateway(server.address, live_panel=True, comment_interval=COMMENT_INTERVAL_S) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Chromium, served: Gateway) -> Iterator[Page]:
    with contextlib.closing(browser.open(served.url + "/")) as page:
        yield page
        # What the browser itself says of each refusal is no problem of the page.
        assert [each for each in page.problems if "Failed to load resource" not in each] == []


def send(page: Page, **fields: int) -> None:
    for name, value in fields.items():
        page.fill(f"[name={name}]", str(value))
    page.click("button[type=submit]")


def num_feeds(page: Page) -> int:
    return sum(address.endswith("/live") for address in page.asked)


@contextlib.contextmanager
def proxied(port: int) -> Iterator[tuple[TcpProxy, Callable[[Callable[[], None]], None]]]:
    """A proxy before `port`, and what calls a method of it in its event loop."""
    proxy, over = TcpProxy(port), asyncio.Event()
    running: queue.SimpleQueue[asyncio.AbstractEventLoop] = queue.SimpleQueue()

    async def carry() -> None:
        await proxy.start()
        running.put(asyncio.get_running_loop())
        await over.wait()
        await proxy.close()

    thread = threading.Thread(target=lambda: asyncio.run(carry()), daemon=True)
    thread.start()
    loop = running.get(timeout=10)

    def call(method: Callable[[], None]) -> None:
        loop.call_soon_threadsafe(method)

    try:
        yield proxy, call
    finally:
        call(over.set)
        thread.join(10)


def test_a_network_that_falls_silent_is_told_from_a_server_with_nothing_new(browser: Chromium, served: Gateway) -> None:
    with proxied(served.port) as (proxy, call):
        with contextlib.closing(browser.open(f"http://127.0.0.1:{proxy.port}/")) as page:
            page.expect(f"{QUEUES}.includes('Running3')")
            time.sleep(SILENT_S + 1)
            assert (page.evaluate(STATUS), num_feeds(page)) == ("", 1), "comments come, if nothing else"
            call(proxy.swallow)
            page.expect(f"{STATUS} === 'The connection is lost; it is tried again'")
            call(proxy.heal)
            page.expect(f"{STATUS} === ''")


def test_a_server_without_comments_may_be_silent(browser: Chromium, server: FakeServer) -> None:
    with gateway(server.address, live_panel=True, comment_interval=0.0) as served:
        with contextlib.closing(browser.open(served.url + "/")) as page:
            page.expect(f"{QUEUES}.includes('Running3')")
            time.sleep(SILENT_S + 1)
            assert (page.evaluate(STATUS), num_feeds(page)) == ("", 1)


def test_a_server_that_has_no_room_says_so_itself(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    page.expect(f"{QUEUES}.includes('Running3')")
    monkeypatch.setattr(live_feeds, "MAX_VIEWERS", 0)
    page.click("#pause")
    page.click("#pause")
    page.expect(f"{STATUS} === 'No news: 0 pages look at this server, at most 0 may; it is tried again'")
    monkeypatch.undo()
    page.expect(f"{STATUS} === ''")


def test_speeds_begin_anew_with_each_connection(page: Page, server: FakeServer) -> None:
    request = pb.RequestState(request_id="one", phase=pb.REQUEST_PHASE_RUNNING, sequences=[pb.SequenceState()])
    server.control.view = pb.View(load=pb.Load(num_requests_running=1), requests=[request])
    for _ in range(40):
        server.control.send_step()
    page.expect(f"/Tokens\\/s out[1-9]/.test({QUEUES}) && document.querySelector('#requests tbody').rows.length")
    page.evaluate(
        f"new MutationObserver(() => {{ window.fell ||= /-/.test({QUEUES}); }})"
        ".observe(document.querySelector('#queues'), { subtree: true, childList: true, characterData: true })"
    )
    page.click("#pause")
    before = page.evaluate(QUEUES)
    time.sleep(1.1)  # in which speeds would be those of nothing
    page.hover("#requests tbody tr")  # it is drawn again
    assert page.evaluate(QUEUES) == before, "a page that is paused stands still"
    page.click("#pause")
    page.hover("#requests tbody tr")  # also before the first frame
    page.expect(f"/Tokens\\/s out0/.test({QUEUES})")  # the count has begun again
    assert not page.evaluate("window.fell")


def test_requests_of_two_tenants_may_have_one_id(page: Page, server: FakeServer) -> None:
    def request(tenant: str, name: str, *table: int) -> pb.RequestState:
        sequence = pb.SequenceState(block_table=table)
        phase = pb.REQUEST_PHASE_RUNNING
        return pb.RequestState(request_id=name, tenant=tenant, worker="a:1", phase=phase, sequences=[sequence])

    requests = [
        request("acme", "dup", 0),
        request("acme", "x", 1),
        request("other", "dup", 2),
        request("other", "y", 3),
    ]
    load = pb.Load(workers=[pb.WorkerState(address="a:1", health=pb.WORKER_HEALTH_SERVING)])
    pools = [pb.BlockPool(worker="a:1", num_blocks=4, ref_counts=[1, 1, 1, 1])]
    server.control.view = pb.View(load=load, requests=requests, pools=pools)
    names = "[...document.querySelectorAll('#requests tbody button')].map(button => button.textContent).join(' ')"
    page.expect(f"{names} === 'dup x dup y'")
    page.click("#requests tbody tr:nth-child(3) button")
    page.click("#pause")  # the pointer is elsewhere
    pressed = (
        "[...document.querySelectorAll('#requests button')].map(each => each.getAttribute('aria-pressed')).join(' ')"
    )
    assert page.evaluate(pressed) == "false false true false"
    chosen = "[...document.querySelectorAll('.map .block')].map(each => each.matches('.chosen') ? 1 : 0).join('')"
    assert page.evaluate(chosen) == "0010"

    page.click("#pause")
    requests[2].phase = pb.REQUEST_PHASE_PREEMPTED
    server.control.view = pb.View(load=load, requests=requests[1:], pools=pools)
    page.expect(f"{names} === 'x dup y'")
    page.expect("document.querySelector('#events').textContent.includes('dup was preempted')")
    assert page.evaluate(pressed) == "false true false"


def test_a_row_that_vanishes_under_the_pointer_is_not_pointed_at(page: Page, server: FakeServer) -> None:
    def request(name: str, block: int) -> pb.RequestState:
        sequence = pb.SequenceState(block_table=[block])
        return pb.RequestState(request_id=name, worker="a:1", phase=pb.REQUEST_PHASE_RUNNING, sequences=[sequence])

    load = pb.Load(workers=[pb.WorkerState(address="a:1", health=pb.WORKER_HEALTH_SERVING)])
    pools = [pb.BlockPool(worker="a:1", num_blocks=2, ref_counts=[1, 1])]
    both = [request("x", 0), request("y", 1)]
    chosen = "[...document.querySelectorAll('.map .block')].map(each => each.matches('.chosen') ? 1 : 0).join('')"
    server.control.view = pb.View(load=load, requests=both, pools=pools)
    page.expect("document.querySelector('#requests tbody').rows.length === 2")
    page.click("#requests tbody tr:nth-child(1) button")
    page.hover("#requests tbody tr:nth-child(2)")
    page.expect(f"{chosen} === '01'")
    server.control.view = pb.View(load=load, requests=both[:1], pools=pools)
    page.expect("document.querySelector('#requests tbody').rows.length === 1")
    assert page.evaluate(chosen) == "10"
    server.control.view = pb.View(load=load, requests=both, pools=pools)
    page.hover("h1")
    page.expect("document.querySelector('#requests tbody').rows.length === 2")
    assert page.evaluate(chosen) == "10"


def test_of_long_tables_only_what_is_drawn_is_looked_at(page: Page) -> None:
    found = page.evaluate(
        """
        import('/page/request_table.js').then(({ RequestTable }) => {
          const body = document.createElement('tbody');
          const numbers = (count) => Array.from({ length: count }, (_, at) => at);
          let numLooks = 0;
          const copies = { has: () => { numLooks++; return false; } };
          const requests = [[4000, 0], [90, 10], [96, 0], [0, 97]].map(([device, host], key) => ({
            key, id: 'a', state: 'running', worker: 'a:1',
            sequences: [{ tokens: 1, cached: 0, table: numbers(device), host_table: numbers(host) }],
          }));
          new RequestTable(body, () => {}).show({ workers: [], requests }, copies);
          const lists = [...body.querySelectorAll('ul')];
          return [numLooks, lists.map((list) => [list.children.length, list.lastElementChild.textContent])];
        })
        """
    )
    assert found == [96 + 90 + 96, [[97, "and 3904 more"], [97, "and 4 more"], [96, "95"], [97, "and 1 more"]]]


def test_the_token_that_keys_lead_to_is_in_sight(page: Page) -> None:
    page.look_like(width=700, height=600, dark=False)
    send(page, max_tokens=900)
    page.expect(f"{TITLES}.includes('900 tokens')")
    page.evaluate("document.querySelector('.tokens').focus()")
    place = """(() => {
      const { top, bottom } = document.querySelector('.token.active').getBoundingClientRect();
      return [top >= 0, bottom <= document.querySelector('#probabilities').getBoundingClientRect().top];
    })()"""
    assert page.evaluate(place) == [True, True]
    for key in ("End", "ArrowLeft", "Home", "ArrowRight", "End"):
        page.press(key)
        assert page.evaluate(place) == [True, True], key
    page.evaluate("document.querySelector('#prompt').focus()")
    page.evaluate("document.querySelector('.tokens').focus()")
    assert page.evaluate(place) == [True, True]


def test_the_table_of_a_token_that_is_gone_covers_no_error(page: Page, server: FakeServer) -> None:
    page.look_like(width=700, height=600, dark=False)
    send(page, max_tokens=5)
    page.expect(f"{TITLES}.includes('5 tokens')")
    page.hover(".answer .token")
    page.expect("!document.querySelector('#probabilities table').hidden")
    server.inference.refusal = (grpc.StatusCode.INVALID_ARGUMENT, "not this", ())
    send(page, max_tokens=5)
    page.expect("document.querySelector('#request-status.error')?.textContent.includes('not this')")
    is_seen = """(() => {
      const status = document.querySelector('#request-status');
      status.scrollIntoView({ block: 'end' });
      const box = status.getBoundingClientRect();
      return document.elementFromPoint(box.x + 5, box.y + box.height / 2) === status;
    })()"""
    assert page.evaluate(is_seen)
    assert page.evaluate("document.querySelector('#probabilities table').hidden")
    server.inference.refusal = None
    send(page, max_tokens=5)
    page.expect(f"{TITLES}.includes('5 tokens')")
    page.hover(".answer .token")
    page.expect("!document.querySelector('#probabilities table').hidden")


def test_an_answer_that_is_stopped_or_breaks_off_is_said(page: Page, server: FakeServer) -> None:
    server.inference.token_delay_s = 0.05
    send(page, max_tokens=1000, n=2)
    page.expect("document.querySelectorAll('.answer .token').length > 4")
    page.click("#stop")
    page.expect("document.querySelector('#request-status').textContent === 'Stopped'")
    one, other = page.evaluate(TITLES).split("; ")
    assert one.startswith("answer 1: ") and one.endswith(" tokens, stopped") and other.endswith(" tokens, stopped")
    spoken = "[...document.querySelectorAll('.answer .spoken')].map(each => each.textContent)"
    shown = "[...document.querySelectorAll('.answer .tokens')].map(each => each.textContent)"
    assert page.evaluate(spoken) == page.evaluate(shown) and all(page.evaluate(spoken))

    server.inference.token_delay_s = 0.0
    server.inference.losses = [(3, grpc.StatusCode.INVALID_ARGUMENT)]  # which nobody tries again
    send(page, max_tokens=5, n=1)
    page.expect(f"{TITLES} === 'answer 1: 3 tokens, broken off'")
    assert page.evaluate(spoken) == page.evaluate(shown)
    send(page, max_tokens=5)
    page.expect(f"{TITLES} === 'answer 1: 5 tokens, as long as it may be'")


def test_models_are_asked_for_again_when_others_may_be_served(page: Page, server: FakeServer) -> None:
    def serves(*names: str) -> None:
        server.inference.models = [(name, "aaaa", True) for name in names]

    page.expect(f"{MODELS} === 'fake owner/name'")
    page.evaluate("document.querySelector('[name=model]').value = 'owner/name'")
    serves("new", "owner/name")
    page.evaluate("document.querySelector('[name=model]').focus()")
    page.expect(f"{MODELS} === 'new owner/name'")
    assert page.evaluate("document.querySelector('[name=model]').value") == "owner/name"

    serves("newer")
    server.inference.refusal = (grpc.StatusCode.NOT_FOUND, "no such model", ())
    send(page)
    page.expect(f"{MODELS} === 'newer'")
    page.expect("document.querySelector('#request-status.error')?.textContent.includes('no such model')")

    serves("newest")
    worker = pb.WorkerState(address="a:1", health=pb.WORKER_HEALTH_SERVING, model="newest")
    server.control.view = pb.View(load=pb.Load(workers=[worker]))
    page.expect(f"{MODELS} === 'newest'")


def test_models_are_asked_for_again_when_the_server_is_back(browser: Chromium, server: FakeServer) -> None:
    with proxied(0) as (proxy, call), contextlib.ExitStack() as stack:
        with gateway(server.address, live_panel=True) as first:
            proxy.target_port = first.port
            page = stack.enter_context(contextlib.closing(browser.open(f"http://127.0.0.1:{proxy.port}/")))
            page.expect(f"{MODELS} === 'fake owner/name' && {QUEUES}.includes('Running3')")
            call(proxy.cut)
            page.expect(f"{STATUS} === 'The connection is lost; it is tried again'")
        server.inference.models = [("other", "aaaa", True)]
        with gateway(server.address, live_panel=True) as second:
            proxy.target_port = second.port
            call(proxy.heal)
            page.expect(f"{MODELS} === 'other'")
            assert page.evaluate(STATUS) == ""
