"""The page before a server with keys: it asks for one, says what is wrong with it, and shows what its role allows."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from octavo.shared.access.keys import hash_of
from tests.chromium import MISSING, Page, chromium, find_chromium
from tests.fakes import FakeWorker
from tests.gateway.running import Gateway, gateway
from tests.integration.scheduler_process import scheduler

pytestmark = pytest.mark.skipif(find_chromium() is None, reason=MISSING)

ROLES = {"all": ["control", "inference"], "eyes": ["metrics"], "web": ["inference"]}
ASKS = "!document.querySelector('#live-key').hidden"
WHY = "document.querySelector('#live-key p').textContent"
QUEUES = "document.querySelector('#queues').textContent"


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write_keys(path, *ROLES)
    return path


def write_keys(path: Path, *names: str) -> None:
    entries = [{"name": name, "sha256": hash_of(f"key-of-{name}"), "roles": ROLES[name]} for name in names]
    path.write_text(yaml.safe_dump({"keys": entries}))


@pytest.fixture(scope="module")
def served(keys_file: Path) -> Iterator[Gateway]:
    options = [f"--keys-file={keys_file}", "--max-model-len=64", "--metrics-port=0"]
    with FakeWorker() as worker, scheduler(f"--worker={worker.address}", *options) as service:
        service.wait_until_ready()
        with gateway(service.address, live_panel=True, demo=True) as running:
            yield running


@pytest.fixture
def page(served: Gateway) -> Iterator[Page]:
    with chromium() as browser, contextlib.closing(browser.open(served.url + "/")) as page:
        yield page
        # What the browser itself says of each refusal is no problem of the page.
        assert [each for each in page.problems if "status of 40" not in each] == []
        assert not any("key-of" in address for address in page.asked), "a key is in no address"


def gives(page: Page, key: str) -> None:
    page.fill("[name=live_key]", key)
    page.click("#live-key button")


def num_feeds(page: Page) -> int:
    return sum(address.endswith("/live") for address in page.asked)


def test_a_key_is_asked_for_kept_and_says_what_may_be_seen(page: Page, served: Gateway, keys_file: Path) -> None:
    page.expect(ASKS)
    assert page.evaluate(WHY) == "This server wants a key, with role control or metrics."
    asked = num_feeds(page)
    time.sleep(2.5)  # in which the feed would have been asked for again
    assert num_feeds(page) == asked == 1, "it asks the user, not the server"

    gives(page, "key-of-nobody")
    page.expect(f"{WHY} === 'The server does not know this key.' && {ASKS}")
    gives(page, "key-of-web")
    page.expect(f"{WHY}.includes('Not with this key') && {WHY}.includes('role control')")
    page.expect("document.querySelector('[name=model]').options.length === 1")  # for requests it is the right one

    gives(page, "key-of-eyes")
    page.expect("document.querySelector('#live-status').textContent.startsWith('The load alone')")
    page.expect(f"{QUEUES}.includes('Running0') && !{QUEUES}.includes('Steps/s')")
    assert page.evaluate("document.querySelectorAll('#workers article').length") == 1
    assert page.evaluate("document.querySelector('#live-key').hidden")

    page.fill("#request [name=key]", "key-of-all")  # the same key, wherever it is typed
    page.evaluate("document.querySelector('#request [name=key]').dispatchEvent(new Event('change'))")
    page.expect(f"{QUEUES}.includes('Steps/s')")
    page.expect("document.querySelector('#live-status').textContent === ''")
    page.expect("document.querySelector('.slider:not([hidden]) input')")
    page.evaluate("document.querySelector('.slider input').focus()")
    page.press("Home")
    page.expect("document.querySelectorAll('#workers .block.withheld').length > 0")  # its call has the key, too

    page.go("about:blank")
    page.go(served.url + "/")
    page.expect(f"{QUEUES}.includes('Steps/s')")  # of this tab, until it is closed
    assert page.evaluate("JSON.stringify([Object.values(sessionStorage), localStorage.length])") == json.dumps(
        [["key-of-all"], 0], separators=(",", ":")
    )

    write_keys(keys_file, "eyes")
    page.expect(f"{ASKS} && {WHY} === 'The server does not know this key.'")


def test_a_key_that_no_header_can_carry_is_one_that_nobody_knows(page: Page) -> None:
    page.expect(ASKS)
    asked = num_feeds(page)
    gives(page, "“key-of-all”")  # as a text processor has it
    page.expect(f"{WHY} === 'The server does not know this key.' && {ASKS}")
    assert page.evaluate("document.querySelector('#request-status').textContent") == (
        "No models: the key has a character that no key has"
    )
    time.sleep(2.5)  # in which the feed would have been asked for again
    assert num_feeds(page) == asked
    page.expect("document.querySelector('#live-status').textContent === ''")
