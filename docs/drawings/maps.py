"""Two maps and a tree: the field with its methods, the rings of this project, and the ways to deploy."""

from drawings.style import Drawing, length

EXAMPLES, BOTH, TOKENS, WITHIN = "layer", "frozen", "exit", "rule"  # in the map of the field, colour is what exits
FIELD = (  # who trains the exits -> who decides -> methods
    (
        "All exits are trained at once, with the model",
        (
            (
                "a threshold",
                (
                    ("joint", BOTH),
                    ("mixed", BOTH),
                    ("sweet", BOTH),
                    ("right-tool", EXAMPLES),
                    ("calm", BOTH),
                    ("free", BOTH),
                ),
            ),
            ("exits in a row", (("pabee", BOTH), ("pcee-bert", BOTH), ("elasticbert", BOTH))),
            ("a trained policy", (("consistent", BOTH), ("berxit", BOTH), ("palbert", EXAMPLES))),
            ("a draft, verified", (("layerskip", BOTH), ("del", TOKENS))),
            ("you: a fixed depth", (("2dmse", EXAMPLES), ("starbucks", EXAMPLES), ("one-depth", EXAMPLES))),
        ),
    ),
    (
        "First the model; its exits learn when it is frozen",
        (
            (
                "a threshold",
                (
                    ("two-stage", BOTH),
                    ("deebert", BOTH),
                    ("fastbert", BOTH),
                    ("self-supervised", BOTH),
                    ("balcony", TOKENS),
                ),
            ),
            ("exits in a row", (("dree", EXAMPLES),)),
            ("a trained module", (("cat", EXAMPLES), ("adainfer", BOTH), ("cosine-predictor", EXAMPLES))),
            ("nearest neighbours", (("raee", EXAMPLES),)),
            ("you: a fixed depth", (("embedding-maps", EXAMPLES),)),
        ),
    ),
    (
        "Each exit has weights of its own",
        (("a threshold", (("lora-exits", EXAMPLES), ("multi-model", EXAMPLES))),),
    ),
    (
        "No heads are added: tokens or layers are removed",
        (
            ("a table of tokens", (("hashee", WITHIN),)),
            ("a trained policy", (("tr-bert", WITHIN),)),
            ("a search for layers", (("sleb", TOKENS),)),
        ),
    ),
)
RINGS = (  # from the outside: folder, what it does, colour
    ("serve/", "an HTTP server, bulk jobs, replicas on Ray", "exit"),
    ("lab/", "other methods and models, runs, the command mini-ee", "store"),
    ("export/", "BERT as one ONNX graph; a runtime without torch", "frozen"),
    ("mini_ee/", "the core: four papers, and what they need", "panel"),
)
CORE = (  # rows of the core from the top: what they do -> files, and their colour
    ("papers, a script each", ("lora_exits.py", "self_supervised.py", "raee.py", "consistent.py"), "train"),
    ("train, calibrate", ("train.py", "calibrate.py"), "train"),
    ("models", ("bert.py", "llama.py"), "layer"),
    ("texts, weights", ("data.py", "load.py"), "layer"),
    ("early exit", ("loop.py", "rules.py"), "rule"),
)
TREE = (  # question, answer if yes, its command
    ("Does it run in a web page?", "Browser", "mini-ee export RUN --web --out DIR", "nothing is sent to a server"),
    (
        "One text at a time, in your own program?",
        "CPU at batch size 1",
        "mini-ee export RUN --out DIR",
        "model.onnx stops by itself",
    ),
    ("Is one process fast enough?", "Batches in one server", "mini-ee serve DIR", "one graph is enough on a CPU"),
)


def map_of_the_field() -> Drawing:
    """Every method of the registry, by who trains its exits and who decides."""
    description = "Every method of mini_ee, by how its exits are trained and by who decides when to stop."
    d = Drawing("Map of the field", description, 640, 913)
    d.text(22, 38, d.title, 21, "start", "bold")
    d.text(22, 64, "How are exits trained, and who decides? Names are those of mini-ee train.", 15, "start", "soft")
    y = 84
    for trained, deciders in FIELD:
        y += 20
        d.text(22, y, trained, 17, "start", "bold")
        y += 14
        for who, methods in deciders:
            d.text(34, y + 21, who, 15, "start", "soft", room=164)
            x = 200
            for name, kind in methods:
                width = length(name, 15.5) + 22
                if x + width > 626:
                    x, y = 200, y + 37
                d.box(x, y, width, 31, name, kind, 15.5)
                x += width + 8
            y += 37
        y += 8
    d.text(22, y + 18, "What exits:", 14, "start", "soft")
    d.legend(106, y + 18, (EXAMPLES, "an example"), (BOTH, "an example, or a token of a text"))
    d.legend(106, y + 42, (TOKENS, "a token of a text"), (WITHIN, "a token within an example"))
    assert y + 60 <= d.height, y
    return d


def map_of_the_house() -> Drawing:
    """The four rings, each with those inside it, and the files of the core."""
    description = "The core mini_ee/ with its twelve files; around it export/, around that lab/, and outside serve/."
    d = Drawing("Map of the house", description, 640, 526)
    d.text(22, 38, d.title, 21, "start", "bold")
    d.text(22, 64, "Four rings. Imports go inwards; a ring works without those around it.", 15, "start", "soft")
    for at, (folder, does, kind) in enumerate(RINGS):
        x, y = 22 + 18 * at, 80 + 44 * at
        d.box(x, y, 640 - 2 * x, 506 - y - 14 * at, "", kind)
        d.text(x + 14, y + 28, folder, 16, "start", "mono")
        d.text(x + 110, y + 28, does, 15, "start", "soft", room=640 - 2 * x - 116)
    y = 80 + 44 * len(RINGS) - 2
    for does, files, kind in CORE:
        d.text(90, y + 20, does, 14, "start", "soft", room=150)
        for at, file in enumerate(files):
            d.box(244 + 158 * (at % 2), y + 34 * (at // 2), 150, 28, "", kind)
            d.text(319 + 158 * (at % 2), y + 19 + 34 * (at // 2), file, 13, kind="mono", room=146)
        y += 34 * (len(files) // 2)
    assert y < 506 - 14 * (len(RINGS) - 1), y
    return d


def decision_tree() -> Drawing:
    """Which way to deploy."""
    description = "Four ways to deploy a run, and the questions that choose between them."
    d = Drawing("Where will it run?", description, 640, 462)
    d.text(22, 38, d.title, 21, "start", "bold")
    d.text(22, 64, "Ask the questions from top to bottom; take the first yes.", 15, "start", "soft")
    for at, (question, answer, command, note) in enumerate(TREE):
        y = 88 + 96 * at
        words = question if length(question, 15.5) < 190 else _two_lines(question)
        d.box(22, y, 206, 66, words, "rule", 15.5)
        d.arrow((228, y + 33), (282, y + 33), kind="exit")
        d.text(252, y + 26, "yes", 15, kind="exit bold")
        leaf(d, 282, y, answer, command, note)
        d.arrow((125, y + 66), (125, y + 96), kind="rule", tip=at + 1 < len(TREE))
        d.text(140, y + 86, "no", 15, "start", "rule bold")
    y = 88 + 96 * len(TREE)
    d.arrow((125, y), (125, y + 33), (282, y + 33), kind="rule")
    leaf(d, 282, y, "Replicas on Ray", "mini-ee serve DIR --ray", "--replicas 2, or 1-4 as the load needs")
    return d


def leaf(d: Drawing, x: int, y: int, answer: str, command: str, note: str) -> None:
    """One way to deploy."""
    d.box(x, y, 336, 66, "", "exit")
    d.text(x + 14, y + 21, answer, 16, "start", "bold")
    d.text(x + 14, y + 40, command, 14.5, "start", "mono", room=320)
    d.text(x + 14, y + 58, note, 14, "start", "soft", room=320)


def _two_lines(words: str) -> str:
    """The words on two lines of about the same length."""
    spaces = [at for at, letter in enumerate(words) if letter == " "]
    middle = min(spaces, key=lambda at: abs(at - len(words) / 2))
    return f"{words[:middle]}\n{words[middle + 1 :]}"


PICTURES = {
    "map-of-the-field": map_of_the_field,
    "map-of-the-house": map_of_the_house,
    "decision-tree": decision_tree,
}
