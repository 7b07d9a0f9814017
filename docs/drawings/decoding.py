"""The gap in the KV cache after early exits, and the nested Ifs of model.onnx."""

from drawings.style import Drawing

TOKENS, DEPTHS = ("Once", "upon", "a", "time"), (3, 1, 2, 3)
FLOORS = ("layers 1-4", "layers 5-8", "layers 9-12")


def cache_gap() -> Drawing:
    """Three frames: the gap, state copying, recomputing."""
    description = "A token that exits early has no keys and values in the layers above. Two ways to fill them in."
    d = Drawing("The gap in the KV cache", description, 640, 792)
    d.text(22, 38, d.title, 21, "start", "bold")
    d.text(22, 64, 'Four tokens. "upon" exits after layer 4, "a" after layer 8.', 15, "start", "soft")
    frames = (
        ("1  The gap", '"time" must attend to all tokens, but keys and values are missing.', "cut", "?"),
        (
            "2  copy_state",
            "The state at the exit is the input of all layers above: cheap, not exact.",
            "store",
            "copy",
        ),
        (
            "3  recompute",
            "The layers run for these tokens later, in one block: exact, more work.",
            "exit",
            "run",
        ),
    )
    for at, (name, words, kind, mark) in enumerate(frames):
        frame(d, 104 + 224 * at, name, words, kind, mark)
    entries = (
        ("layer", "keys and values"),
        ("cut", "missing"),
        ("store", "from a copied state"),
        ("exit", "computed later"),
    )
    d.legend(22, 772, *entries, gap=18)
    return d


def frame(d: Drawing, y: int, name: str, words: str, kind: str, mark: str) -> None:
    """One frame of cache_gap: three floors of layers, four tokens."""
    d.text(22, y, name, 17, "start", "bold")
    d.text(22, y + 24, words, 15, "start", "soft")
    for floor, label in enumerate(FLOORS):
        row = y + 40 + 42 * (2 - floor)
        d.text(22, row + 22, label, 15, "start")
        for at, depth in enumerate(DEPTHS):
            missing = floor >= depth
            d.box(
                130 + 122 * at, row, 108, 32, mark if missing else "K, V", f"{kind} dashed" if missing else "layer", 15
            )
            if missing and mark == "copy":
                d.arrow((226 + 122 * at, row + 40), (226 + 122 * at, row + 24), kind="store", wide=2.5)
    for at, token in enumerate(TOKENS):
        d.text(184 + 122 * at, y + 186, token, 16, kind="bold")


def nested_if() -> Drawing:
    """model.onnx: each If contains the layers up to the next exit and the next If."""
    description = "Each If contains the next segment and the next If. A branch runs only if some example continues."
    d = Drawing("model.onnx: one graph that stops by itself", description, 640, 560)
    d.text(22, 38, d.title, 21, "start", "bold")
    d.text(22, 64, "Three exits. A branch is run only if some example continues.", 15, "start", "soft")
    d.box(20, 84, 600, 436, "", "panel")
    d.text(36, 110, "main graph", 15, "start", "soft")
    step(d, 122, 36, "layers 1-4, head 1, rule: which rows stop?")
    d.box(36, 168, 568, 300, "", "rule")
    d.text(52, 194, "If any row continues", 16, "start", "rule bold")
    d.text(590, 194, "else: the result of exit 1", 14, "end", "soft")
    step(d, 206, 52, "Gather the rows that continue")
    step(d, 246, 52, "layers 5-8, head 2, rule: which rows stop?")
    d.box(52, 290, 536, 122, "", "store")
    d.text(68, 314, "If any row continues", 16, "start", "store bold")
    d.text(574, 314, "else: the result of exit 2", 14, "end", "soft")
    step(d, 326, 68, "Gather, layers 9-12, head 3")
    step(d, 366, 68, "ScatterND: write their results over those of exit 2", "exit")
    step(d, 422, 52, "ScatterND: write their results over those of exit 1", "exit")
    step(d, 478, 36, "output: logits, label, confidence, layers of every row")
    d.text(22, 544, "ONNX has no loop that drops rows, so the branches are nested.", 15, "start", "soft")
    return d


def step(d: Drawing, y: int, x: int, words: str, kind: str = "layer") -> None:
    """A step of the graph, across the width of its branch."""
    d.box(x + 14, y, 640 - 2 * x - 28, 32, words, kind, 15.5)


PICTURES = {"cache-gap": cache_gap, "nested-if": nested_if}
