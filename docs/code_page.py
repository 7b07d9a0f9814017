"""A Python file as a page: what its docstrings and comments say, next to the code."""

import ast
import html
import io
import re
import textwrap
import tokenize
from dataclasses import dataclass, field
from pathlib import Path
from posixpath import dirname, relpath

from equations import latex_of_docstring, with_mathml
from markdown import Markdown
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

ROOT = Path(__file__).parents[1]
RING = re.compile(r"^mini_ee\.(?=(lab|export|serve)\.)")  # whose folder stands beside mini_ee/
SECTION = re.compile(r"-{2,} *(.*?)[ .]*-{2,}$")  # of a comment: "---- The equations ----"
IMPORTS = (ast.Import, ast.ImportFrom)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
STYLE = "<style>.md-grid { max-width: 100rem; }</style>"  # text and code side by side need room
LIST = re.compile(r"^((?! *(?:[-*]|\d+\.) ) *\S.*)\n(?= *(?:[-*]|1\.) )", re.M)  # the line above its first item
NAME = re.compile(r'(?<!<span class="o">\.</span>)<span class="n[nc]?">([\w.]+)</span>')


@dataclass
class Row:
    """Lines of the file with the text next to them."""

    text: str = ""
    name: str = ""  # of the function or class that begins here, and the anchor
    section: str = ""
    code: list[str] = field(default_factory=list)


class Code:
    """A Python file, taken apart."""

    def __init__(self, source: str):
        self.source, self.text = source, (ROOT / source).read_text()
        self.tree = ast.parse(self.text)
        self.head = ast.get_docstring(self.tree) or ""
        self.title = self.head.partition("\n")[0]
        self.names = [node.name for node in self.tree.body if isinstance(node, DEFINITIONS)]
        self.rows = {1: Row()}  # by their first line
        self.hidden = _lines(self.tree.body[0]) if self.head else set()  # lines of text
        statements = [node for node in self.tree.body if _lines(node).isdisjoint(self.hidden)]
        self._row(next((node.lineno for node in statements if not isinstance(node, IMPORTS)), 1))  # ends the imports
        self._comments()
        self._documented(self.tree)

    def _row(self, line: int) -> Row:
        return self.rows.setdefault(line, Row())

    def _comments(self) -> None:
        """Comments on lines of their own: text of the lines below them."""
        lines, block, comments = self.text.splitlines(), [], {}
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
                comments[token.start[0]] = token.string.lstrip("# ")
        for number, words in comments.items():
            self.hidden.add(number)
            block.append(words)
            if number + 1 in comments:
                continue
            below = next((n for n in range(number + 1, len(lines) + 1) if lines[n - 1].strip()), number)
            if match := SECTION.match(" ".join(block)):
                self._row(below).section = match[1] or " "
            else:
                self._row(below).text = "\n".join(block)
            block = []

    def _documented(self, parent: ast.AST, prefix: str = "") -> None:
        """Functions and classes with their docstrings, and constants with a string below them."""
        before = None
        for node in parent.body:
            if isinstance(node, DEFINITIONS):
                row = self._row(min(part.lineno for part in (node, *node.decorator_list)))
                row.name = f"{prefix}{node.name}"
                if docstring := ast.get_docstring(node):
                    row.text = "\n\n".join(filter(None, (row.text, docstring)))
                    self.hidden |= _lines(node.body[0])
                self._documented(node, f"{row.name}.")
            elif before and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                self._row(before.lineno).text += f"\n\n{node.value.value}"
                self.hidden |= _lines(node)
            before = node if isinstance(node, (ast.Assign, ast.AnnAssign)) else None

    def html(self, files: dict[str, "Code"], notes: str = "") -> str:
        """The body of the page. files: those that have a page, by their path. notes: HTML below the title."""
        targets = _targets(self, files) | {name: f"#{name}" for name in self.names}
        first, _, head = self.head.partition("\n\n")
        first = first if "\n" in first else f"**{first}**"
        parts = [STYLE, text_html(first)]
        parts += [f'<div class="notes">{notes}</div>'] if notes else []
        parts += [f'<div class="head">{text_html(head)}</div><div class="rows">']
        for row in self._with_code():
            lines = "\n".join(row.code).strip("\n")
            section = f"<h2>{html.escape(row.section)}</h2>" if row.section.strip() else ""
            anchor = f' id="{row.name}"' if row.name else ""
            name = f'<h3><a href="#{row.name}">{row.name}</a></h3>' if row.name else ""
            code = code_html(_linked(lines, targets)) if lines.strip() else ""
            if row is self.rows[1] and not (name or row.text) and code:
                parts.append(f"<details><summary>Imports</summary>{code}</details>")
                continue
            if section or name or code or row.text:
                text = f'<div class="text">{name}{text_html(row.text)}</div>'
                parts.append(f'{section}<section class="row"{anchor}>{text}<div class="code">{code}</div></section>')
        return "\n".join([*parts, "</div>"])

    def _with_code(self) -> list[Row]:
        """The rows in their order, with their highlighted lines."""
        row = self.rows[1]
        for number, line in enumerate(highlighted(self.text, "python").splitlines(), 1):
            row = self.rows.get(number, row)
            row.code += [] if number in self.hidden else [line]
        return [self.rows[line] for line in sorted(self.rows)]


def highlighted(code: str, language: str) -> str:
    """Code as HTML, a line a line."""
    return highlight(code, get_lexer_by_name(language), HtmlFormatter(nowrap=True))


def code_html(lines: str) -> str:
    return f'<div class="highlight"><pre><code>{lines}</code></pre></div>'


def _parser() -> Markdown:
    """Of docstrings: Markdown without HTML."""
    generic = {"pymdownx.arithmatex": {"generic": True}}
    parser = Markdown(extensions=["tables", "sane_lists", *generic], extension_configs=generic)
    parser.preprocessors.deregister("html_block")
    parser.inlinePatterns.deregister("html")
    return parser


PARSER = _parser()


def with_lists(text: str) -> str:
    """Markdown with an empty line above each list; Python-Markdown needs one, GitHub does not."""
    return LIST.sub(r"\1\n\n", text)


def _markdown(text: str) -> str:
    return with_mathml(PARSER.reset().convert(with_lists(text)), latex_of_docstring)


def text_html(docstring: str) -> str:
    """A docstring as HTML: Markdown with formulas, and lists in columns."""
    parts = []
    for block in re.split(r"\n\s*\n(?=\S)", docstring.strip("\n")):
        if re.search(r"^\s*>>> ", block):
            parts.append(code_html(highlighted(textwrap.dedent(block), "pycon")))
        elif re.match(r"\S.*?\S {2,}\S|\S+:$", block):
            parts.append(_columns(block))
        else:
            parts.append(_markdown(block))
    return "".join(parts)


def _columns(block: str) -> str:
    """Terms, two or more spaces, what they mean; indented lines continue, and may be columns themselves."""
    entries = []
    for line in block.splitlines():
        if match := re.match(r"(\S.*?)( {2,})(\S.*)$", line):
            entries.append([match[1], [" " * match.end(2) + match[3]]])
        elif line[:1].strip() or not entries:
            entries.append([line, []])
        else:
            entries[-1][1].append(line)
    terms = []
    for term, lines in entries:
        meaning = text_html(textwrap.dedent("\n".join(lines)))
        terms.append(f"<dt>{_markdown(term)[3:-4]}</dt><dd>{meaning}</dd>")  # without <p>
    return f"<dl>{''.join(terms)}</dl>"


def _lines(node: ast.AST) -> set[int]:
    return set(range(node.lineno, node.end_lineno + 1))


def _targets(code: Code, files: dict[str, Code]) -> dict[str, str]:
    """Address of each name that the file imports from a file that has a page."""
    targets = {}
    for node in ast.walk(code.tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                for module, anchor in ((f"{node.module}.{alias.name}", ""), (node.module, f"#{alias.name}")):
                    path = f"{re.sub(RING, '', module).replace('.', '/')}.py"
                    if path in files and (not anchor or alias.name in files[path].names):
                        address = relpath(path, dirname(code.source)).replace(".py", ".html")
                        targets[alias.asname or alias.name] = address + anchor
                        break
    return targets


def _linked(code: str, targets: dict[str, str]) -> str:
    """Highlighted code in which names with an address are links."""

    def link(match: re.Match) -> str:
        return f'<a href="{targets[match[1]]}">{match[0]}</a>' if match[1] in targets else match[0]

    return NAME.sub(link, code)
