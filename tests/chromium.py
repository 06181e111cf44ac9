"""A headless Chromium, driven over a pipe in its own protocol: no driver and no package between a test and the browser.

https://chromedevtools.github.io/devtools-protocol names the methods. Needs the `chromium` of a distribution.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = f"no browser ({', '.join(NAMES)}) on the path: apt-get install chromium"
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests may run as root, and open nothing but our own page
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)
_TIMEOUT_S = 60.0  # generous: the machine has other work
_KEYS = {"Tab": 9, "Enter": 13, "Space": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}

_WAITING = """
new Promise((done, failed) => {
  const until = performance.now() + %d;
  const look = () => {
    const found = (%s);
    if (found) done(found);
    else if (performance.now() > until) failed('in vain');
    else setTimeout(look, 10);
  };
  look();
})
"""


def find_chromium() -> str | None:
    """Its path, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextlib.contextmanager
def chromium() -> Iterator[Chromium]:
    """One that has begun, and leaves nothing behind. Raises FileNotFoundError."""
    binary = find_chromium()
    if binary is None:
        raise FileNotFoundError(MISSING)
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        browser = Chromium(binary, profile)
        try:
            yield browser
        finally:
            browser.close()


class Chromium:
    """Calls and their answers. Events go to the page whose session they are of."""

    def __init__(self, binary: str, profile: str) -> None:
        its_input, self._output = os.pipe()
        self._input, its_output = os.pipe()
        to_3_and_4 = f'exec "$@" 3<&{its_input} 4>&{its_output}'  # where the protocol has them
        command = ["bash", "-c", to_3_and_4, "bash", binary, *_FLAGS, f"--user-data-dir={profile}"]
        quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=(its_input, its_output), start_new_session=True, **quiet)
        os.close(its_input)
        os.close(its_output)
        self._number = 0
        self._answers: dict[int, queue.SimpleQueue[Any]] = {}
        self._pages: dict[str, Page] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, method: str, session: str = "", **params: Any) -> Any:
        """Raises RuntimeError with the browser's words."""
        self._number += 1
        answer = self._answers[self._number] = queue.SimpleQueue()
        message = {"id": self._number, "method": method, "params": params}
        os.write(self._output, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        found = answer.get(timeout=_TIMEOUT_S)
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']['message']}")
        return found["result"]

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """A page in a tab of its own, once it is loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "DOM", "Network"):
            page.call(f"{domain}.enable")
        page.look_like(width=width, height=height, dark=dark)
        page.go(url)
        return page

    def close(self) -> None:
        """Ends it with all its processes."""
        with contextlib.suppress(RuntimeError, queue.Empty, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        os.close(self._output)

    def _read(self) -> None:
        held = b""
        with os.fdopen(self._input, "rb", buffering=0) as messages:
            while part := messages.read(1 << 20):
                *whole, held = (held + part).split(b"\0")
                for each in map(json.loads, whole):
                    if "id" in each:
                        self._answers.pop(each["id"]).put(each)
                    elif each.get("sessionId") in self._pages:
                        self._pages[each["sessionId"]].happened(each["method"], each["params"])


class Page:
    """One tab. `problems`: whatever the browser had to complain about: errors, refused loads, violated policies."""

    def __init__(self, browser: Chromium, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        self.problems: list[str] = []
        self.asked: list[str] = []  # addresses of all that was loaded

    def call(self, method: str, **params: Any) -> Any:
        return self._browser.call(method, self._session, **params)

    def happened(self, method: str, params: Any) -> None:
        """An event came."""
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    def go(self, url: str) -> None:
        """Loads an address, and waits until its modules have run."""
        self.call("Page.navigate", url=url)
        self.expect(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def look_like(self, *, width: int, height: int, dark: bool) -> None:
        """A screen of that size, and what its system prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript, awaited. Raises RuntimeError."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"].get("exception", found["exceptionDetails"])))
        return found["result"].get("value")

    def expect(self, condition: str, seconds: float = _TIMEOUT_S / 2) -> Any:
        """The first value of `condition` that is true."""
        while True:
            try:
                return self.evaluate(_WAITING % (1000 * seconds, condition))
            except RuntimeError as error:
                if "in vain" in str(error):
                    shown = self.evaluate("document.body.innerText")
                    raise AssertionError(f"not within {seconds} s: {condition}; the page shows {shown!r}") from None
                if "navigat" not in str(error):  # else it was asked of the page that was left
                    raise

    def press(self, key: str, *, shift: bool = False) -> None:
        """One key, by its name."""
        text = {"Enter": "\r", "Space": " "}.get(key)
        typed = {"text": text} if text else {}
        names = {"key": " " if key == "Space" else key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        modifiers = 8 if shift else 0
        self.call("Input.dispatchKeyEvent", type="keyDown", modifiers=modifiers, **names, **typed)
        self.call("Input.dispatchKeyEvent", type="keyUp", modifiers=modifiers, **names)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.call("Input.insertText", text=text)

    def fill(self, selector: str, text: str) -> None:
        """Sets a field, as a user who replaces what is there."""
        self.evaluate(f"(() => {{ const field = {_found(selector)}; field.focus(); field.select(); }})()")
        self.type(text) if text else self.evaluate(f"{_found(selector)}.value = ''")

    def hover(self, selector: str) -> None:
        """The pointer goes to the middle of the first that is found."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **self._middle(selector))

    def click(self, selector: str) -> None:
        """With the pointer."""
        at = self._middle(selector)
        self.call("Input.dispatchMouseEvent", type="mousePressed", button="left", clickCount=1, **at)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", button="left", clickCount=1, **at)

    def _middle(self, selector: str) -> dict[str, float]:
        box: dict[str, float] = self.evaluate(
            f"(() => {{ const found = {_found(selector)}; found.scrollIntoView({{block: 'center'}});"
            " const box = found.getClientRects()[0]; return {x: box.x + box.width / 2, y: box.y + box.height / 2}; })()"
        )
        return box

    def accessible(self) -> list[dict[str, Any]]:
        """What a screen reader is given: the nodes that are not ignored."""
        nodes: list[dict[str, Any]] = self.call("Accessibility.getFullAXTree")["nodes"]
        return [node for node in nodes if not node["ignored"]]

    def picture(self, path: Path, quality: int = 80) -> None:
        """What is seen, as WebP."""
        data = self.call("Page.captureScreenshot", format="webp", quality=quality)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """The tab."""
        self._browser.call("Target.closeTarget", targetId=self._target)


def _found(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)})"
