"""The page in a browser: a prompt answered, probabilities, and paging, sharing, copies and preemption as they happen.

One server whose cache is small, and one browser.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chromium import MISSING, Chromium, Page, chromium, find_chromium
from tests.integration.test_serve import serving
from tests.tiny_models import make_tiny_llama

pytestmark = pytest.mark.skipif(find_chromium() is None, reason=MISSING)

NUM_BLOCKS, LEAST_BLOCKS = 128, 32  # the longest sequence needs so many
TINY_BLOCK_BYTES = 7680  # of 16 tokens
LONG = "The sea is deep, and so is the sky above. "  # more than two blocks of tokens, which are bytes
NAMED_ROLES = {
    *("button", "checkbox", "combobox", "image", "img", "link", "listbox", "log", "option", "region"),
    *("slider", "spinbutton", "textbox", "article", "DisclosureTriangle", "list"),
}
# The least contrast of any text that is seen, where, and of how many; colours of any notation go through a canvas.
LEAST_CONTRAST = """
(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  canvas.canvas.width = canvas.canvas.height = 1;
  const over = (colour, ground) => {
    for (const each of [`rgb(${ground.join(' ')})`, colour]) {
      canvas.fillStyle = each;
      canvas.fillRect(0, 0, 1, 1);
    }
    return [...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  const ground = (node) =>
    over(getComputedStyle(node).backgroundColor, node.parentElement ? ground(node.parentElement) : [255, 255, 255]);
  const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const light = ([red, green, blue]) =>
    0.2126 * linear(red / 255) + 0.7152 * linear(green / 255) + 0.0722 * linear(blue / 255);
  const contrast = (one, other) => {
    const [less, more] = [light(one), light(other)].sort((a, b) => a - b);
    return (more + 0.05) / (less + 0.05);
  };
  const hasText = (node) => node.matches('input, textarea, select')
    || [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim());
  const texts = [...document.querySelectorAll('body *')].filter((node) =>
    hasText(node) && !node.disabled && node.checkVisibility({ visibilityProperty: true }));
  let least = [99, ''];
  for (const node of texts) {
    const behind = ground(node), found = contrast(over(getComputedStyle(node).color, behind), behind);
    if (found < least[0]) least = [found, node.outerHTML.slice(0, 120)];
  }
  return [...least, texts.length];
})()
"""

# How wide the page is, and what of it does not fit a screen of 360 pixels.
WIDTH = """
[document.documentElement.scrollWidth, [...document.querySelectorAll('body *:not(.scrolls *)')]
  .filter((node) => node.getBoundingClientRect().right > 360).map((node) => node.outerHTML.slice(0, 100))]
"""


# True once a frame shows requests that share blocks: the one that the page then stands still at.
PAUSED_WHEN_SHARED = """
(() => {
  const count = (selector) => document.querySelectorAll(selector).length;
  const isThere = count('#workers .block.shared') >= 2 && count('#requests li.shared') >= 4;
  if (isThere) document.querySelector('#pause').click();
  return isThere;
})()
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server that runs."""
    model = make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    cache = ("--kv-cache-memory", str(NUM_BLOCKS * TINY_BLOCK_BYTES / 2**30), "--swap-space", "0.001")
    http = ("--http-port", "0", "--demo", "--metrics-port", "0")
    with serving("--model", str(model), "--max-model-len", "512", *cache, *http) as served:
        served.wait_until_ready()
        yield f"http://127.0.0.1:{served.http_port}/"
        served.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(url: str, browser: Chromium) -> Iterator[Page]:
    with contextlib.closing(browser.open(url)) as page:
        page.expect("document.querySelector('[name=model]').options.length")
        yield page
        page.expect("document.querySelector('#requests tbody').rows.length === 0")  # nothing of it is left for the next
        assert page.problems == []
        assert all(address.startswith(url) for address in page.asked if not address.startswith("about:"))


def text(page: Page, selector: str) -> str:
    found: str = page.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")
    return found


def is_done(page: Page) -> None:
    page.expect("document.querySelector('#stop').disabled && document.querySelector('#answers').children.length")


def looks_for(page: Page, name: str, condition: str) -> None:
    """`window.NAME` is true from the first frame on that is drawn so, however short it stands."""
    page.evaluate(
        f"new MutationObserver(() => {{ window.{name} ||= Boolean({condition}); }})"
        ".observe(document.body, { subtree: true, childList: true, attributes: true, characterData: true })"
    )


def asks(page: Page, **fields: Any) -> None:
    page.evaluate("document.querySelector('[name=ignore_eos]').checked = true")  # whatever is drawn
    for name, value in {"seed": 1, **fields}.items():
        page.fill(f"[name={name}]", str(value))
    page.click("button[type=submit]")


def test_a_prompt_streams_and_the_pointer_shows_what_else_might_have_come(page: Page) -> None:
    asks(page, prompt="hello", max_tokens=12, seed=3, top_logprobs=4)
    is_done(page)
    assert text(page, "#request-status").startswith("12 tokens in ")
    assert page.evaluate("document.querySelectorAll('.token').length") == 12
    page.hover(".token:nth-child(3)")
    assert page.expect("document.querySelector('#probabilities table:not([hidden]) tr.drawn')") is not None
    rows = page.evaluate(
        "[...document.querySelectorAll('#probabilities tbody tr')].map(row => row.cells[1].textContent)"
    )
    assert len(rows) in (4, 5) and all("%" in row for row in rows)
    shown = page.evaluate("document.querySelector('.token:nth-child(3)').getAttribute('aria-label')")
    drawn = text(page, "#probabilities tr.drawn td:nth-child(2)").strip()
    assert shown.endswith(drawn)


def test_a_text_is_gone_on_with_and_a_refusal_is_said_in_the_server_s_words(page: Page) -> None:
    page.evaluate("document.querySelector('[name=kind]').value = 'text'")
    asks(page, prompt="The sea", max_tokens=5, top_logprobs=2)
    is_done(page)
    assert page.evaluate("document.querySelectorAll('.token').length") == 5
    page.hover(".token:nth-child(2)")
    page.expect("document.querySelectorAll('#probabilities tbody tr').length >= 2")
    asks(page, temperature=0, n=2)
    page.expect("document.querySelector('#request-status.error')")
    assert text(page, "#request-status").startswith("n: ")
    page.problems.clear()  # the browser's own line about status 400


def test_requests_share_the_blocks_of_one_prompt(page: Page) -> None:
    asks(page, prompt=LONG, copies=8, max_tokens=400)
    page.expect(PAUSED_WHEN_SHARED)  # requests go on, the page stands still
    label = page.evaluate("document.querySelector('.map').getAttribute('aria-label')")
    assert f"of {NUM_BLOCKS} blocks of 16 tokens in use" in label and "shared" in label
    page.click("#requests tr:has(li.shared) button")
    page.expect("document.querySelectorAll('.block.chosen').length >= 3")
    page.click("#pause")
    page.click("#stop")
    page.expect("document.querySelector('#stop').disabled")  # it may have ended by itself meanwhile
    page.expect("document.querySelectorAll('#workers .block.used').length === 0")
    page.expect("document.querySelectorAll('#workers .block.cached').length > 0")


def test_outputs_of_one_request_fork_and_copy_what_they_write(page: Page) -> None:
    looks_for(page, "forked", "document.querySelector('#requests .note')?.textContent.includes('forked, 8 outputs')")
    looks_for(page, "copied", "document.querySelector('#workers .block.copied')")
    asks(page, prompt="hello", n=8, max_tokens=450)
    page.expect("window.forked && window.copied")
    page.expect("document.querySelector('#events')?.textContent.includes('before it was written')")
    page.click("#stop")
    page.expect("!document.querySelector('#workers .block.copied')")  # a mark goes, also where nothing more happens


def test_a_cache_that_is_made_too_small_preempts_and_all_answers_come(page: Page) -> None:
    page.expect("document.querySelector('.slider input')?.value === '128'")
    page.evaluate("document.querySelector('.slider input').focus()")
    page.press("Home")
    withheld = NUM_BLOCKS - LEAST_BLOCKS
    page.expect(f"document.querySelectorAll('#workers .block.withheld').length === {withheld}")
    assert f"{withheld} withheld" in page.evaluate("document.querySelector('.map').getAttribute('aria-label')")
    looks_for(page, "away", "document.querySelector('#requests .state.preempted, #requests .state.swapped')")
    asks(page, prompt=LONG, copies=5, max_tokens=280)
    page.expect("window.away")
    page.expect("document.querySelector('#events').textContent.includes('was preempted')")
    is_done(page)
    assert "tokens in" in text(page, "#request-status")
    page.expect("!document.querySelector('#queues').textContent.includes('Preempted0')")
    page.evaluate("document.querySelector('.slider input').focus()")
    page.press("End")
    page.expect("!document.querySelector('#workers .block.withheld')")


def test_by_keys_alone(page: Page) -> None:
    page.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "To the prompt"
    page.press("Enter")
    page.press("Tab")  # from the place that the link has led to
    page.press("Tab", shift=True)
    page.expect("document.activeElement.id === 'prompt' || document.activeElement.name === 'system'")
    while page.evaluate("document.activeElement.type") != "submit":
        page.press("Tab")
    page.press("Enter")
    is_done(page)
    seen = []
    for _ in range(60):
        page.press("Tab")
        seen.append(page.evaluate("document.activeElement.className || document.activeElement.id"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", f"nobody sees that {seen[-1]} has the focus"
        if seen[-1] == "tokens":
            break
    assert seen[-1] == "tokens"
    page.press("End")
    last = page.evaluate("document.querySelector('.token:last-child').id")
    assert page.evaluate("document.activeElement.getAttribute('aria-activedescendant')") == last
    page.press("ArrowLeft")
    assert page.evaluate("document.querySelector('[aria-selected=true]').nextElementSibling.id") == last
    assert page.evaluate("!document.querySelector('#probabilities table').hidden")
    while page.evaluate("document.activeElement.id") != "pause":
        page.press("Tab")
    page.press("Space")
    assert text(page, "#live-status") == "Paused"
    page.press("Space")
    page.expect("document.querySelector('#live-status').textContent === ''")


def test_everything_has_a_name_enough_contrast_and_room_on_a_phone(page: Page) -> None:
    page.look_like(width=360, height=740, dark=False)
    asks(page, prompt=LONG, n=2, copies=8, max_tokens=400)
    page.expect("document.querySelector('#workers .block.shared') && document.querySelector('.token:nth-child(9)')")
    page.hover(".token:nth-child(9)")
    for dark in (False, True):
        page.look_like(width=360, height=740, dark=dark)
        least, where, count = page.evaluate(LEAST_CONTRAST)
        assert count > 60 and least >= 4.5, (dark, where)
    page.evaluate("document.querySelector('#probabilities td').textContent = 'x'.repeat(80)")  # a long token
    width, too_wide = page.evaluate(WIDTH)
    assert width <= 360, too_wide
    nameless = [
        node["role"]["value"]
        for node in page.accessible()
        if node["role"]["value"] in NAMED_ROLES and not node.get("name", {}).get("value", "").strip()
    ]
    assert nameless == []
    page.evaluate("document.querySelector('#stop').click()")


def test_the_switch_overrules_the_system_and_is_remembered(page: Page, url: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.evaluate("document.querySelector('#theme').value = 'dark'")
    page.evaluate("document.querySelector('#theme').dispatchEvent(new Event('change'))")
    dark = page.evaluate(ground)
    assert light == "rgb(255, 255, 255)" and dark != light
    page.go("about:blank")
    page.go(url)
    assert page.evaluate(ground) == dark
    page.evaluate("localStorage.clear()")
