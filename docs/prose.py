"""Markdown as HTML: tables, formulas, highlighted code, and links that lead to pages of the site."""

import html
import posixpath
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from equations import latex_of_docstring, mathml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

ROOT = Path(__file__).resolve().parents[1]
LONG_CELL = 60  # characters of a cell that must not become narrow
ALERT = re.compile(r"\[!(\w+)\](\n?)")  # of GitHub: the first line of a block quote
FILE_NAME = re.compile(r"[\w./-]*\w\.(?:py|md)\b")


def highlighted(code: str, language: str) -> str:
    """Code as HTML, a line a line."""
    try:
        return highlight(code, get_lexer_by_name(language), HtmlFormatter(nowrap=True))
    except ClassNotFound:
        return html.escape(code)


def _fence(code: str, info: str, _) -> str:
    return f"<pre><code>{highlighted(code, info)}</code></pre>"


def _parser(docstring: bool) -> MarkdownIt:
    """GitHub's dialect. docstring: formulas without backslashes, and no HTML."""

    def formula(text: str, options: dict) -> str:
        return mathml(latex_of_docstring(text) if docstring else text, options["display_mode"])

    md = MarkdownIt("commonmark", {"html": not docstring, "highlight": _fence}).enable(["table", "strikethrough"])
    md.use(dollarmath_plugin, renderer=formula, allow_digits=False, double_inline=True)
    md.add_render_rule("table_open", lambda *_: '<div class="scroll"><table>')
    md.add_render_rule("table_close", lambda *_: "</table></div>")
    return md


MARKDOWN, DOCSTRING = _parser(docstring=False), _parser(docstring=True)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


class Text:
    """A part of a Markdown file that becomes one page."""

    def __init__(self, text: str, source: str, slugs: Counter | None = None):
        """source: the file, from the root. slugs: the anchors so far of a file that becomes several pages."""
        self.source, self.tokens = source, MARKDOWN.parse(text)
        self.title, self.headings, self.anchors = "", [], set()  # headings: (anchor, text) of level 2
        slugs = Counter() if slugs is None else slugs
        for token, inline in zip(self.tokens, self.tokens[1:]):
            if token.type == "heading_open":
                words = _words(inline)
                anchor = slug(words)
                slugs[anchor] += 1
                anchor += f"-{slugs[anchor] - 1}" if slugs[anchor] > 1 else ""
                token.attrSet("id", anchor)
                self.anchors.add(anchor)
                self.title = self.title or words
                self.headings += [(anchor, words)] if token.tag == "h2" else []
        for token in _flat(self.tokens):
            if token.type in ("html_block", "html_inline"):
                self.anchors.update(re.findall(r'\b(?:id|name)="([^"]+)"', token.content))


def _words(inline: Token) -> str:
    return "".join(child.content for child in inline.children)


def _flat(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from token.children or ()


class Links:
    """Which page each file becomes, and which files the pages need."""

    def __init__(self):
        self.pages: dict[str, str] = {}  # file -> page, both from the root
        self.anchors: dict[tuple[str, str], str] = {}  # (file, anchor) -> page, of a file that becomes several
        self.files: set[str] = set()  # to be copied
        self.broken: list[str] = []

    def resolve(self, address: str, source: str, page: str) -> str:
        """The address in the file `source` as one in `page`."""
        if re.match(r"[a-z]+:|//", address):
            return address
        path, _, anchor = address.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source
        target = f"{target}/README.md" if f"{target}/README.md" in self.pages else target
        destination = self.anchors.get((target, anchor)) or self.pages.get(target)
        if destination is None:
            destination = target
            if not (ROOT / target).is_file():
                self.broken.append(f"{source}: {address}")
            self.files.add(target)
        here = destination == page and anchor
        return ("" if here else relative(destination, page)) + (f"#{anchor}" if anchor else "")

    def mentioned(self, name: str, source: str) -> str | None:
        """The page of a file that a text names by its path, from the root, lab/ or this folder, or by its name."""
        here = posixpath.dirname(source)
        for path in (name, posixpath.join(here, name), f"lab/{name}"):
            if path in self.pages:
                return self.pages[path]
        pages = [page for path, page in self.pages.items() if path.endswith(f"/{name}") and path.startswith("lab/")]
        return pages[0] if len(pages) == 1 else None

    def render(self, tokens: list[Token], source: str, page: str, parser: MarkdownIt = MARKDOWN) -> str:
        """The tokens as HTML, with addresses for this page."""
        for at, token in enumerate(tokens):
            if token.type == "td_open" and len(_words(tokens[at + 1])) > LONG_CELL:
                token.attrSet("class", "long")
            if token.type == "blockquote_open" and (match := ALERT.match(tokens[at + 2].content)):
                token.attrSet("class", match[1].lower())
                del tokens[at + 2].children[: 2 if match[2] else 1]
            if token.type == "html_block":
                token.content = self._html(token.content, source, page)
            if token.children:
                token.children = list(self._inline(token.children, source, page))
        return parser.renderer.render(tokens, parser.options, {})

    def _html(self, content: str, source: str, page: str) -> str:
        def address(match: re.Match) -> str:
            return f'{match[1]}="{self.resolve(match[2], source, page)}"'

        return re.sub(r'\b(src|href|srcset)="([^"]+)"', address, content)

    def _inline(self, tokens: list[Token], source: str, page: str) -> Iterator[Token]:
        inside = 0
        for token in tokens:
            inside += (token.type == "link_open") - (token.type == "link_close")
            for name in {"link_open": ["href"], "image": ["src"]}.get(token.type, []):
                token.attrSet(name, self.resolve(str(token.attrGet(name)), source, page))
            if token.type == "html_inline":
                token.content = self._html(token.content, source, page)
            if token.type in ("code_inline", "text") and not inside and FILE_NAME.search(token.content):
                tag = "<code>{}</code>" if token.type == "code_inline" else "{}"
                token = Token("html_inline", "", 0, content=tag.format(self._names(token.content, source, page)))
            yield token

    def _names(self, text: str, source: str, page: str) -> str:
        """The text as HTML, in which names of files with a page are links."""

        def link(match: re.Match) -> str:
            target = self.mentioned(match[0], source)
            return f'<a href="{relative(target, page)}">{match[0]}</a>' if target and target != page else match[0]

        return FILE_NAME.sub(link, html.escape(text))


def relative(target: str, page: str) -> str:
    """The address of a page or file from another page."""
    return posixpath.relpath(target, posixpath.dirname(page) or ".")
