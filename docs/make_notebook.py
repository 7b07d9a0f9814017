"""Makes tutorial.ipynb from tutorial.md: `python docs/make_notebook.py` (pip install -e '.[docs]')."""

from pathlib import Path

import jupytext

ROOT = Path(__file__).parents[1]
TUTORIAL, NOTEBOOK = ROOT / "tutorial.md", ROOT / "tutorial.ipynb"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
FOLDED = {"jupyter": {"source_hidden": True}}


def notebook_of(text: str) -> str:
    """The notebook of a page, as JSON. Bash blocks become cells that begin with %%bash; solutions are folded."""
    notebook = jupytext.reads(text, fmt="md")
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    above = ""
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # jupytext draws them at random
        cell.metadata = FOLDED if above.endswith("<summary>Solution</summary>") else {}
        above = cell.source
    return jupytext.writes(notebook, fmt="ipynb") + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook_of(TUTORIAL.read_text()))
