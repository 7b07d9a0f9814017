"""`mini-ee add-exits`: a fine-tuned classifier or a sentence encoder with exits, from text without labels."""

from pathlib import Path

from mini_ee.lab.cli.command_options import add_options, given_options
from mini_ee.lab.cli.task_options import columns_given

HELP = "add exits to a fine-tuned model, from texts without labels; the model itself does not change"
EXAMPLE = "mini-ee add-exits my-classifier --text inputs.txt --out fast"
USUAL = "--out", "--agreement", "--max-loss"


def add(sub) -> None:
    from mini_ee.lab.data.columns import TaskOptions
    from mini_ee.lab.training.train_settings import AddOptions

    sub.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="folder of a fine-tuned model (...ForSequenceClassification, ...ForTokenClassification, "
        "...ForQuestionAnswering) or of a sentence encoder",
    )
    sub.add_argument(
        "--text",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="files of texts like the model's real inputs: one text per line, tagged tokens (.conll), or a table "
        "(.csv, .tsv, .jsonl, .json, .parquet), also with .gz; only --max-loss reads labels",
    )
    sub.add_argument("--out", type=Path, default=Path("fast"), metavar="DIR", help="folder to write")
    add_options(sub, AddOptions)
    add_options(sub.add_argument_group("columns of tables"), TaskOptions, lacks=("regression", "split_file"))


def run(args, say) -> dict:
    """Train, test, export; returns the summary."""
    import mini_ee
    from mini_ee.lab.backbones.fine_tuned import is_sentence_encoder
    from mini_ee.lab.data.files import read_json
    from mini_ee.lab.data.table_files import SUFFIXES, kind_of
    from mini_ee.lab.data.text_files import read_rows
    from mini_ee.lab.data.text_table import table
    from mini_ee.lab.errors import WrongArguments
    from mini_ee.lab.export.add_exits import line_of
    from mini_ee.lab.training.train_settings import AddOptions

    given = given_options(args, AddOptions) | {"seed": args.seed}
    labelled, columns = "max_loss" in given, columns_given(args)
    if columns.label_column and not labelled:
        raise WrongArguments("--label-column is for --max-loss, which alone reads labels; leave it out")
    tables = all(kind_of(path) in SUFFIXES for path in args.text)
    num_texts = 1 if not tables and is_sentence_encoder(args.model) else None
    rows, dropped = read_rows(args.text, columns, num_texts, labelled=labelled, drop=True)
    if dropped:
        say(f"{dropped:,} of {len(rows) + dropped:,} rows are left out: their text is empty.")
    if not tables and len(rows[0].texts) == 2:
        say("Pairs of texts are read, because each line has one tab.")
    texts, labels = (
        [row.texts for row in rows],
        [row.label for row in rows] if labelled else _gold(rows, args.model, say),
    )
    mini_ee.add_exits(args.model, texts, args.out, say=say, labels=labels, **given)
    summary = read_json(args.out / "summary.json")
    summary.pop("sha256", None)
    say(line_of(summary))
    exported = args.out / "exported"
    if "depths" in summary:
        headings = {"layers": "layers", "cosine": "mean cosine:.3f", "low_cosine": "10% below:.3f"}
        say(table(summary["depths"], headings | {"speedup": "times as fast:.2f"}))
        say(f"ONNX: {exported}. Try: mini-ee embed {exported} texts.txt --out embeddings.npy")
    elif summary["pays"]:
        line = r"printf 'A text.\tAnother.\n'" if len(rows[0].texts) == 2 else 'echo "A text."'
        say(f"ONNX: {exported}. Try: {line} | mini-ee run {exported}")
    return summary | {"out": str(args.out)}


def _gold(rows: list, model: Path, say) -> list[list[str]] | None:
    """The gold tags or answers of all rows; None if some have none, or if the model does not label tokens."""
    from mini_ee.lab.backbones.fine_tuned import is_sentence_encoder, label_names, token_kind_of
    from mini_ee.lab.data.files import check_folder
    from mini_ee.lab.evaluation.gold_labels import unknown_tag

    if any(row.gold is None for row in rows):
        return None
    check_folder(model)
    kind = "" if is_sentence_encoder(model) else token_kind_of(model)
    if not kind:
        return None
    gold = [row.gold for row in rows]
    if (tag := unknown_tag(kind, label_names(model), gold)) is not None:
        say(f"The tags of the files are not scored: {tag!r} is none of the model's labels.")
        return None
    return gold
