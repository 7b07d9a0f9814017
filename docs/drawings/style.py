"""The style of all drawings: one palette for light and dark, boxes, arrows and text. Only the standard library.

Colours have a meaning, the same in every drawing:

    layer   a layer, or anything that is computed        frozen   its weights are not trained
    train   its weights are trained; a gradient          exit     a head, and an exit
    rule    a decision: a rule or a policy               cut      what is lost, cut off or wrong
    store   what is recorded or stored                   skip     what is not computed
"""

from html import escape
from math import atan2, cos, sin

PALETTE = {  # kind -> (fill, line) in light mode, (fill, line) in dark mode
    "layer": ("#eef1f4", "#818b96", "#21262d", "#7d8590"),
    "frozen": ("#dcecff", "#3f83d9", "#10284a", "#58a6ff"),
    "train": ("#ffe6c7", "#c9710a", "#472a08", "#e8a04a"),
    "exit": ("#d6f5de", "#1f8a3f", "#0f3a1f", "#4cc366"),
    "rule": ("#eddcff", "#7a45d1", "#2e1b4d", "#b083f5"),
    "cut": ("#ffdcd8", "#cf222e", "#4d1517", "#ff7b72"),
    "store": ("#fff3c2", "#96700a", "#3c2f06", "#d4a72c"),
    "skip": ("#ffffff", "#a9b2bc", "#0d1117", "#4d5560"),
}
INK, SOFT, PANEL, BORDER = (
    ("#1f2328", "#e6edf3"),
    ("#57606a", "#a4aeb9"),
    ("#ffffff", "#0d1117"),
    ("#d0d7de", "#30363d"),
)
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
MONO = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace'
WIDTHS = {
    " ,.:;|!'il": 0.32,
    "()[]-/fjrt": 0.4,
    "mwMW%": 0.93,
    "ABCDEGHKNOQRUVX": 0.72,
    "+=<≥×": 0.84,
    "■": 1.1,
}  # in ems
OTHERS, MONO_WIDTH = (
    0.605,
    0.605,
)  # widths in DejaVu, the widest font of the list; a line that would not fit is an error


class Drawing:
    """An SVG on a panel of its own, so that it is legible on any page. Coordinates are pixels at full size."""

    def __init__(self, title: str, description: str, width: int, height: int):
        self.title, self.description, self.width, self.height = title, description, width, height
        self.parts: list[str] = []
        self.css: list[str] = []

    def add(self, part: str) -> None:
        """Add an element as it is."""
        self.parts.append(part)

    def text(self, x, y, words, size=16, anchor="middle", kind="ink", room=None) -> None:
        """A line of text with its baseline at y.

        kind: ink, soft or a colour; with `bold` or `mono` for the font. room: the width that the line must fit
        (default: up to the border of the panel). Raises ValueError if it does not.
        """
        words, kinds, sides = str(words), kind.split(), (x - 10, self.width - 10 - x)
        room = room or {"start": sides[1], "end": sides[0], "middle": 2 * min(sides)}[anchor]
        if (width := length(words, size, "mono" in kinds, "bold" in kinds)) > room:
            raise ValueError(f"{self.title}: {words!r} takes about {width:.0f} of {room:.0f} pixels")
        if not size < y < self.height - 6:
            raise ValueError(f"{self.title}: {words!r} is cut at {y:.0f} of {self.height} pixels")
        fonts = [name for name in kinds if name in ("bold", "mono")]
        colours = [f"t-{name}" for name in kinds if name not in fonts] or ["t-ink"]
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        style = f'class="{" ".join(colours + fonts)}" font-size="{size}"{place}'
        self.add(f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>')

    def box(self, x, y, w, h, words="", kind="layer", size=16) -> None:
        """A box with lines of text in its middle; a newline separates lines. kind: a colour; with `dashed`."""
        r = 7 if h > 24 else 4
        self.add(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{r}"/>')
        lines = str(words).split("\n") if words else []
        first = y + h / 2 + size * 0.36 - (len(lines) - 1) * size * 0.6
        for at, line in enumerate(lines):
            ink = "soft" if "skip" in kind.split() else "ink"
            self.text(x + w / 2, first + at * size * 1.2, line, size, kind=ink, room=w - 6)

    def arrow(self, *points, kind="layer", dashed=False, wide=2.0, tip=True) -> None:
        """A line through points (x, y), with a tip at the last one."""
        (x0, y0), (x1, y1) = points[-2:]
        angle, size = atan2(y1 - y0, x1 - x0), 4.5 + 2.2 * wide
        back = size * 0.8 if tip else 0
        ends = [*points[:-1], (x1 - back * cos(angle), y1 - back * sin(angle))]
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        path = " ".join(f"{x:.4g},{y:.4g}" for x, y in ends)
        self.add(f'<polyline class="l-{kind}" stroke-width="{wide:g}" points="{path}"{dash}/>')
        if tip:
            wings = [(x1 - size * cos(angle + turn), y1 - size * sin(angle + turn)) for turn in (-0.42, 0.42)]
            path = " ".join(f"{x:.5g},{y:.5g}" for x, y in [(x1, y1), *wings])
            self.add(f'<polygon class="f-{kind}" points="{path}"/>')

    def cross(self, x, y, size=7) -> None:
        """A red cross: what does not pass here."""
        for sign in (1, -1):
            ends = f'x1="{x - size:g}" y1="{y - sign * size:g}" x2="{x + size:g}" y2="{y + sign * size:g}"'
            self.add(f'<line class="l-cut" stroke-width="3" {ends}/>')

    def legend(self, x, y, *entries: tuple[str, str], size=14, gap=22) -> None:
        """A line of small boxes and what their colours mean: (kind, words)."""
        for kind, words in entries:
            self.add(f'<rect class="{kind}" x="{x:g}" y="{y - 12:g}" width="15" height="15" rx="3"/>')
            self.text(x + 21, y, words, size, anchor="start", kind="soft")
            x += 21 + length(words, size) + gap
        if x - gap > self.width - 8:
            raise ValueError(f"{self.title}: the legend ends at {x - gap:.0f} of {self.width}")

    def svg(self) -> str:
        """The document."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" aria-labelledby="title about">'
        )
        panel = f'<rect class="panel" x="1" y="1" width="{self.width - 2}" height="{self.height - 2}" rx="12"/>'
        names = f'<title id="title">{escape(self.title)}</title>\n<desc id="about">{escape(self.description)}</desc>'
        style = f"<style>\n{sheet()}\n" + "".join(f"{rule}\n" for rule in self.css) + "</style>"
        return "\n".join([head, names, style, panel, *self.parts, "</svg>"]) + "\n"


def length(words: str, size: float, mono: bool = False, bold: bool = False) -> float:
    """The width of a line of text, estimated."""
    if mono:
        return len(words) * size * MONO_WIDTH
    widths = {letter: width for letters, width in WIDTHS.items() for letter in letters}
    return sum(widths.get(letter, OTHERS) for letter in words) * size * (1.12 if bold else 1)


def sheet() -> str:
    """The style sheet: the colours of light mode, then those of dark mode."""
    light, dark = (_colours(mode) for mode in (0, 1))
    basic = f"text {{ font-family: {FONT}; }} .mono {{ font-family: {MONO}; }} .bold {{ font-weight: 600; }}"
    lines = "polyline, line { fill: none; stroke-linejoin: round; } .dashed, .skip { stroke-dasharray: 5 4; }"
    return "\n".join([basic, lines, light, f"@media (prefers-color-scheme: dark) {{\n{dark}\n}}"])


def _colours(mode: int) -> str:
    rules = [f".t-ink {{ fill: {INK[mode]}; }} .t-soft {{ fill: {SOFT[mode]}; }}"]
    rules += [f".panel {{ fill: {PANEL[mode]}; stroke: {BORDER[mode]}; }}"]
    for kind, colours in PALETTE.items():
        fill, line = colours[2 * mode : 2 * mode + 2]
        width = " stroke-width: 1.6;" if mode == 0 else ""
        rules.append(f".{kind} {{ fill: {fill}; stroke: {line};{width} }} .l-{kind} {{ stroke: {line}; }}")
        rules.append(f".f-{kind}, .t-{kind} {{ fill: {line}; }}")
    return "\n".join(rules)
