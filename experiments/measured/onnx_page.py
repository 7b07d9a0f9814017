"""results/onnx.md: the ONNX graph that stops by itself. onnx_parts.py measures its figures."""

import numpy as np

from mini_ee.experiments.markdown import fold_sections, listed, made_by_measuring, markdown_row, markdown_rows, wrapped
from mini_ee.experiments.measured.onnx_parts import AGREEMENT, EXITS, NEW_TOKENS, PARITY_METHODS, PARTS, PROMPT_WORDS
from mini_ee.experiments.measured.precision import section
from mini_ee.lab.evaluation.row_evaluation import REST

__all__ = ["PAGE_TEXT", "PARTS", "page"]

PAGE_TEXT = """# One ONNX graph that stops by itself

**Does one graph save as much time as it saves layers?** {verdict} The classifier on SST-2 runs {layers} of 6 layers on
average. If time were proportional to layers, it would be {predicted} times as fast as without exits (the ideal
speed-up). In three measurements it was {speedups} times as fast (median {speedup}), with an accuracy of {score}
instead of {full}. The decoder is {decoder_speedup} times as fast, and ideal would be {decoder_ideal}. Both run one
text at a time. Of {rows:,} predictions of exported graphs, {labels:,} are equal to those of torch. In the section
Speed, {passed} of {benched} ratios of times reach their target.

| | mean layers run | ideal speed-up | measured speed-up | quality |
|---|---|---|---|---|
| classifier (MiniLM, SST-2) | {layers} of 6 | {predicted} | {speedup} | accuracy {score}, without exits {full} |
{decoder_row}

`mini-ee export RUN --out DIR` writes the model, its heads and its exit rule as one graph, `model.onnx`. The graph
stops at the exit that the rule chooses; no code around it is needed. [The tutorial](../tutorial.md) shows how to use
it.

{made_by} Machine: {cores} cores, ONNX Runtime {onnxruntime} on the CPU, no GPU. Nothing else ran while times were
measured, except for those of the section on precision, which are processor times.

## Speed

`mini-ee bench onnx --model all-MiniLM-L6-v2 --threads 2` runs the cases of a model in turns, in one process and after a
warm-up. The ratio is the median time of the graph divided by that of the alternative. In the rows `eN graph` and
`mixed graph`, the alternative is a sum or a share of measured times, see below. The target is the largest ratio that
passes.

{missed}Compare times within a row only. The graph of bert-base without early exits has two times: {plain_ms} ms in
`never plain`, and {torch_ms} ms in `torch` and `int8`. For these two, each call follows a pause of {rest} ms, so that
the threads of the other engine are idle; in the other cases of bert-base there is no pause.

| case | graph, ms | alternative, ms | ratio | target (at most) | result |
|---|---|---|---|---|---|
{bench}

A case is named after the model, the batch size (b), the number of tokens (t), the exit layer (e) and the alternative.
`minilm` is all-MiniLM-L6-v2, and `llama-12x256` the built-in decoder. `bert-base` and `stories260k` have the shapes of
these models and random weights.

- `eN graph`: all examples exit after N of L layers, and all heads up to there are evaluated. Alternative: N/L of the
  time of the same graph if no example exits and only the last head is evaluated.
- `never graph`: no example exits early, and all heads are evaluated. Alternative: only the last head is evaluated.
- `never plain`: no example exits early, and only the last head is evaluated. Alternative: the model exported without
  exits.
- `mixed graph`: at each exit, the more confident half of the remaining examples exits. Alternative: the sum of the
  times of the layers alone, at the batch sizes that remain.
- `chain`: the same examples exit. Alternative: one graph per segment (`--segments`), called by a loop in Python.
- `torch`: all layers. Alternative: torch.
- `int8`: all layers with int8 weights. Alternative: the graph with float32 weights.
- `step`: the time per token of a decoder, over 64 tokens after a prompt of 8; half of the tokens reach each
  threshold. Alternative: one graph per segment (`chain`), or `generate` of transformers without exits on the same
  weights (`transformers`). The target of the latter is the share of the layers that are run.

An early exit saves layers only: the embeddings and the heads still have to be computed. In the next table all examples
exit after N of 6 layers. The table shows their time divided by N/6 of the time of the model exported without exits
(MiniLM's shape, random weights, batch size 1). At 1, time falls like the number of layers; embeddings and heads add
to that. The last column is divided by 2/6.

| heads | exit after layer 2 | exit after layer 4 | exit after layer 6 | model of the first two layers with one head |
|---|---|---|---|---|
{heads}

`--head linear` leaves out the dense layer and the tanh of a head. Its effect on the accuracy on TREC (MiniLM, 2,000
training examples, 3 epochs, `joint`):

| heads | accuracy after layer 2 | layer 4 | layer 6 | accuracy with the default rule | mean number of layers |
|---|---|---|---|---|---|
{price}

With LoRAExit, the computation of each exit starts again from the embeddings. So several branches of the graph use the
weights of the backbone. These weights are stored outside of the branches, and ONNX Runtime does not rearrange them in
advance for faster products (it does not *prepack* them). On MiniLM's shape at batch size 1, exits after layers 2, 4 and
6 take {lora} times as long in the graph as with one graph per segment.

## A classifier, end to end

The run is `joint --exits 2,4,6 --max-train 6000 --epochs 3` on SST-2 with MiniLM. It is exported and measured with
`mini-ee evaluate DIR --task SST-2 --batch-size 1 --threads 2`. The accuracy on dev is {score} (full model: {full}),
with {layers} of 6 layers on average. The ideal speed-up is {predicted}. Three measurements gave {speedups}.

## A decoder, end to end

The run is `mini-ee train self-supervised --out R`: the built-in decoder with heads after layers {exits}. Its
thresholds give an agreement of {level} with the full model on text that the decoder generated; on the stories it is
lower, see the table. It continues the first
{words} words of {texts} stories that it was not trained on, one story at a time, by at most {new_tokens} tokens. If a
token exits early, the layers above have no keys and values for it. `copy_state` computes them from the hidden state at
the exit; `recompute` runs the skipped layers later. The speed-up compares with the same engine without exits, on the
first {timed} stories. The ideal one is {deepest} divided by the mean number of layers.

| engine | tokens | agreement with the full model | mean layers, of {deepest} | ideal speed-up | speed-up |
|---|---|---|---|---|---|
{decoder}

For {graph_equal} of the {texts} stories, the graph generates the same tokens as torch, and they exit after the same
layers. Lossless decoding drafts at most four tokens after layer {drafts_after}, as long as the head is confident, and
the full model checks them. For {lossless_equal} of the {texts} stories it generates the text of the full model. The
share of drafts among its tokens is {drafted}.

{precision}
## Equality with torch

MiniLM with exits after layers 2, 4 and 6 was trained by {methods} (400 examples, one epoch). The exported graphs run
in a plain `onnxruntime.InferenceSession` on the dev set of SST-2 and the test set of TREC, with batch sizes 1 and 32.
Of {rows:,} predictions in {cases} cases, {labels:,} have the same label as in torch and {depths:,} the same number of
layers. The logits differ by at most {difference:.1e}.

## Size, memory, time to load

Each model is exported with and without exits. The size on disk is that of the graph and its weights, divided by the
size of the run's safetensors file. Memory is that of a session that has run, in its own process. Private memory
belongs to the process alone. Resident memory also contains the pages of the weights file that stay mapped.

| model | size on disk (relative) | time to load, s | private memory, MB | resident memory, MB |
|---|---|---|---|---|
{memory}
"""


CLOSE = 0.03  # about as much as a ratio differs between two measurements


def digits(values: list[float]) -> list[str]:
    """Each with three decimals."""
    return [f"{value:.3f}" for value in values]


def missed_targets(bench: list[dict]) -> str:
    """A sentence on the ratios that miss their targets; empty if none does."""
    over = sorted(row["ratio"] / row["bar"] - 1 for row in bench if not row["holds"])
    if not over:
        return ""
    close = sum(each < CLOSE for each in over)
    return (
        f"Of {len(over)} ratios that miss their target, {close} miss it by less than {CLOSE:.0%}, and the worst by "
        f"{over[-1]:.0%}. How large a ratio is depends on the processor (it is named at the end of the page). "
    ).replace("%", " %")


def verdict(classifier: tuple[float, float], decoder: tuple[float, float]) -> str:
    """Whether each of the two gains what its layers predict. Pairs: measured speed-up, ideal one."""
    named = {"classifier": classifier, "decoder": decoder}
    gains = [
        f"the {name} {'does' if measured >= (1 - CLOSE) * ideal else 'gains less'}"
        for name, (measured, ideal) in named.items()
    ]
    return f"{'; '.join(gains)}.".capitalize()


def decoder_fields(measured: dict) -> dict:
    """The fields of the template that describe the decoder."""
    *exits, deepest = measured["exits"]
    names = {"early": "torch, `copy_state`", "recompute": "torch, `recompute`"}
    names |= {"graph early": "exported graph, `copy_state`", "lossless": "torch, lossless decoding"}
    rows = []
    for key, name in names.items():
        one = measured[key]
        predicted = "" if key == "lossless" else f"{deepest / one['layers']:.2f}"
        depth = "" if key == "lossless" else f"{one['layers']:.2f}"
        rows.append([name, f"{one['tokens']:,}", f"{one['agreement']:.3f}", depth, predicted, f"{one['speedup']:.2f}"])
    _, _, (_, _, agreement, depth, predicted, speedup), _ = rows
    early = f"{depth} of {deepest}", predicted, speedup, f"agreement with the full model {agreement}"
    return {
        "decoder": markdown_rows(rows),
        "decoder_row": markdown_row(["decoder (built-in, stories)", *early]),
        "exits": listed([str(layer) for layer in exits]),
        "deepest": deepest,
        "level": AGREEMENT,
        "words": PROMPT_WORDS,
        "texts": measured["texts"],
        "timed": measured["timed"],
        "new_tokens": NEW_TOKENS,
        "graph_equal": measured["graph early"]["equal"],
        "drafts_after": measured["exits"][len(measured["exits"]) // 2 - 1],
        "drafted": f"{measured['lossless']['drafted']:.3f}",
        "lossless_equal": measured["lossless"]["equal"],
        "decoder_ideal": predicted,
        "decoder_speedup": speedup,
    }


def page(figures: dict) -> str:
    """results/onnx.md."""
    rows = {"bench": []}
    for row in figures["bench"]:
        times = [f"{row[key] * 1e3:.3f}" for key in ("seconds", "against_seconds")]
        numbers = f"{row['ratio']:.3f}", f"{row['bar']:.3f}"
        rows["bench"].append([f"`{row['case']}`", *times, *numbers, "passed" if row["holds"] else "**missed**"])
    found, end = figures["heads"], figures["end"]
    rows["heads"] = [[kind, *digits(found[kind]), f"{found[f'{kind} alone']:.3f}"] for kind in ("dense", "linear")]
    rows["price"] = [
        [head, *digits(each["per_exit_score"]), f"{each['score']:.3f}", f"{each['mean_layers']:.2f}"]
        for head, each in figures["price"].items()
    ]
    rows["memory"] = [
        [f"{each['model']}, {'with exits' if each['kind'] == 'exits' else 'without exits'}", f"{each['disk']:.3f}"]
        + [f"{each['load']:.2f}", f"{each['private']:.1f}", f"{each['resident']:.1f}"]
        for each in figures["memory"]
    ]
    tables = {name: markdown_rows(lines) for name, lines in rows.items()}
    speedup, decoder = float(np.median([each["speedup"] for each in end])), decoder_fields(figures["decoder"])
    parity, seconds = figures["parity"], {row["case"]: row["seconds"] for row in figures["bench"]}
    text = PAGE_TEXT.format(
        made_by=made_by_measuring("onnx"),
        **tables | {"cores": figures["cores"], "onnxruntime": figures["onnxruntime"]},
        **{"lora": listed(digits(found["lora"])), "methods": listed(list(PARITY_METHODS)), "cases": len(parity)},
        **{"rows": sum(each["rows"] for each in parity), "labels": sum(each["labels"] for each in parity)},
        **{"depths": sum(each["layers"] for each in parity), "difference": max(each["difference"] for each in parity)},
        **{"score": f"{end[0]['score']:.3f}", "full": f"{end[0]['full_score']:.3f}"},
        **{"layers": f"{end[0]['mean_layers']:.2f}", "predicted": f"{EXITS[-1] / end[0]['mean_layers']:.2f}"},
        **decoder,
        verdict=verdict(
            (speedup, EXITS[-1] / end[0]["mean_layers"]),
            (float(decoder["decoder_speedup"]), float(decoder["decoder_ideal"])),
        ),
        plain_ms=f"{1e3 * seconds['bert-base b1 t128 never plain']:.1f}",
        torch_ms=f"{1e3 * seconds['bert-base b1 t128 torch']:.1f}",
        rest=f"{1e3 * REST:g}",
        missed=missed_targets(figures["bench"]),
        precision=section(figures["precision"]),
        **{"passed": sum(row["holds"] for row in figures["bench"]), "benched": len(figures["bench"])},
        speedup=f"{speedup:.2f}",
        speedups=listed([f"{each['speedup']:.2f}" for each in end]),
    )
    return wrapped(fold_sections(text, 0))
