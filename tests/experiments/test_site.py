"""The site: what docs/build.py writes has no dead link, loads nothing from elsewhere and fits into small screens."""

import json
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from chromium import CHROMIUM, Chromium

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]

EQUATIONS = {  # page of a paper -> a part of one of its formulas
    "lora_exits.html": "<mi>&#x003BB;</mi>",
    "self_supervised.html": "<mi>&#x003B8;</mi>",
    "raee.html": "<mi>&#x003C4;</mi>",
    "consistent.html": "<mo>&#x02211;</mo>",
}
SHOWN = ("index.html", "live.html", "tutorial/1-the-loop.html", "lab/methods/raee.html", "results/raee.html")
LOGGED = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")  # events of the DevTools protocol


class Page:
    """The anchors of a page, its links, and what it loads."""

    def __init__(self, path):
        text = path.read_text()
        self.anchors = set(re.findall(r'\b(?:id|name)="([^"]+)"', text))
        self.links = re.findall(r'<a [^>]*?href="([^"]*)"', text)
        loaded = r'<(?:script|img|iframe|source|link|video)\b[^>]*?(?:src|srcset|href)="([^"]*)"'
        self.loads = re.findall(loaded, text)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder, without the model that runs in the browser."""
    pytest.importorskip("zensical", reason="needs Zensical: pip install -e '.[docs]'")
    out = tmp_path_factory.mktemp("site") / "out"
    subprocess.run([sys.executable, ROOT / "docs" / "build.py", out], check=True)
    (out / "404.html").unlink()  # its links begin at the root of a domain
    return out


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in site.rglob("*.html")}


def test_every_link_leads_to_a_page_and_an_anchor_that_exist(pages):
    dead, checked = [], 0
    for path, page in pages.items():
        for address in [*page.links, *page.loads]:
            parts = urlsplit(address)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target /= "index.html" if target.is_dir() else ""
            anchored = not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].anchors
            checked += 1
            if not target.is_file() or not anchored:
                dead.append(f"{path.name}: {address}")
    assert not dead, sorted(set(dead))
    assert checked > 1000


def test_a_page_loads_nothing_from_elsewhere(site, pages):
    for path, page in pages.items():
        assert not [address for address in page.loads if urlsplit(address).scheme not in ("", "data")], path
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", sheet.read_text()), sheet


def test_the_search_knows_text_and_code(site):
    found = json.loads((site / "search.json").read_text())["items"]
    places = {item["location"].partition("#")[0] for item in found if "REINFORCE" in str(item)}
    assert {"mini_ee/consistent.html", "tutorial/7-consistentee-a-policy-that-learns-to-exit.html"} <= places


def test_equations_of_the_papers_are_formulas(site):
    for name, equation in EQUATIONS.items():
        text = re.sub(r"<pre>.*?</pre>", "", (site / "mini_ee" / name).read_text(), flags=re.S)
        assert "$" not in text and equation in text, name


def test_a_docstring_needs_no_backslashes(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    from equations import latex_of_docstring

    assert latex_of_docstring("sum_{i<t} pi_t 1(p >= tau)") == r"\sum _{i<t} \pi _t 𝟙(p \ge  \tau )"
    assert (
        latex_of_docstring("P(exit at t) = KL(y | x)") == r"P(\mathrm{exit}\ \mathrm{at}\ t) = \mathrm{KL}(y \mid  x)"
    )


@pytest.mark.skipif(not CHROMIUM, reason="needs Debian's chromium")
def test_pages_fit_into_the_screen_and_log_no_error(site, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser, failed = Chromium(tmp_path), []
    browser.ask("Runtime.enable"), browser.ask("Log.enable")
    for name in SHOWN:
        address = f"http://127.0.0.1:{server.server_port}/{name}"
        browser.open(address, f"location.href == {json.dumps(address)} && document.readyState == 'complete'")
        for width in (400, 900, 1600):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            browser.ask("Emulation.setDeviceMetricsOverride", **size)
            wide = browser.value("document.documentElement.scrollWidth")
            failed += [(name, width, wide)] if wide > width else []
        failed += [(name, event) for event in browser.events if event.get("method") in LOGGED]
        browser.events.clear()
    browser.close()
    server.shutdown()
    server.server_close()
    assert not failed
