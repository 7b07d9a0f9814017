"""Schematics of methods that differ in how the exits are trained. The other ones are in rules.py."""

from drawings.style import Drawing

WIDTH = 640
INPUT, SEGMENT, GAP, LEFT = 84, 142, 28, 126  # widths of the input and of a segment, the gap, the first segment's x
LAYERS = ("layers 1-4", "layers 5-8", "layers 9-12")


def sheet(title: str, idea: str, height: int, *legend: tuple[str, str]) -> Drawing:
    """An empty schematic: its title, the idea in one line, and what the colours mean."""
    drawing = Drawing(title, idea, WIDTH, height)
    drawing.text(22, 38, title, 21, "start", "bold", room=WIDTH - 44)
    drawing.text(22, 64, idea, 15, "start", "soft", room=WIDTH - 30)
    drawing.legend(22, height - 20, *legend)
    return drawing


def segment_x(k: int) -> int:
    """The left side of segment k."""
    return LEFT + k * (SEGMENT + GAP)


def middle(k: int) -> float:
    """The middle of segment k."""
    return segment_x(k) + SEGMENT / 2


def backbone(d: Drawing, y: int, kinds, heads, source="sentence", names=("head 1", "head 2", "head 3")) -> None:
    """Three segments at y with their heads above. kinds, heads: a colour each; heads: None for no head."""
    d.box(22, y, INPUT, 46, source, "layer", 15)
    d.arrow((22 + INPUT, y + 23), (LEFT, y + 23))
    for k in range(3):
        skipped = kinds[k] == "skip"
        d.box(segment_x(k), y, SEGMENT, 46, LAYERS[k], kinds[k], 16)
        if k:
            d.arrow((segment_x(k) - GAP, y + 23), (segment_x(k), y + 23), kind="skip" if skipped else "layer")
        if heads[k]:
            d.arrow((middle(k), y), (middle(k), y - 24), kind="skip" if skipped else "layer")
            d.box(middle(k) - 48, y - 58, 96, 34, names[k], heads[k], 15)


def gradient(d: Drawing, y: int, last: int, words: str, first: int = 0) -> None:
    """The gradient of a loss: a bar with a tip at the left, from segment `last` back to segment `first`."""
    start, end = segment_x(last) + SEGMENT - 6, segment_x(first) + 6
    d.arrow((start, y), (end, y), kind="train", wide=3)
    d.text(start - 2, y - 7, words, 14, "end", "train", room=start - end)


def joint() -> Drawing:
    """Joint training: every loss reaches all layers below."""
    trained, idea = (
        ("train", "train weights and gradients"),
        "All exits learn at once: one weighted sum of their losses.",
    )
    d = sheet("Joint training", idea, 530, (trained[0], "trained; gradient"), ("exit", "exit"), ("rule", "rule"))
    d.text(22, 104, "Training", 17, "start", "bold")
    backbone(d, 178, ["train"] * 3, ["train"] * 3)
    for k in range(3):
        gradient(d, 250 + 26 * k, k, f"loss {k + 1} × {4 * (k + 1)}/24")
    d.text(22, 330, "Layers 1-4 must serve three heads at once.", 15, "start", "soft")
    d.text(22, 372, "Exit rule", 17, "start", "bold")
    threshold_row(d, 400)
    return d


def threshold_row(d: Drawing, y: int) -> None:
    """The rule: the first head whose largest probability reaches the threshold."""
    d.box(22, y + 4, INPUT, 40, "sentence", "layer", 15)
    words = ("0.61 < 0.9\ncontinue", "0.94 ≥ 0.9\nexit", "not run")
    for k, kind in enumerate(("rule", "exit", "skip")):
        arrow = "skip" if kind == "skip" else "layer"
        d.arrow((segment_x(k) - GAP + (6 if not k else 0), y + 24), (segment_x(k), y + 24), kind=arrow)
        d.box(segment_x(k), y, SEGMENT, 48, words[k], kind, 16)
    d.text(LEFT, y + 70, "largest probability of a head against the threshold 0.9", 14, "start", "soft")


def two_stage() -> Drawing:
    """Two stages: the backbone first, then the heads on frozen layers."""
    idea = "First the model learns its task. Then it is frozen, and early heads learn."
    d = sheet(
        "Two-stage training", idea, 514, ("train", "trained; gradient"), ("frozen", "frozen"), ("cut", "stops here")
    )
    d.text(22, 104, "Stage 1: fine-tune the model for the last exit", 17, "start", "bold")
    backbone(d, 178, ["train"] * 3, [None, None, "train"])
    gradient(d, 252, 2, "loss 3")
    d.text(22, 300, "Stage 2: train the other heads", 17, "start", "bold")
    backbone(d, 394, ["frozen"] * 3, ["train", "train", "frozen"])
    for k in range(2):
        x = middle(k) + 66
        d.arrow((x, 338), (x, 376), kind="train", wide=3)
        d.text(x, 330, f"loss {k + 1}", 14, "middle", "train")
        d.cross(x, 384)
    d.text(22, 466, "The full model keeps its accuracy. Early layers never learn to serve heads.", 15, "start", "soft")
    return d


def sweet() -> Drawing:
    """SWEET: the gradient of an exit stops at the exit before."""
    idea = "Each layer learns from one loss only: gradients are cut between exits."
    d = sheet("SWEET: separating weights", idea, 530, ("train", "trained; gradient"), ("cut", "gradient is cut"))
    d.text(22, 104, "Joint training: losses share layers", 17, "start", "bold")
    backbone(d, 178, ["train"] * 3, ["train"] * 3)
    for k in range(3):
        gradient(d, 250 + 26 * k, k, f"loss {k + 1}")
    d.text(22, 338, "SWEET: each loss has layers of its own", 17, "start", "bold")
    backbone(d, 414, ["train"] * 3, ["train"] * 3)
    for k in range(3):
        gradient(d, 486, k, f"loss {k + 1}", k)
        if k:
            d.cross(segment_x(k) - GAP / 2, 486)
    return d


def lora_exits() -> Drawing:
    """LoRAExit: a stream per exit, each with its own adapters on the same frozen weights."""
    idea = "The backbone is frozen. Each exit adds its own small adapters."
    d = sheet(
        "LoRAExit: one stream for each exit",
        idea,
        488,
        ("frozen", "frozen, shared"),
        ("train", "trained adapters, heads"),
    )
    width = 104
    for k in range(3):
        y = 92 + 82 * k
        d.text(22, y + 22, f"stream {k + 1}", 16, "start", "bold")
        d.text(22, y + 42, "embeddings", 13, "start", "soft")
        for j in range(k + 1):
            x = 122 + j * (width + 14)
            d.box(x, y, width, 34, LAYERS[j], "frozen", 15)
            d.box(x, y + 36, width, 20, f"adapters {k + 1}", "train", 13)
            d.arrow((x - (14 if j else 12), y + 17), (x, y + 17))
        x = 122 + (k + 1) * (width + 14)
        d.arrow((x - 14, y + 17), (x + 4, y + 17))
        d.box(x + 4, y, 80, 34, f"head {k + 1}", "train", 15)
    for k in range(2):
        x, y = 122 + (k + 1) * 118 + 4, 92 + 82 * k
        d.arrow((x + 118 + 40, y + 80), (x + 118 + 40, y + 17), (x + 86, y + 17), kind="exit", dashed=True)
        d.text(x + 168, y + 30, "teaches", 14, "start", "exit", room=WIDTH - x - 170)
    d.text(22, 352, "Training", 17, "start", "bold")
    d.text(108, 352, "An exit learns the labels, and what the next exit predicts (SEGD).", 14.5, "start", "soft")
    d.text(22, 384, "Cost", 17, "start", "bold")
    d.text(108, 384, "Adapters change all layers: stream 2 cannot continue from stream 1.", 14.5, "start", "soft")
    d.text(108, 406, "An example that does not stop starts again from the embeddings.", 14.5, "start", "soft")
    d.text(
        108, 428, "Layers run if it stops at exit 1, 2, 3:  4,  4 + 8 = 12,  4 + 8 + 12 = 24.", 14.5, "start", "soft"
    )
    return d


def self_supervised() -> Drawing:
    """Self-supervised exits: heads of a frozen decoder learn its own next token."""
    idea = "Heads of a frozen decoder learn to predict what the decoder itself predicts."
    d = sheet(
        "Self-supervised exits",
        idea,
        552,
        ("frozen", "frozen"),
        ("train", "trained"),
        ("exit", "agrees"),
        ("cut", "differs"),
    )
    d.text(22, 104, "Training: no labels, the model writes its own text", 17, "start", "bold")
    backbone(d, 210, ["frozen"] * 3, ["train", "train", "frozen"], "its text", ("head 1", "head 2", "LM head"))
    top = 210 - 76
    d.arrow((middle(2), 152), (middle(2), top), (middle(0), top), (middle(0), 151), kind="train", dashed=True)
    d.arrow((middle(1), top), (middle(1), 151), kind="train", dashed=True)
    d.box(middle(1) + 12, top - 13, 140, 26, "target: its token", "train", 14)
    d.text(22, 284, "A head may start as a copy of the LM head. A penalty may raise its entropy.", 15, "start", "soft")
    d.text(22, 328, "Calibration: 90% of the tokens that exit must agree", 17, "start", "bold")
    calibration_axis(d, 394)
    d.text(22, 496, "Exit at the first head whose confidence reaches its own threshold.", 15, "start", "soft")
    return d


def calibration_axis(d: Drawing, y: int) -> None:
    """Tokens along an axis of confidence: from the threshold on, nine of ten agree with the full model."""
    left, right, step = 40, 600, 28
    agrees = (0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1)
    for at, agree in enumerate(agrees):
        d.add(f'<circle class="{"exit" if agree else "cut"}" cx="{left + 14 + at * step:g}" cy="{y - 22}" r="9"/>')
        if not agree:
            x = left + 14 + at * step
            d.add(f'<path class="l-cut" stroke-width="2" d="M{x - 4} {y - 26}l8 8m0 -8l-8 8"/>')
    d.arrow((left - 10, y), (right + 14, y))
    bar = left + 10 * step
    d.arrow((bar, y - 44), (bar, y + 22), kind="rule", wide=3, tip=False)
    d.text(bar, y + 40, "threshold", 15, "middle", "rule bold")
    d.text(left - 10, y + 22, "low confidence", 14, "start", "soft")
    d.text(right + 12, y + 22, "high confidence", 14, "end", "soft")
    d.text(bar - 60, y + 62, "continue", 15, "end", "soft")
    d.text(bar + 60, y + 62, "exit: 9 of 10 agree", 15, "start", "exit bold")
    assert sum(agrees[10:]) == 9  # the drawing says so


PICTURES = {
    "method-joint": joint,
    "method-two-stage": two_stage,
    "method-sweet": sweet,
    "method-lora-exits": lora_exits,
    "method-self-supervised": self_supervised,
}
