"""Schematics of methods that differ in who decides, and when. The ones that differ in training are in training.py."""

from drawings.style import Drawing
from drawings.training import GAP, INPUT, LAYERS, SEGMENT, WIDTH, backbone, middle, segment_x, sheet


def raee() -> Drawing:
    """RAEE: a datastore of examples, whose neighbours choose the exit before the model runs."""
    idea = "The nearest examples in a datastore choose the exit before the model runs."
    d = sheet(
        "RAEE: retrieval chooses the exit",
        idea,
        540,
        ("store", "stored"),
        ("rule", "decision"),
        ("exit", "exit"),
        ("skip", "not run"),
    )
    d.text(22, 104, "Collect: run every exit on examples with known answers", 17, "start", "bold")
    columns = ("embedding", "exit 1", "exit 2", "exit 3")
    rows = (
        ("a warm film", "0.71", "0.88", "0.97"),
        ("not bad at all", "wrong: 0", "0.83", "0.92"),
        ("it never ends", "wrong: 0", "wrong: 0", "0.66"),
    )
    for column, name in enumerate(columns):
        d.text(230 + column * 112, 134, name, 14, kind="soft")
    for at, (text, *values) in enumerate(rows):
        y = 142 + 34 * at
        d.text(22, y + 20, text, 15, "start")
        d.box(180, y, 100, 28, "■ ■ ■ ■", "store", 12)
        for column, value in enumerate(values):
            d.box(292 + column * 112, y, 100, 28, value, "cut" if "wrong" in value else "store", 14)
    d.text(
        22,
        266,
        "stored for each exit: the probability of the right answer, 0 if the exit is wrong",
        14.5,
        "start",
        "soft",
    )
    d.text(22, 306, "Inference: the neighbours vote, weighted by closeness", 17, "start", "bold")
    d.box(22, 336, 112, 46, "new\nexample", "layer", 15)
    d.arrow((134, 359), (164, 359))
    d.box(164, 336, 140, 46, "search: nearest\nneighbours", "store", 15)
    d.arrow((304, 359), (334, 359))
    for at, (votes, name) in enumerate(((18, "exit 1"), (62, "exit 2"), (50, "exit 3"))):
        y = 326 + 24 * at
        d.text(338, y + 15, name, 14, "start", "soft")
        d.box(392, y, votes * 1.6, 18, "", "rule" if at == 1 else "layer")
    d.text(506, 364, "most votes", 14.5, "start", "rule bold")
    kinds = ("layer", "layer", "skip")
    backbone(d, 436, kinds, [None, None, None])
    d.arrow((middle(1), 436), (middle(1), 420), kind="exit")
    d.text(middle(1) + 12, 424, "head 2 only", 14.5, "start", "exit bold")
    return d


def consistent() -> Drawing:
    """ConsistentEE: a policy per exit, trained by REINFORCE."""
    idea = "A small policy at each exit learns by reward whether to stop there."
    d = sheet(
        "ConsistentEE: a policy decides",
        idea,
        560,
        ("layer", "layers and heads"),
        ("rule", "policy"),
        ("exit", "exit"),
        ("skip", "not run"),
    )
    d.text(22, 104, "Training: only the exit that is taken must be right", 17, "start", "bold")
    policies(d, 130, ("p = 0.3", "p = 0.6", "all others"), ("rule", "rule", "layer"), ("layer",) * 3)
    for k, share in enumerate(("0.3", "0.7 × 0.6 = 0.42", "0.7 × 0.4 = 0.28")):
        d.text(middle(k), 254, f"P = {share}", 14.5, room=SEGMENT + 30)
    d.text(22, 290, "reward  =  - loss at the exit  -  alpha × layers", 17, "start", "rule bold")
    d.text(
        22, 314, "Hard examples pay a lower price for each layer. REINFORCE samples exits and", 14.5, "start", "soft"
    )
    d.text(22, 334, "makes those more likely whose reward is above that of the other samples.", 14.5, "start", "soft")
    d.text(22, 376, "Inference: exit if the policy's probability is above 0.5", 17, "start", "bold")
    policies(d, 402, ("0.2: continue", "0.8: exit", "not run"), ("rule", "exit", "skip"), ("layer", "layer", "skip"))
    return d


def policies(d: Drawing, y: int, words, kinds, segments) -> None:
    """A row of segments with a policy above each."""
    d.box(22, y + 54, INPUT, 46, "sentence", "layer", 15)
    for k in range(3):
        arrow = "skip" if segments[k] == "skip" else "layer"
        d.arrow((segment_x(k) - GAP + (8 if not k else 0), y + 77), (segment_x(k), y + 77), kind=arrow)
        d.box(segment_x(k), y + 54, SEGMENT, 46, LAYERS[k], segments[k], 16)
        d.arrow((middle(k), y + 54), (middle(k), y + 36), kind=arrow)
        d.box(middle(k) - 62, y, 124, 36, words[k], kinds[k], 15)


def calm() -> Drawing:
    """CALM: three confidence measures for tokens, one calibrated threshold."""
    idea = "Each token exits at the first layer where one measure reaches one threshold."
    d = sheet(
        "CALM: tokens exit by confidence",
        idea,
        560,
        ("layer", "layers"),
        ("rule", "measure"),
        ("exit", "exit"),
        ("skip", "not run"),
    )
    d.text(22, 104, "Three confidence measures to choose from", 17, "start", "bold")
    for at, (name, line) in enumerate(
        (
            ("gap", "two most likely tokens"),
            ("saturation", "the state stops changing"),
            ("classifier", "predicts agreement"),
        )
    ):
        x = 22 + 202 * at
        d.box(x, 122, 190, 136, "", "rule")
        d.text(x + 95, 146, name, 17, kind="bold", room=184)
        d.text(x + 95, 246, line, 13.5, room=186)
    for at, (word, width) in enumerate((("night", 74), ("day", 24))):
        d.text(36, 172 + 22 * at, word, 14, "start")
        d.box(86, 161 + 22 * at, width, 14, "", "layer")
    for x, y in ((160, 168), (110, 190)):
        d.arrow((x, y - 9), (x, 214), kind="rule", wide=1.5, tip=False, dashed=True)
    d.arrow((110, 220), (160, 220), kind="rule")
    d.text(168, 225, "gap", 13, "start", "rule")
    d.arrow((268, 208), (372, 174), kind="layer", wide=3)
    d.arrow((268, 208), (380, 192), kind="rule", wide=3)
    d.text(276, 176, "layer 4", 13, "start", "soft")
    d.text(322, 219, "layer 8", 13, "start", "rule")
    d.box(446, 164, 56, 30, "state", "layer", 13)
    d.arrow((502, 179), (522, 179))
    d.box(522, 164, 80, 30, "linear map", "rule", 13)
    d.text(521, 218, "P(agrees with the last exit)", 12.5, kind="soft", room=186)
    d.text(22, 296, "One threshold: every token exits where it is confident", 17, "start", "bold")
    tokens, depths = ("Once", "upon", "a", "time", "there", "was"), (3, 1, 1, 2, 3, 1)
    for layer, name in enumerate(LAYERS):
        y = 404 - 42 * layer
        d.text(22, y + 22, name, 15, "start")
        for at, depth in enumerate(depths):
            kind = "exit" if layer == depth - 1 else "layer" if layer < depth else "skip"
            d.box(124 + 82 * at, y, 72, 32, "exit" if kind == "exit" else "", kind, 14)
    for at, token in enumerate(tokens):
        d.text(160 + 82 * at, 458, token, 15)
    d.text(22, 486, "Calibration bounds how far whole texts may differ from the full model's.", 14.5, "start", "soft")
    d.text(22, 506, "For the layers above an exit, the token's state is copied.", 14.5, "start", "soft")
    return d


def pabee() -> Drawing:
    """PABEE: patience counts equal predictions in a row."""
    idea = "Joint training; exit if consecutive exits make the same prediction."
    d = sheet(
        "PABEE: patience", idea, 352, ("layer", "layers"), ("rule", "counter"), ("exit", "exit"), ("skip", "not run")
    )
    d.text(22, 104, "Exit rule with patience 2", 17, "start", "bold")
    steps = (("negative", "0"), ("positive", "0"), ("positive", "1"), ("positive", "2"), ("", ""), ("", ""))
    for k, (word, count) in enumerate(steps):
        x, y = 24 + 102 * k, 192
        arrow = "layer" if word else "skip"
        d.box(x, y, 82, 46, f"layers\n{2 * k + 1}-{2 * k + 2}", arrow, 14)
        if k:
            d.arrow((x - 20, y + 23), (x, y + 23), kind=arrow)
        if word:
            d.arrow((x + 41, y), (x + 41, y - 18))
            d.box(x, y - 54, 82, 36, word, "exit" if count == "2" else "layer", 14.5)
            d.text(x + 41, y + 72, f"count {count}", 15, kind="rule bold" if count == "2" else "rule")
    d.text(24 + 306 + 92, 160, "exit", 17, "start", "exit bold")
    d.text(22, 296, "The counter starts again at 0 whenever the prediction changes.", 15, "start", "soft")
    return d


def token_exits() -> Drawing:
    """HashEE and TR-BERT: tokens exit within a sentence."""
    idea = "Not the sentence exits, but its tokens: each layer computes fewer of them."
    d = sheet(
        "Tokens that exit within a sentence",
        idea,
        624,
        ("layer", "computed"),
        ("skip", "not computed"),
        ("exit", "exits, state stays"),
        ("cut", "removed"),
    )
    tokens = ("[CLS]", "the", "film", "was", "not", "bad")
    d.text(22, 104, "HashEE: a table decides by the type of the token", 17, "start", "bold")
    token_grid(d, 120, tokens, (6, 1, 3, 1, 4, 5), "exit")
    d.text(22, 318, "Its state stays the same, and other tokens still attend to it.", 15, "start", "soft")
    d.text(22, 358, "TR-BERT: policies after layers 1 and L/2 choose", 17, "start", "bold")
    token_grid(d, 374, tokens, (6, 1, 6, 1, 6, 3), "cut", policies=(1, 3))
    d.text(22, 572, "No token and no head reads it any more. [CLS] always stays.", 15, "start", "soft")
    return d


def token_grid(d: Drawing, y: int, tokens, depths, kind: str, policies=()) -> None:
    """Six layers, from the bottom; kind: the colour of the last layer of a token that exits before the last one."""
    for layer in range(6):
        row = y + 25 * (5 - layer)
        d.text(22, row + 16, f"layer {layer + 1}", 14, "start", "soft")
        for at, depth in enumerate(depths):
            last = layer == depth - 1 and depth < 6
            cell = kind if last else "layer" if layer < depth else "skip"
            d.box(100 + 86 * at, row, 76, 20, "", cell)
    for after in policies:
        row = y + 25 * (6 - after) - 2.5
        d.arrow((94, row), (WIDTH - 20, row), kind="rule", wide=2.5, tip=False, dashed=True)
    for at, token in enumerate(tokens):
        d.text(138 + 86 * at, y + 168, token, 15)


PICTURES = {
    "method-raee": raee,
    "method-consistent": consistent,
    "method-calm": calm,
    "method-pabee": pabee,
    "method-token-exits": token_exits,
}
