"""A headless Chromium for tests of pages."""

import json
import os
import shutil
import subprocess

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Chromium:
    """A headless Chromium, driven over a pipe by its DevTools protocol."""

    def __init__(self, folder):
        (theirs_in, self.to), (self.back, theirs_out) = os.pipe(), os.pipe()
        options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe".split()
        command = [CHROMIUM, *options, f"--user-data-dir={folder}", "about:blank"]
        shell = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(shell, pass_fds=(theirs_in, theirs_out), **quiet)
        os.close(theirs_in), os.close(theirs_out)
        self.read, self.count, self.events = b"", 0, []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    session: dict = {}

    def ask(self, method, **parameters):
        """The result of a command; what happens meanwhile is kept in `events`."""
        self.count += 1
        request = {"id": self.count, "method": method, "params": parameters} | self.session
        os.write(self.to, json.dumps(request).encode() + b"\0")
        while (answer := self._next()).get("id") != self.count:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self):
        while b"\0" not in self.read:
            part = os.read(self.back, 1 << 20)
            assert part, "Chromium ended"
            self.read += part
        message, _, self.read = self.read.partition(b"\0")
        return json.loads(message)

    def value(self, expression):
        """What a JavaScript expression gives, awaited."""
        answer = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, address, until):
        """Load a page and wait for a condition on it."""
        self.ask("Page.enable")
        self.ask("Page.navigate", url=address)
        self.wait(until)

    def wait(self, condition):
        """Return when the expression is true; at most 30 seconds."""
        late = "setTimeout(() => no(Error(document.body.innerText)), 30000)"
        poll = f"const ask = () => ({condition}) ? yes() : setTimeout(ask, 20); ask(); {late}"
        while True:
            try:
                return self.value(f"new Promise((yes, no) => {{ {poll} }})")
            except AssertionError as error:
                if "navigated" not in str(error) and "destroyed" not in str(error):
                    raise

    def close(self):
        self.ask("Page.navigate", url="about:blank")
        self.process.terminate()
        self.process.wait()
        os.close(self.to), os.close(self.back)
