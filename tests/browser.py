"""A page in Chromium, by its DevTools protocol over a pipe: what it loads, logs and measures, in either scheme."""

from __future__ import annotations

import base64
import json
import os
import re
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
CHROMIUM = next((path for path in map(shutil.which, NAMES) if path), None)
DEADLINE = 60.0  # seconds for one answer; the first waits for Chromium's start
# No sandbox: it wants rights that containers do not give. The rest keeps Chromium from looking for updates.
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
)  # fmt: skip

# Before a page's own scripts: each visit is a first one. A theme keeps the scheme that it began with.
FORGET = "try { localStorage.clear() } catch {}"
# What is wrong on a page, in words: what sticks out, charts without a size, labels that overlap or leave their chart.
FAULTS = """(() => {
  const faults = [], root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) faults.push(`the page is ${root.scrollWidth} wide`);
  for (const e of document.querySelectorAll('h1,h2,h3,h4,p,li,dd,th,td,summary,figcaption'))
    if (e.scrollWidth > e.clientWidth + 1 && e.clientWidth) faults.push(`${e.tagName} overflows: ${e.textContent}`);
  for (const svg of document.querySelectorAll('svg[role=img]')) {
    const box = svg.getBoundingClientRect(), named = svg.getAttribute('aria-label');
    if (box.width < 50 || box.height < 100) faults.push(`no size: ${named}`);
    const texts = [...svg.querySelectorAll('text')].map(e => [e.textContent, e.getBoundingClientRect()]);
    for (const [text, a] of texts)
      if (a.left < box.left || a.right > box.right || a.top < box.top || a.bottom > box.bottom)
        faults.push(`${text} leaves ${named}`);
    for (const [i, [text, a]] of texts.entries())
      for (const [other, b] of texts.slice(i + 1))
        if (a.left < b.right && b.left < a.right && a.top + 3 < b.bottom && b.top + 3 < a.bottom)
          faults.push(`${text} lies on ${other} in ${named}`);
  }
  return faults;
})()"""
COLORS = """[...new Set([...document.querySelectorAll('body *')].filter(
  e => [...e.childNodes].some(n => n.nodeType === Node.TEXT_NODE && n.data.trim())).map(
  e => getComputedStyle(e)[e.namespaceURI.endsWith('svg') ? 'fill' : 'color']))]"""


def hexadecimal(color: str) -> str:
    """ "#0b57d0" of "rgb(11, 87, 208)"."""
    return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", color)[:3])


class Browser:
    """One Chromium with one page. What the page asked for and logged is kept in `requests` and `messages`."""

    def __init__(self, profile: Path) -> None:
        commands, self.out = os.pipe()
        self.answers, events = os.pipe()
        # Chromium reads commands from descriptor 3 and writes to 4, whichever numbers the pipes have here.
        redirected = ("bash", "-c", f'exec "$@" 3<&{commands} 4>&{events}', "bash")
        self.process = subprocess.Popen(
            [*redirected, str(CHROMIUM), *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands, events), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands)
        os.close(events)
        self.number, self.read, self.session = 0, b"", ""
        self.requests: list[str] = []
        self.messages: list[str] = []
        self.loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=FORGET)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        asked = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            asked["sessionId"] = self.session
        os.write(self.out, json.dumps(asked).encode() + b"\0")
        while True:
            told = self.next_message()
            if told.get("id") == self.number:
                assert "error" not in told, (method, told)
                return told["result"]
            self.note(told)

    def next_message(self) -> dict[str, Any]:
        end = time.monotonic() + DEADLINE
        while b"\0" not in self.read:
            ready, _, _ = select.select([self.answers], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self.answers, 1 << 20) if ready else b""
            assert part, "Chromium does not answer"
            self.read += part
        message, _, self.read = self.read.partition(b"\0")
        return json.loads(message)

    def note(self, told: dict[str, Any]) -> None:
        method, said = told.get("method"), told.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.messages.append(json.dumps(said))
        elif method == "Page.loadEventFired":
            self.loaded = True

    def open(self, page: Path, width: int, scheme: str) -> None:
        """The page in a window of so many pixels, where the user prefers "light" or "dark"."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.loaded = False
        self.requests.clear()
        self.messages.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not self.loaded:
            self.note(self.next_message())

    def evaluate(self, script: str) -> Any:
        """What a script says, or what its promise does."""
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Of the window, to look at."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        os.close(self.out)  # at the end of its commands Chromium ends
        try:
            self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.answers)
