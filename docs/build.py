"""The site: README, tutorial, result pages, guides and the source files themselves, made into pages by Zensical.

    pip install -e '.[docs]'
    python docs/build.py OUT
    python docs/live.py OUT/live         # the model that runs in the browser: trains it, and needs npm

A Markdown file is a page where it stands, tutorial.md a page a chapter. A Python file is a page of its text beside its
code (code_page.py). Zensical gets a folder of Markdown, with links that lead from page to page. Its formulas become
MathML (equations.py), so that the site loads nothing from elsewhere.
"""

import argparse
import json
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from code_page import ROOT, Code, with_lists
from equations import with_mathml
from markdown import markdown
from overviews import PAPERS, all_files, methods_table, paper_notes
from pymdownx.slugs import slugify

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
FENCED = re.compile(r"^( *)(```+).*?^\1\2 *$", re.S | re.M)
LINK = re.compile(r'(\]\(|\b(?:src|href|srcset)=")([^)"\s]+)')
HEADING = re.compile(r"^#+ (.*)$", re.M)
IN_THE_BROWSER = """# A model that runs in your browser

`mini-ee export RUN --web` writes a page on which the model runs in the browser; all texts stay there.
`python docs/live.py site/live` trains such a model and puts its page into this site, at live/index.html. It needs npm.

![The page: a slider sets the threshold, and bars show how many texts exit after each layer](docs/pictures/page.gif)
"""


class Site:
    """The pages by their place, and which page each file, and each heading of the tutorial, has become."""

    def __init__(self):
        self.code = {
            path.relative_to(ROOT).as_posix(): Code(path.relative_to(ROOT).as_posix())
            for pattern in CODE
            for path in sorted(ROOT.glob(pattern))
            if not path.name.startswith("__")
        }
        self.markdown = {"live.md": ("live.md", IN_THE_BROWSER)}  # page -> its source, and its text
        self.chapters: dict[str, str] = {}  # anchor of tutorial.md -> page
        self.assets: set[str] = set()
        self.broken: list[str] = []
        self.markdown["methods.md"] = ("methods.md", methods_table(self.code))
        self.markdown["files.md"] = ("files.md", all_files(self.code))
        self.nav = self._navigation()
        self.pages = {source: page for page, (source, _) in self.markdown.items() if source != TUTORIAL}
        self.pages |= {TUTORIAL: TUTORIAL} | {source: source.replace(".py", ".md") for source in self.code}

    def _navigation(self) -> list[dict]:
        return [
            {"Home": [{"mini_ee": self._page("README.md")}, {"In your browser": "live.md"}]},
            {"Tutorial": self._tutorial()},
            {"Papers and their code": [{paper_notes(paper)[0]: _place(source)} for paper, source in PAPERS.items()]},
            {
                "Code": [
                    "methods.md",
                    *({f"{name}.py": f"mini_ee/{name}.md"} for name in CORE),
                    "files.md",
                ]
            },
            {
                "Results": [
                    *self._pages("results/*.md", ["README", *PAPERS]),
                    {"In detail": self._pages("results/*/*.md")},
                ]
            },
            {
                "Deployment": [
                    self._page("docs/your-classifier.md"),
                    *self._pages("export/*.md", ["README"]),
                    *self._pages("export/[!w]*/*.md"),
                    *self._pages("serve/*.md"),
                ]
            },
            {"Project": [self._page(source) for source in PROJECT]},
        ]

    def _page(self, source: str) -> str:
        """A Markdown file as a page; README.md of a folder is its first one."""
        self.markdown[source] = (source, (ROOT / source).read_text())
        return source

    def _pages(self, pattern: str, first: Sequence[str] = ()) -> list[str]:
        """The files that match. first: names of those that come before the others."""
        paths = sorted(ROOT.glob(pattern), key=lambda path: ([*first, path.stem].index(path.stem), path))
        return [self._page(path.relative_to(ROOT).as_posix()) for path in paths]

    def _tutorial(self) -> list[str]:
        """tutorial.md, a page a section; text before the first section is a page too."""
        parts, fenced = [[]], False
        for line in (ROOT / TUTORIAL).read_text().splitlines():
            fenced ^= line.startswith("```")
            if line.startswith("## ") and not fenced and sum(map(bool, parts[-1])) > 1:  # more than its heading
                parts.append([])
            parts[-1].append(line)
        for number, part in enumerate(parts):
            text = "\n".join(part)
            anchors = [_slug(words) for words in HEADING.findall(FENCED.sub("", text))]
            page = f"tutorial/{anchors[0]}.md" if number else TUTORIAL
            self.markdown[page] = (TUTORIAL, text.replace("## ", "# ", 1) if number else text)
            self.chapters |= dict.fromkeys(anchors, page)
        return [page for page, (source, _) in self.markdown.items() if source == TUTORIAL]

    def address(self, address: str, source: str, page: str) -> str:
        """An address in the file `source` as one in `page`; both, and what it leads to, are places of sources."""
        if re.match(r"[a-z]+:|//", address):
            return address
        path, _, anchor = address.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source
        target = f"{target}/README.md" if f"{target}/README.md" in self.pages else target
        place = self.chapters.get(anchor) if target == TUTORIAL else None
        place = place or self.pages.get(target) or target
        if place == target and target not in self.pages:
            self.assets.add(target)
            if not (ROOT / target).is_file():
                self.broken.append(f"{source}: {address}")
        here = place == page and anchor
        return ("" if here else posixpath.relpath(place, posixpath.dirname(page) or ".")) + (anchor and f"#{anchor}")

    def linked(self, text: str, source: str, page: str) -> str:
        """Markdown with the addresses of this page, and lists in <details> for Python-Markdown."""
        parts, at = [], 0
        for fence in [*FENCED.finditer(text), None]:
            prose = text[at : fence.start() if fence else None].replace("<details>", '<details markdown="1">')
            parts.append(LINK.sub(lambda match: match[1] + self.address(match[2], source, page), with_lists(prose)))
            parts.append(fence[0] if fence else "")
            at = fence.end() if fence else at
        return "".join(parts)

    def notes(self, paper: str, page: str) -> str:
        """What a result page says at the top of the code of its paper, as HTML."""
        text = self.linked(paper_notes(paper)[1], f"results/{paper}.md", page)
        return markdown(text.replace(".md", ".html"), extensions=["tables"])


def _place(source: str) -> str:
    return source.replace(".py", ".md")


_slug = partial(slugify(case="lower"), sep="-")


def write_sources(site: Site, folder: Path) -> None:
    """The pages as Markdown, and the files that they show. Raises ValueError for links to files that do not exist."""
    texts = {page: site.linked(text, source, page) for page, (source, text) in site.markdown.items()}
    for source, code in site.code.items():
        notes = next((site.notes(paper, _place(source)) for paper, file in PAPERS.items() if file == source), "")
        body = code.html(site.code, notes).replace("`", "&#96;")  # else a fence of Markdown
        texts[_place(source)] = f'---\nhide: [toc]\n---\n# {source}\n\n<div class="code-page">\n{body}\n</div>\n'
    if site.broken:
        raise ValueError("these links lead nowhere:\n" + "\n".join(sorted(set(site.broken))))
    for page, text in texts.items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(text)
    for asset in site.assets:
        (folder / asset).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / asset, folder / asset)
    shutil.copytree(HERE / "site", folder, dirs_exist_ok=True)


def build(out: Path) -> int:
    """Write the site into a folder, and return the number of its pages. Raises ValueError if Zensical finds a fault."""
    site = Site()
    with tempfile.TemporaryDirectory() as place:
        write_sources(site, Path(place) / "docs")
        settings = (HERE / "zensical.yml").read_text()
        (Path(place) / "mkdocs.yml").write_text(f"{settings}nav: {json.dumps(site.nav)}\n")
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        process = subprocess.run(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if process.returncode:
            raise ValueError(process.stdout)
        pages = list((Path(place) / "site").rglob("*.html"))
        for page in pages:
            page.write_text(with_mathml(page.read_text()))
        shutil.copytree(Path(place) / "site", out, dirs_exist_ok=True)
    return len(pages)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the site into an empty folder.")
    parser.add_argument("out", type=Path)
    args, begin = parser.parse_args(), time.perf_counter()
    if args.out.is_file() or args.out.is_dir() and any(args.out.iterdir()):
        actual = "a file" if args.out.is_file() else "files in it"
        parser.error(f"{args.out}: expected an empty folder or a new one, found {actual}")
    pages = build(args.out)
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    print(f"{pages} pages, {size / 1e6:.1f} MB, in {time.perf_counter() - begin:.0f} s: {args.out}/index.html")


if __name__ == "__main__":
    main()
