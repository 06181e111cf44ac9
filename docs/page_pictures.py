"""Pictures of the page at work, light and dark: `python -m docs.page_pictures`. Needs `chromium` and a fetched model.

A server whose cache is made small answers requests that share a prompt, and is seen while one of them is swapped out.
What they draw differs from time to time, so no test compares these pictures.
"""

from __future__ import annotations

import signal
import sys

from docs.generate import PICTURES
from octavo.shared.ports import free_port
from tests.chromium import Page, chromium
from tests.integration.test_serve import serving

BLOCK_GIB = 30 * 2 * 3 * 64 * 16 * 4 / 2**30  # of SmolLM2-135M in float32
NUM_BLOCKS = 128
FIELDS = {
    "prompt": "Tell a story about a lighthouse, a storm and an old radio, and let each of them speak once.",
    "n": "2",
    "copies": "6",
    "max_tokens": "220",
    "temperature": "0.9",
    "seed": "7",
}
SEEN = (
    "document.querySelector('#requests .state.swapped, #requests .state.preempted')"
    " && document.querySelectorAll('#workers .block.shared').length > 3"
    " && document.querySelectorAll('.answer:first-child .token').length > 100"
)
SIZE = 1440, 1180


def main(model: str = "smollm2-135m-instruct") -> None:
    """Writes both pictures."""
    port = free_port()
    cache = ("--max-model-len", "1024", "--kv-cache-memory", str(NUM_BLOCKS * BLOCK_GIB), "--swap-space", "0.1")
    http = ("--http-port", str(port), "--demo", "--metrics-port", "0", "--preemption-mode", "swap")
    with serving(model, *cache, *http) as served, chromium() as browser:
        served.wait_until_ready()
        for name, dark in (("light", False), ("dark", True)):
            page = browser.open(f"http://127.0.0.1:{port}/", width=SIZE[0], height=SIZE[1], dark=dark)
            _show(page)
            page.picture(PICTURES / f"page-{name}.webp", quality=40)
            page.click("#stop")
            page.expect("document.querySelector('#requests tbody').rows.length === 0")
            page.close()
        served.end(signal.SIGTERM)


def _show(page: Page) -> None:
    page.expect("document.querySelector('[name=model]').options.length")
    page.expect("document.querySelector('.slider input')")
    page.evaluate("document.querySelector('.slider input').focus()")
    page.press("Home")
    page.evaluate("document.querySelector('[name=ignore_eos]').checked = true")
    for field, value in FIELDS.items():
        page.fill(f"[name={field}]", value)
    page.evaluate("document.querySelector('#playground details').open = false")
    page.click("button[type=submit]")
    page.expect(SEEN, seconds=120)
    page.hover(".answer:first-child .token:nth-child(40)")
    page.evaluate("scrollTo(0, 0)")
    page.expect("document.querySelector('#probabilities tr.drawn')")


if __name__ == "__main__":
    main(*sys.argv[1:])
