"""A headless Chromium over its debugging pipe: enough to open a page, move the mouse and read a tooltip."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
    "--window-size=1400,900",
)


def find() -> str | None:
    """The browser's path, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Page:
    """One tab. Messages go over the pipe as JSON that ends with a zero byte."""

    def __init__(self, write: int, read: int, deadline: float) -> None:
        self._write, self._read, self._deadline = write, read, deadline
        self._buffer, self._count, self._session = b"", 0, ""

    def open(self, path: Path) -> None:
        """Load a file and wait until it has loaded."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Page.navigate", url=path.as_uri())
        while self.js("document.readyState") != "complete" or self.js("location.href") == "about:blank":
            time.sleep(0.05)

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"the page says {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """Move the mouse there."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self) -> str:
        """PNG as base64."""
        return str(self.send("Page.captureScreenshot")["data"])

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                if time.monotonic() > self._deadline:
                    raise TimeoutError(f"Chromium did not answer {method} in time")
                got = os.read(self._read, 1 << 16)
                if not got:
                    raise RuntimeError("Chromium ended")
                self._buffer += got
            line, _, self._buffer = self._buffer.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])


@contextmanager
def page(browser: str, profile: Path, seconds: float = 60.0) -> Iterator[Page]:
    """A page in a browser of its own, which ends with the block."""
    to_child, from_parent = os.pipe()
    to_parent, from_child = os.pipe()
    # Chromium reads commands from descriptor 3 and answers on 4. Both ends are moved out of the way first.
    script = f'exec "$0" "$@" 3<&{to_child} 4>&{from_child}'
    child = subprocess.Popen(
        ["bash", "-c", script, browser, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(to_child, from_child),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_child)
    os.close(from_child)
    try:
        yield Page(from_parent, to_parent, time.monotonic() + seconds)
    finally:
        child.terminate()
        child.wait(10)
        os.close(from_parent)
        os.close(to_parent)
