"""Formulas as MathML, which browsers draw without any script or font of ours."""

import html
import re
from collections.abc import Callable

from latex2mathml.converter import convert

SYMBOLS = "alpha beta gamma delta epsilon eta theta lambda mu pi rho sigma tau phi sum prod min max exp log ln in"
OPERATORS = {">=": r"\ge ", "<=": r"\le ", "!=": r"\ne ", r"\.\.\.": r"\dots ", r"\|": r"\mid ", r"(?<![\w.])1\(": "𝟙("}
SPELLED = {r"\arg\max": r"\operatorname{arg\,max}", r"\arg\min": r"\operatorname{arg\,min}"}

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


def with_mathml(content: str, latex_of: Callable[[str], str] = str) -> str:
    """HTML of Python-Markdown with its formulas as MathML. latex_of: the LaTeX of what was written."""
    return FORMULA.sub(lambda match: mathml(latex_of(html.unescape(match[2])), match[1] == "div"), content)


def mathml(latex: str, display: bool) -> str:
    """A formula in LaTeX as MathML. Raises ValueError for a command that the library does not know."""
    for command, known in SPELLED.items():
        latex = latex.replace(command, known)
    markup = convert(latex, display="block" if display else "inline")
    if unknown := re.findall(r"<m[io]>(\\[^<]*)<", markup):
        raise ValueError(f"latex2mathml does not know {', '.join(unknown)} in {latex}: use another command")
    return markup


def latex_of_docstring(text: str) -> str:
    """LaTeX of a formula in a docstring, which needs no backslashes: `sum_i alpha t_i`, `P(z = l | x) >= tau`."""

    def word(match: re.Match) -> str:
        known = match[1] in SYMBOLS.split()
        return f"\\{match[1]} " if known else f"\\mathrm{{{match[1]}}}" + ("\\ " if match[2] else "")

    text = re.sub(r"(?<![\\A-Za-z])([A-Za-z]{2,})( ?)", word, text)
    for written, latex in OPERATORS.items():
        text = re.sub(written, lambda _: latex, text)
    return text
