"""The animation of README: three sentences in one batch, and the layer after which each of them exits."""

from drawings.style import Drawing

# Layers and labels of a run of `mini-ee demo`, whose default rule is a threshold of 0.95: `mini-ee classify`.
SENTENCES = (
    ("A charming film.", 2, "positive"),
    ("For all its wonderful bed, the inn was awful!", 7, "negative"),
    ("I expected to hate the film, but it was wonderful.", 12, "positive"),
)
LAYERS, CELL, GAP, LEFT = 12, 38, 5, 24
SECONDS, STEP, START = 13.0, 0.7, 4.0  # of one turn; of one layer; before the first layer, with the finished picture
TOP, LANE = 148, 76  # y of the first lane, height of a lane


def appear(d: Drawing, name: str, seconds: float) -> None:
    """A class that is hidden from the start of the layers until `seconds` of each turn.

    A turn begins with everything visible, so a still picture shows the end; without animation it is all visible too.
    """
    hide, share = 100 * (START - 0.6) / SECONDS, 100 * seconds / SECONDS
    shown = f"0%, {hide:.2f}%, {share + 1:.2f}%, 100% {{ opacity: 1; }}"
    d.css.append(f"@keyframes {name} {{ {shown} {hide + 1:.2f}%, {share:.2f}% {{ opacity: 0; }} }}")
    d.css.append(f".{name} {{ animation: {name} {SECONDS:g}s infinite; }}")


def cell_x(layer: int) -> int:
    """The left side of a layer's column, from layer 1."""
    return LEFT + (layer - 1) * (CELL + GAP)


def loop() -> Drawing:
    """Three lanes of twelve layers, and below them the number of sentences that each layer computes."""
    description = (
        "Three sentences pass through twelve layers in one batch. The first exits after layer 2, the second after "
        "layer 7, the third after layer 12. Each layer computes only the sentences that have not exited."
    )
    d = Drawing("Early exit: a sentence stops at the first head that is confident", description, 700, 492)
    d.text(LEFT, 38, "Easy sentences stop early, hard ones run on", 21, "start", "bold")
    d.text(
        LEFT,
        64,
        "After each layer a small head predicts. If it is confident, the sentence exits.",
        15.5,
        "start",
        "soft",
    )
    d.text(LEFT, 98, "layer", 14, "start", "soft")
    for layer in range(1, LAYERS + 1):
        d.text(cell_x(layer) + CELL / 2, 118, layer, 16, kind="soft bold")
        appear(d, f"at{layer}", START + STEP * (layer - 1))
    for lane, (sentence, depth, label) in enumerate(SENTENCES):
        draw_lane(d, TOP + LANE * lane, sentence, depth, label)
    y = TOP + LANE * len(SENTENCES) + 10
    d.text(LEFT, y, "sentences that the layer computes", 15.5, "start", "soft")
    for layer in range(1, LAYERS + 1):
        count = sum(depth >= layer for _, depth, _ in SENTENCES)
        d.add(f'<g class="at{layer}">')
        for level in range(count):
            d.box(cell_x(layer), y + 48 - 16 * level, CELL, 12, "", "frozen")
        d.text(cell_x(layer) + CELL / 2, y + 80, count, 16, kind="bold")
        d.add("</g>")
    saved = 1 - sum(depth for _, depth, _ in SENTENCES) / (LAYERS * len(SENTENCES))
    appear(d, "end", START + STEP * LAYERS)
    d.add('<g class="end">')
    d.text(550, y + 48, f"{saved:.0%}", 26, "start", "exit bold")
    d.text(550, y + 70, "of the layers", 15.5, "start", "exit")
    d.text(550, y + 90, "saved", 15.5, "start", "exit")
    d.add("</g>")
    d.css.append("@media (prefers-reduced-motion: reduce) { g { animation: none !important; } }")
    return d


def draw_lane(d: Drawing, y: int, sentence: str, depth: int, label: str) -> None:
    """The lane of one sentence."""
    d.text(LEFT, y, sentence, 17, "start")
    for layer in range(1, LAYERS + 1):
        d.box(cell_x(layer), y + 10, CELL, 30, "", "skip")
        if layer <= depth:
            last = layer == depth
            d.add(f'<g class="at{layer}">')
            d.box(cell_x(layer), y + 10, CELL, 30, "exit" if last else "", "exit" if last else "frozen", 15)
            d.add("</g>")
    d.add(f'<g class="at{depth}">')
    d.text(cell_x(LAYERS) + CELL + 12, y + 26, label, 17, "start", "exit bold")
    d.text(cell_x(LAYERS) + CELL + 12, y + 44, f"after layer {depth}", 14, "start", "soft")
    d.add("</g>")


PICTURES = {"loop": loop}
