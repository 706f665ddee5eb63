"""A headless Chromium for tests, spoken to by its DevTools protocol through two pipes: no driver, no port."""

import base64
import json
import os
import select
import shutil
import subprocess
from pathlib import Path

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Page:
    """A file opened in Chromium. `run` evaluates JavaScript; `problems` has the page's errors and refused requests."""

    def __init__(self, path: Path, profile: Path, width: int = 1200, height: int = 900) -> None:
        (down, self.send), (self.receive, up) = os.pipe(), os.pipe()

        def pipes() -> None:  # the browser reads from 3 and writes to 4
            for fd in (copies := [os.dup(down), os.dup(up)]):
                os.set_inheritable(fd, True)
            os.dup2(copies[0], 3), os.dup2(copies[1], 4)

        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
        ]
        self.process = subprocess.Popen(
            [PROGRAM, *flags, f"--user-data-dir={profile}", "--no-first-run", f"--window-size={width},{height}"],
            preexec_fn=pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(down), os.close(up)
        self.buffer, self.number, self.session, self.problems, self.loaded = b"", 0, None, [], False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.requests: list[str] = []
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self.loaded:
            self.note(self.message())

    def message(self) -> dict:
        while b"\0" not in self.buffer:
            if not select.select([self.receive], [], [], 60)[0] or not (part := os.read(self.receive, 1 << 20)):
                raise RuntimeError("the browser has ended, or says nothing for a minute")
            self.buffer += part
        text, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(text)

    def note(self, event: dict) -> None:
        kind, about = event.get("method"), event.get("params", {})
        self.loaded = self.loaded or kind == "Page.loadEventFired"
        if kind == "Runtime.exceptionThrown":
            self.problems.append(about["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        elif kind == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.problems.append(about["entry"]["text"])
        elif kind == "Runtime.consoleAPICalled":
            self.problems.append(f"console: {about['args']}")
        elif kind == "Network.requestWillBeSent" and not about["request"]["url"].startswith("data:"):
            self.requests.append(about["request"]["url"])

    def call(self, method: str, **params: object) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params} | (
            {"sessionId": self.session} if self.session else {}
        )
        os.write(self.send, json.dumps(message).encode() + b"\0")
        while (answer := self.message()).get("id") != self.number:
            self.note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def run(self, script: str) -> object:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    def press(self, key: str) -> None:
        codes = {"Enter": 13, "Escape": 27, "ArrowUp": 38, "ArrowDown": 40, "Tab": 9, "Home": 36, "End": 35}
        text = {"text": "\r"} if key == "Enter" else {}
        common = dict(key=key, code=key, windowsVirtualKeyCode=codes[key])
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def move(self, selector: str, index: int = 0) -> None:
        """The mouse over the middle of an element."""
        place = self.run(
            f"(() => {{ const e = document.querySelectorAll({selector!r})[{index}]; e.scrollIntoView({{block: 'center'}});"
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])

    def screenshot(self, path: Path, whole: bool = False) -> None:
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **self.area(whole))
        path.write_bytes(base64.b64decode(found["data"]))

    def area(self, whole: bool) -> dict:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 6000), "scale": 1}}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.send), os.close(self.receive)
