"""results/onnx.md: the graph that stops by itself. onnx_parts.py measures what the page shows."""

from mini_ee.experiments.markdown import made_by_measuring, markdown_rows, wrapped
from mini_ee.experiments.measured.onnx_parts import BEGINNING, EXITS, LEVEL, METHODS, NEW_TOKENS, PARTS

__all__ = ["PAGE_TEXT", "PARTS", "page"]

PAGE_TEXT = """# One ONNX graph that stops by itself

`mini-ee export RUN --out DIR` writes `model.onnx`: see [tutorial.md](../tutorial.md), section 4.

{made_by} On {cores} cores of a shared machine, ONNX Runtime {onnxruntime} on the CPU; no GPU was at hand.

## Speed

`mini-ee bench onnx --model all-MiniLM-L6-v2 --threads 2`: ratios of what runs in turns in one process, warm, medians.
The rows of llama-12x256 are of a later run than the others.

| case | ms | against, ms | ratio | bar | |
|---|---|---|---|---|---|
{bench}

A case is a model, the batch (b), the tokens (t), the layer of an exit (e), and what is compared. The ratio is the first
time over the second:

- `eN graph`: all rows leave after N of L layers, and heads on the way are read; over N/L of the graph that reads no
  head on the way.
- `never graph`: all heads are read and nobody leaves; over the graph that reads no head on the way.
- `never plain`: the graph that reads no head on the way; over the model exported without exits.
- `mixed graph`: the surer half of the rows leaves at each exit; over the sum of its layers' times at the batch sizes
  that are left.
- `chain`: the one graph; over graphs by segment (`--segments`), which the loop drives from Python.
- `step`: a token of a decoder, of 64 behind a prompt of 8, half of which reach each threshold; over graphs by segment,
  or over transformers' `generate` without exits on the same weights, where the bar is the share of the layers run.

An exit costs its layers, the embeddings and the heads. On MiniLM at batch 1, the time to leave after N layers, over
N/6 of the time of the model exported without exits:

| heads | after 2 | after 4 | after 6 | the first two layers alone, one head |
|---|---|---|---|---|
{heads}

What `--head linear`, which leaves out the head's dense layer and tanh, costs on TREC (MiniLM, 2,000 rows, 3 epochs,
`joint`):

| heads | after 2 | after 4 | after 6 | the default rule | layers |
|---|---|---|---|---|---|
{price}

LoRA exits restart each stream in the graph; their backbone's weights are used in several branches, stand outside of
them, and are not prepacked for them: on MiniLM at batch 1 leaving at layers 2, 4 and 6 takes {lora} of the graphs by
segment.

## End to end

`joint --exits 2,4,6 --max-train 6000 --epochs 3` on SST-2 with MiniLM, exported, `mini-ee evaluate DIR --task SST-2
--batch-size 1 --threads 2`: accuracy {score} on dev (full model {full}), {layers} layers of 6. The layers predict
{predicted} times the speed; measured {speedups}.

## A decoder, end to end

The built-in decoder with heads after layers {exits} by `mini-ee train self-supervised --out R`, under thresholds at
which {level} of the tokens of texts that it wrote agree with the full model. It goes on from the first {words} words of
{texts} stories that it was not trained on, a text at a time, by {new_tokens} tokens at most. The speed-up is over the
same engine without exits, timed on the first {timed} of them:

| | tokens | the full model's | layers of {deepest} | predicted | measured |
|---|---|---|---|---|---|
{decoder}

In {graph_equal} of the {texts} texts the graph writes torch's tokens and leaves after torch's layers. Lossless
decoding drafts after layer {drafts_after}, four tokens at most and while the head is sure, writes the full model's text
in {lossless_equal} of the {texts}, and {drafted} of its tokens were drafts.

## Parity

MiniLM with exits after 2, 4 and 6 under {methods} (400 rows, one epoch), SST-2's dev and TREC's test, batches of 1 and
of 32, plain `onnxruntime.InferenceSession`, {cases} cases: of {rows:,} answers {labels:,} have torch's label and
{depths:,} its layers; logits are within {difference:.1e}.

## Size, memory, time to load

A model with exits beside the same without; a session that has run, in a process of its own; resident are also the pages
of the weights' file that stay mapped for the branches.

| | on disk, of its safetensors | loads in, s | private, MB | resident, MB |
|---|---|---|---|---|
{memory}
"""


def digits(values: list[float]) -> list[str]:
    """Three of each."""
    return [f"{value:.3f}" for value in values]


def listed(values: list[str]) -> str:
    """With commas, and `and` before the last."""
    return ", ".join(values[:-1]) + f" and {values[-1]}"


def decoder_words(measured: dict) -> dict:
    """What the template has of the decoder."""
    *exits, deepest = measured["exits"]
    names = {"early": "torch, gaps filled by `copy_state`", "recompute": "torch, gaps filled by `recompute`"}
    names |= {"graph early": "the exported graph, `copy_state`", "lossless": "torch, lossless"}
    rows = []
    for key, name in names.items():
        one = measured[key]
        predicted = "" if key == "lossless" else f"{deepest / one['layers']:.2f}"
        depth = "" if key == "lossless" else f"{one['layers']:.2f}"
        rows.append([name, f"{one['tokens']:,}", f"{one['agreement']:.3f}", depth, predicted, f"{one['speedup']:.2f}"])
    return {
        "decoder": markdown_rows(rows),
        "exits": listed([str(layer) for layer in exits]),
        "deepest": deepest,
        "level": LEVEL,
        "words": BEGINNING,
        "texts": measured["texts"],
        "timed": measured["timed"],
        "new_tokens": NEW_TOKENS,
        "graph_equal": measured["graph early"]["equal"],
        "drafts_after": measured["exits"][len(measured["exits"]) // 2 - 1],
        "drafted": f"{measured['lossless']['drafted']:.3f}",
        "lossless_equal": measured["lossless"]["equal"],
    }


def page(figures: dict) -> str:
    """results/onnx.md."""
    rows = {"bench": []}
    for row in figures["bench"]:
        times = [f"{row[key] * 1e3:.3f}" for key in ("seconds", "against_seconds")]
        numbers = f"{row['ratio']:.3f}", f"{row['bar']:.3f}"
        rows["bench"].append([f"`{row['case']}`", *times, *numbers, "holds" if row["holds"] else "**missed**"])
    found, end = figures["heads"], figures["end"]
    rows["heads"] = [[kind, *digits(found[kind]), f"{found[f'{kind} alone']:.3f}"] for kind in ("dense", "linear")]
    rows["price"] = [
        [head, *digits(each["per_exit_score"]), f"{each['score']:.3f}", f"{each['mean_layers']:.2f}"]
        for head, each in figures["price"].items()
    ]
    rows["memory"] = [
        [f"{each['model']}, {'with exits' if each['kind'] == 'exits' else 'without'}", f"{each['disk']:.3f}"]
        + [f"{each['load']:.2f}", f"{each['private']:.1f}", f"{each['resident']:.1f}"]
        for each in figures["memory"]
    ]
    tables = {name: markdown_rows(lines) for name, lines in rows.items()}
    parity = figures["parity"]
    text = PAGE_TEXT.format(
        made_by=made_by_measuring("onnx"),
        **tables | {"cores": figures["cores"], "onnxruntime": figures["onnxruntime"]},
        **{"lora": listed(digits(found["lora"])), "methods": listed(list(METHODS)), "cases": len(parity)},
        **{"rows": sum(each["rows"] for each in parity), "labels": sum(each["labels"] for each in parity)},
        **{"depths": sum(each["layers"] for each in parity), "difference": max(each["difference"] for each in parity)},
        **{"score": f"{end[0]['score']:.3f}", "full": f"{end[0]['full_score']:.3f}"},
        **{"layers": f"{end[0]['mean_layers']:.2f}", "predicted": f"{EXITS[-1] / end[0]['mean_layers']:.2f}"},
        **decoder_words(figures["decoder"]),
        speedups=listed([f"{each['speedup']:.2f}" for each in end]),
    )
    return wrapped(text)
