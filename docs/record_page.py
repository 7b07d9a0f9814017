"""A recording of the page that `mini-ee export RUN --out DIR --web` writes: the slider moves, and the bars follow.

python docs/record_page.py DIR docs/pictures/page.gif       # needs Chromium, and Pillow, which matplotlib brings
"""

import base64
import io
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from chromium import Chromium  # noqa: E402

SIZE, SCALE, COLOURS, MILLISECONDS = (900, 1150), 0.6, 48, 700
MOVE = "{{ const s = document.querySelector('#slider'); s.value = {}; s.dispatchEvent(new Event('input')) }}"
SETTLED = "document.querySelectorAll('.exits li').length > 0"


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder and prints nothing."""

    def log_message(self, *_):
        pass


def record(folder: Path, out: Path) -> None:
    """Open the page of the folder, move the slider from strict to loose and back, and write the pictures as a GIF."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser, (width, height) = Chromium(profile), SIZE
        browser.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        browser.open(f"http://127.0.0.1:{server.server_port}/index.html", SETTLED)
        most = int(browser.value("document.querySelector('#slider').max"))
        way = [round(most * share) for share in (0.9, 0.75, 0.6, 0.45, 0.3, 0.15, 0, 0.3, 0.6)]
        pictures = []
        for place in way:
            browser.value(MOVE.format(place))
            browser.value("new Promise(done => setTimeout(done, 1500))")
            png = base64.b64decode(browser.ask("Page.captureScreenshot")["data"])
            picture = Image.open(io.BytesIO(png)).convert("RGB").resize((int(width * SCALE), int(height * SCALE)))
            pictures.append(picture.quantize(COLOURS))
        pictures[0].save(out, save_all=True, append_images=pictures[1:], duration=MILLISECONDS, loop=0, optimize=True)
        browser.process.kill()


if __name__ == "__main__":
    record(Path(sys.argv[1]), Path(sys.argv[2]))
