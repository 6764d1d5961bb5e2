"""A headless Chromium driven over two pipes, with nothing but the standard library.

The messages are those of the DevTools protocol, each ended by a zero byte.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60

# The browser reads its messages from 3 and answers to 4.
CONNECTED = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser():
    """The path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page, and everything that it asked for or complained about.

    Attributes:
        requests: The addresses that the page loaded or tried to load.
        complaints: What it wrote to the console, and errors that nothing caught.
    """

    def __init__(self, path, profile):
        self.requests, self.complaints = [], []
        self._last, self._replies, self._arrived, self._rest = 0, {}, [], b""
        ours, self._write = (_high(end) for end in os.pipe())
        self._read, theirs = (_high(end) for end in os.pipe())

        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", CONNECTED, str(ours), str(theirs), path),
                *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--no-first-run", "--disable-extensions", "--hide-scrollbars"),
                *(f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(ours, theirs),
        )
        os.close(ours)
        os.close(theirs)
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """Calls a method of the protocol and returns its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        self._wait(lambda: self._last in self._replies)
        reply = self._replies.pop(self._last)
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']}")
        return reply["result"]

    def open(self, page, *, width, height=800, scheme="light", media="", script=True):
        """Loads a page in a window of a size, anew."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.resize(width, height)
        self._arrived.clear()
        self.call("Page.navigate", url=page.as_uri())
        self._wait(lambda: "Page.loadEventFired" in self._arrived)

    def resize(self, width, height):
        """Sets the size of the window; a narrow one is a phone's."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def evaluate(self, expression):
        """Returns the value of a JavaScript expression."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in reply:
            raise RuntimeError(reply["exceptionDetails"]["exception"].get("description"))
        return reply["result"].get("value")

    def press(self, key, code, text=""):
        """Presses a key, as a person does."""
        about = {"key": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def screenshot(self, path, whole=True):
        """Writes a picture of the page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        """Ends the browser."""
        self._process.terminate()
        self._process.wait(PATIENCE)
        os.close(self._write)
        os.close(self._read)

    def _wait(self, arrived):
        end = time.monotonic() + PATIENCE
        while not arrived():
            ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise RuntimeError("the browser ended")
            *messages, self._rest = (self._rest + piece).split(b"\0")
            for message in messages:
                self._take(json.loads(message))

    def _take(self, message):
        if "id" in message:
            self._replies[message["id"]] = message
            return
        method, params = message["method"], message["params"]
        self._arrived.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str([each.get("value") for each in params["args"]]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["text"])
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])


def _high(descriptor):
    """Moves an end of a pipe out of the way of 3 and 4."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved
