"""`mini-ee classify`: one sentence through the exits."""

from pathlib import Path

HELP = "predict the label of one sentence at every exit"
EXAMPLE = 'mini-ee classify mini-ee-demo/run --text "I loved every minute of it."'
SCHEDULES = ("restart", "parallel", "adaptive")  # of LoRA streams


def add(sub) -> None:
    from mini_ee.cli.rule_options import add_own, add_rule

    sub.add_argument("run", type=Path, metavar="RUN_OR_EXPORTED", help="folder of a run or of an export")
    sub.add_argument("--text", required=True, help="sentence to classify")
    sub.add_argument("--text-b", help="second sentence, if the task has pairs")
    add_where(sub)
    add_rule(sub)
    add_own(sub)


def add_where(sub, device: bool = True, schedules: bool = True) -> None:
    """Where a run's parts are and what computes; said here without torch, opened in cli/open.py."""
    sub.add_argument("--model", type=Path, metavar="DIR", help="folder of the run's backbone, if it moved")
    if device:
        sub.add_argument("--device", default="cpu", help="device: cpu, cuda, cuda:1, ...")
    if schedules:
        sub.add_argument(
            "--schedule", choices=SCHEDULES, help="streams of lora-exits that start together (default restart)"
        )


def run(args, say) -> dict:
    """What every exit says of one text, and where it left."""
    import numpy as np

    from mini_ee.cli.open import of_rows, open_trained
    from mini_ee.cli.rule_options import chosen_rule
    from mini_ee.confidence import log_softmax, max_probability
    from mini_ee.early_exit import early_exit
    from mini_ee.errors import WrongArguments
    from mini_ee.evaluation.tables import table
    from mini_ee.recording import read_every_exit
    from mini_ee.training.training_text import checked_prompt

    given = (("--text", args.text), ("--text-b", args.text_b))
    text = tuple(checked_prompt(some, name, "a sentence") for name, some in given if some is not None)
    trained = open_trained(args.run, args)
    if not of_rows([trained]):
        raise WrongArguments(f"{args.run}: holds a decoder, which gives no labels; it is for `mini-ee generate`")
    rule = chosen_rule(args, trained)
    expected = trained.config["task"]["texts"]
    if len(text) != expected:
        advice = "give the second one with --text-b" if expected == 2 else "leave out --text-b"
        raise WrongArguments(f"{args.run}: was trained on rows of {expected} texts, found {len(text)}; {advice}")
    encoded, names = trained.encode([text]), trained.label_names
    inputs, segments = encoded.batch(np.arange(1)), trained.segments()
    logits, *_ = read_every_exit(segments, inputs)
    result = early_exit(segments, rule, inputs)
    words = list(trained.config.get("prompt", {}).get("words", {}).values())

    def said(some: np.ndarray) -> dict:
        if not names:
            return {"label": float(some[0])}
        return {"label": names[int(some.argmax())], "confidence": float(max_probability(some[None])[0])}

    rows = []
    for layer, some in zip(segments.exits, logits[0]):
        row = {"layer": layer, **said(some), "left_here": layer == int(result.layers_run[0])}
        if words:
            row["words"] = dict(zip(words, np.exp(log_softmax(some[None])[0]).tolist()))
        rows.append(row)
    shown = [row | row.get("words", {}) | {"left_here": "<- left here" if row["left_here"] else ""} for row in rows]
    headings = {"layer": "layer", "label": "label"} | ({"confidence": "confidence:.3f"} if names and not words else {})
    say(table(shown, headings | {word: f"{word}:.3f" for word in words} | {"left_here": " "}))
    layers, depth = int(result.layers_run[0]), result.cost.depth[0].item()
    if encoded.truncated:
        say(f"the text was cut to {trained.tokenizer.max_length} tokens")
    answer = {
        "method": trained.config["method"],
        "text": args.text,
        **said(result.logits[0]),
        "exit": int(result.exit_index[0]),
        "layers": layers,
        "exits": list(segments.exits),
        "layers_saved": 1 - depth / segments.exits[-1],
        "rows": rows,
        "rule": rule.to_dict(),
        "rows_truncated": encoded.truncated,
    }
    say(f"{answer['label']}, after {depth:.4g} of {segments.exits[-1]} layers")
    return answer
