"""The page on which a model runs in the browser: a run is trained on the built-in reviews and exported with `--web`."""

import html
import shutil
import tempfile
from pathlib import Path

FOLDER = "live"
SETTINGS = {"epochs": 2, "max_train": 1000}
FRAME = f"""# A model that runs in your browser

This is the page that `mini-ee export RUN --web` writes: the built-in BERT with an exit after every layer, trained on
{SETTINGS["max_train"]} of the built-in reviews while this site was built. All texts stay in your browser.

[Open it alone]({FOLDER}/index.html)

<iframe src="{FOLDER}/index.html" title="A model that exits early"></iframe>
"""


def write_live(out: Path) -> str:
    """Train, export to OUT/live, and return Markdown that shows it, or says why it is missing."""
    import mini_ee
    from mini_ee.lab.export.web_page import fetch_libraries, vendor_command

    with tempfile.TemporaryDirectory() as folder:
        run = mini_ee.train("joint", out=Path(folder) / "run", **SETTINGS)
        mini_ee.export(run, out / FOLDER, web=True)
    failed = fetch_libraries(out / FOLDER, print) if vendor_command(out / FOLDER) else None
    if failed:
        shutil.rmtree(out / FOLDER)
    return missing(failed) if failed else FRAME


def missing(reason: str) -> str:
    """The page without the model."""
    return f"# A model that runs in your browser\n\nThis page is missing here: {html.escape(reason)}.\n"
