"""Pages of results. A page is written by hand, as pages/NAME.md beside this file, and its figures come from records.

A template names a figure, `{{ joint.saved | percent }}`, and a list of rows makes a table, `{{ rows | table("method",
"accuracy") }}`. A figure that has no record, and one that is not a number, is an error: no page is written.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from jinja2 import Environment, FileSystemLoader, StrictUndefined, UndefinedError

from mini_ee.experiments.markdown import markdown_rows, markdown_table
from mini_ee.lab.data.files import write_bytes
from mini_ee.lab.errors import WrongArguments

TEMPLATES = Path(__file__).parent / "pages"


def write_page(name: str, figures: Mapping[str, Any], out: Path) -> Path:
    """Write OUT/NAME.md, which may be in a folder, from pages/NAME.md.

    Raises WrongArguments for a figure that the records do not have.
    """
    path = out / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, page_of(name, figures).encode())
    return path


def page_of(name: str, figures: Mapping[str, Any]) -> str:
    """The page NAME with these figures."""
    return fill_in((TEMPLATES / f"{name}.md").read_text(encoding="utf-8"), figures, f"{name}.md")


def heading(name: str) -> str:
    """The first line of a page."""
    with open(TEMPLATES / f"{name}.md", encoding="utf-8") as template:
        return template.readline().rstrip()


def fill_in(template: str, figures: Mapping[str, Any], name: str) -> str:
    """The template with its figures. name: of the page, for the message."""
    try:
        return _environment().from_string(template).render(figures)
    except UndefinedError as error:
        raise WrongArguments(f"{name}: a figure has no record: {error.message}") from None


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        finalize=_recorded,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters = percent, points, number, plus_minus, signed, table, rows
    environment.filters |= {function.__name__: function for function in filters}
    return environment


def _recorded(value: Any) -> Any:
    if isinstance(value, StrictUndefined):
        str(value)  # raises, with the name of the figure
    if value is None or isinstance(value, float) and math.isnan(value):
        raise UndefinedError(f"found {value} in place of a number")
    return value


def percent(share: float, digits: int = 1) -> str:
    """A share from 0 to 1 in percent: 55.1%."""
    return f"{_recorded(share):.{digits}%}"


def number(value: float, digits: int = 0) -> str:
    """With this number of decimals, and commas between thousands: 1,234."""
    return f"{_recorded(value):,.{digits}f}"


def points(difference: float, digits: int = 1) -> str:
    """A difference of two shares in percentage points, with its sign: +1.9."""
    return f"{100 * _recorded(difference):+.{digits}f}"


class Interval(Protocol):
    """A mean with its confidence interval; low and high are NaN if there are too few seeds for one."""

    @property
    def mean(self) -> float: ...
    @property
    def high(self) -> float: ...


def plus_minus(estimate: Interval, digits: int = 1, scale: float = 100) -> str:
    """The mean and half the width of its interval, in percent unless another scale is given: 85.3 ±1.2."""
    mean = f"{scale * _recorded(estimate.mean):.{digits}f}"
    half = "?" if math.isnan(estimate.high) else f"{scale * (estimate.high - estimate.mean):.{digits}f}"
    return f"{mean.removeprefix('-') if not float(mean) else mean} ±{half}"


def signed(estimate: Interval) -> str:
    """A difference in percentage points with its sign and half the width of its interval: +1.9 ±0.4."""
    text = plus_minus(estimate)
    return text if text.startswith(("-", "0.0 ")) else f"+{text}"


def table(cells: Iterable[Iterable], *names: str) -> str:
    """A table of Markdown with these column names."""
    return "\n".join(markdown_table(names, _checked(cells)))


def rows(cells: Iterable[Iterable]) -> str:
    """The rows of a table of Markdown whose header is in the template."""
    return markdown_rows(_checked(cells))


def _checked(cells: Iterable[Iterable]) -> Iterable[Iterable]:
    return ([_recorded(cell) for cell in row] for row in cells)
