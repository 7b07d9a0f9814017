"""The site: one static folder made of README, tutorial, result pages, guides and the source files themselves.

    pip install -e '.[docs]'
    python docs/build.py OUT             # with a model that runs in the browser: trains it, and needs npm
    python docs/build.py OUT --no-live

prose.py      Markdown as HTML, and links between pages     code_page.py  a Python file: text next to its code
equations.py  formulas as MathML                            live.py       the model in the browser
overviews.py  the tables of methods and files, and what stands above the code of a paper
"""

import argparse
import html
import re
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import NamedTuple

from code_page import Code
from live import FOLDER, missing, write_live
from overviews import PAPERS, all_files, methods_table, paper_notes
from prose import ROOT, Links, Text, relative

HERE = Path(__file__).parent
TUTORIAL = "tutorial.md"
CORE = ("loop", "rules", "bert", "llama", "load", "data", "train", "calibrate")
PROJECT = ("CONTRIBUTING.md", "weights/README.md", "CHANGELOG.md", "docs/from-0.2.md")
FOLDERS = ("methods", "baselines", "training", "exits", "backbones", "export")
CODE = (
    "mini_ee/*.py",
    "export/*.py",
    "lab/*.py",
    *(f"lab/{folder}/*.py" for folder in FOLDERS),
    "serve/*.py",
    "tests/spec/*.py",
)


class Page(NamedTuple):
    """One page: a part of a Markdown file, or a Python file."""

    path: str  # in the site
    name: str  # in the navigation
    content: Text | Code
    notes: Text | None = None  # below the title of a page of code


def markdown_page(source: str, name: str = "", text: str | None = None) -> Page:
    """A Markdown file as one page; README.md of a folder is its index.html."""
    content = Text((ROOT / source).read_text() if text is None else text, source)
    path = source.replace("README.md", "index.html").replace(".md", ".html").lower()
    return Page(path, name or content.title, content)


def tutorial_pages() -> list[Page]:
    """tutorial.md, a page a section; text before the first section is a page too."""
    parts, fenced = [[]], False
    for line in (ROOT / TUTORIAL).read_text().splitlines():
        fenced ^= line.startswith("```")
        if line.startswith("## ") and not fenced and sum(map(bool, parts[-1])) > 1:  # more than its heading
            parts.append([])
        parts[-1].append(line)
    pages, slugs = [], Counter()
    for part in parts:
        content = Text("\n".join(part), TUTORIAL, slugs)
        path = f"tutorial/{content.headings[0][0]}.html" if pages else "tutorial.html"
        pages.append(Page(path, content.title if pages else "Tutorial", content))
    return pages


def code_pages() -> dict[str, Page]:
    """The Python files that have a page."""
    paths = sorted(path for pattern in CODE for path in ROOT.glob(pattern) if not path.name.startswith("__"))
    sources = [path.relative_to(ROOT).as_posix() for path in paths]
    return {source: Page(source.replace(".py", ".html"), Path(source).name, Code(source)) for source in sources}


def groups_of(code: dict[str, Page], live: str) -> dict[str, list[Page]]:
    """The navigation: title -> pages, in the order in which they are read."""
    files = {source: page.content for source, page in code.items()}
    papers = {module: paper_notes(paper) for paper, module in PAPERS.items() if module in code}
    return {
        "": [markdown_page("README.md", "Home"), markdown_page("live.md", "In your browser", live)],
        "Tutorial": tutorial_pages(),
        "Papers and their code": [
            code[module]._replace(name=title, notes=notes) for module, (title, notes) in papers.items()
        ],
        "Code": [
            markdown_page("methods.md", "All methods", methods_table(files)),
            *(code[f"mini_ee/{name}.py"] for name in CORE),
            markdown_page("files.md", "All files", all_files(files)),
        ],
        "Results": markdown_pages("results/*.md", ["README", *PAPERS]),
        "Results in detail": markdown_pages("results/*/*.md"),
        "Deployment": [markdown_page("docs/your-classifier.md")]
        + markdown_pages("export/*.md", ["README"])
        + markdown_pages("export/[!w]*/*.md")
        + markdown_pages("serve/*.md"),
        "Project": [markdown_page(path) for path in PROJECT],
    }


def markdown_pages(pattern: str, first: Sequence[str] = ()) -> list[Page]:
    """The files that match. first: names of those that come before the others."""
    paths = sorted(ROOT.glob(pattern), key=lambda path: ([*first, path.stem].index(path.stem), path))
    return [markdown_page(path.relative_to(ROOT).as_posix()) for path in paths]


def _in_order(groups: dict[str, list[Page]]) -> list[Page]:
    return [page for pages in groups.values() for page in pages]


def links_of(pages: list[Page]) -> Links:
    """What each file and each anchor of a file has become."""
    links = Links()
    for page in pages:
        links.pages.setdefault(page.content.source, page.path)
        anchors = page.content.anchors if isinstance(page.content, Text) else page.content.names
        links.anchors |= {(page.content.source, anchor): page.path for anchor in anchors}
    return links


def navigation(groups: dict[str, list[Page]], current: Page) -> str:
    """The list of pages; below the current one, its headings."""
    parts = []
    for title, pages in groups.items():
        parts.append(f"<h2>{title}</h2><ul>" if title else "<ul>")
        for page in pages:
            mark, below = "", ""
            if page.path == current.path:
                mark, inner = ' aria-current="page"', page.content.headings
                below = "".join(f'<li><a href="#{anchor}">{html.escape(words)}</a></li>' for anchor, words in inner)
                below = f"<ul>{below}</ul>" if len(inner) > 1 else ""
            address, name = relative(page.path, current.path), html.escape(page.name)
            parts.append(f'<li><a href="{address}"{mark}>{name}</a>{below}</li>')
        parts.append("</ul>")
    return "\n".join(parts)


def steps(order: list[Page], current: Page) -> str:
    """Links to the previous and the next page."""
    paths = [page.path for page in order]
    at, links = paths.index(current.path), []
    for other, mark in ((at - 1, "← {}"), (at + 1, "{} →")):
        if 0 <= other < len(order):
            name = mark.format(html.escape(order[other].name))
            links.append(f'<a href="{relative(order[other].path, current.path)}">{name}</a>')
    return " ".join(links)


def build(out: Path, live: str) -> list[Page]:
    """Write all pages and what they need. Raises ValueError for links to files that do not exist."""
    code = code_pages()
    groups = groups_of(code, live)
    listed = _in_order(groups)
    pages = listed + [page for page in code.values() if page.path not in {listed_page.path for listed_page in listed}]
    links, template = links_of(pages), Template((HERE / "page.html").read_text())
    for page in pages:
        content, is_code = page.content, isinstance(page.content, Code)
        if is_code:
            body = content.html(links, page.path, page.notes)
        else:
            body = links.render(content.tokens, content.source, page.path)
        parts = {"title": f"{html.escape(page.name)} · mini_ee", "kind": "code-page" if is_code else "prose"}
        shown = groups if page in listed else groups | {"Code": [*groups["Code"], page]}
        parts |= {
            "root": relative(".", page.path),
            "nav": navigation(shown, page),
            "steps": steps(_in_order(shown), page),
        }
        target = out / page.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(template.substitute(parts, body=body))
    shutil.copyfile(HERE / "page.css", out / "page.css")
    for path in filter(lambda path: (ROOT / path).is_file(), links.files):
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, out / path)
    if broken := [link for link in links.broken if not re.search(rf": {FOLDER}/", link)]:
        raise ValueError("these links lead nowhere:\n" + "\n".join(sorted(set(broken))))
    return pages


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the site into an empty folder.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--no-live", action="store_true", help="leave out the model that runs in the browser")
    args, begin = parser.parse_args(), time.perf_counter()
    if args.out.is_file() or args.out.is_dir() and any(args.out.iterdir()):
        actual = "a file" if args.out.is_file() else "files in it"
        parser.error(f"{args.out}: expected an empty folder or a new one, found {actual}")
    args.out.mkdir(parents=True, exist_ok=True)
    live = missing("this site was built with --no-live") if args.no_live else write_live(args.out)
    pages = build(args.out, live)
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    print(f"{len(pages)} pages, {size / 1e6:.1f} MB, in {time.perf_counter() - begin:.0f} s: {args.out}/index.html")


if __name__ == "__main__":
    main()
