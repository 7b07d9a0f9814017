"""The decoders' section of the leaderboard, from their records: tables, intervals and a picture, in seconds."""

import math
from collections import Counter
from pathlib import Path

import numpy as np

from mini_ee.experiments.leaderboard.decoders import DecoderExam, trainings
from mini_ee.experiments.leaderboard.ranking import (
    LEAST_SEEDS,
    Drawn,
    Interval,
    better_pairs,
    has_interval,
    interval,
)
from mini_ee.experiments.leaderboard.tables import NO_INTERVAL, percent, plus_minus
from mini_ee.experiments.leaderboard.token_figures import Decoders, Figures, drawn, drawn_figures
from mini_ee.experiments.leaderboard.token_rules import LEVEL, LEVELS, SHARE, WITHIN
from mini_ee.experiments.markdown import folded, listed, markdown_table, wrapped
from mini_ee.experiments.pictures import CYCLE, GREY
from mini_ee.lab.backbones.hub import BUILT_IN_DECODER
from mini_ee.lab.evaluation.plots import can_draw, new_panels, save_figure
from mini_ee.lab.exits.decoding import MISSING_KV

PICTURE = "leaderboard-decoders.png"
NO_RULE = "–"
MADE = ("processor", "torch", "commit")
COPIED, RECOMPUTED = MISSING_KV


# ---- The section ----


def decoder_section(out: Path, run: Decoders, quick: bool) -> list[str]:
    """Markdown lines of the section, without its heading; writes its picture into `out`."""
    if not run:
        return ["Not run yet.", ""]
    lines = [*_paragraphs(_pays(run)), *_paragraphs(INTRODUCTION)]
    if can_draw():
        out.mkdir(parents=True, exist_ok=True)
        draw_saved(out / PICTURE, run)
        lines += [f"![{CAPTION}]({PICTURE})", "", f"*{CAPTION}.*", ""]
    for exam, found in run.items():
        lines += [f"### {exam.name}", "", *_paragraphs(_about(exam, found)), *_paragraphs(_answer(exam, found))]
        lines += _main_table(exam, found, quick)
        lines += folded("Agreement by exit, and other levels", _levels_table(exam, found))
        lines += folded("Missing keys and values: both fills", _fills_table(found))
        lines += folded("Lossless decoding", _lossless_table(found))
        lines += folded("Rates and cost", _cost_table(found))
    return lines


CAPTION = (
    "Layers saved on new text at 90 % agreement with the full model (dots, 95 % interval), FLOPs saved with the heads "
    "(circles), and decoding time saved, 1 - 1 / speed-up"
)
AT_LEVEL, WITH_SHARE = f"{100 * LEVEL:g} % agreement", f"{100 * SHARE:g} % of the layers"
INTRODUCTION = f"""Here the tokens of a decoder exit. All methods learn from the same texts in as many epochs. The
learning rates lr (of the decoder) and head_lr (of the heads) come from one grid. We train each pair with the first seed
and measure its perplexity on calibration text with at most {WITH_SHARE}. All seeds use the pair with the lowest one.

A row shows the rule of the method that saves most layers on calibration text among those with {AT_LEVEL} there.
*Agreement* is the share of tokens whose prediction is that of the method's own full model. A method without rules of
its own has a threshold for each exit, on the gap between the two most probable tokens. If no rule qualifies with a
seed, the full model counts. {NO_RULE}: no rule qualifies with any seed.

Layers, FLOPs, agreement and perplexity are of given text: each token is predicted after the tokens that the text has.
Speed-up and Rouge-L are of text that the decoder writes itself, greedily, after the beginning of a text. If a method
writes other text, the two can differ.

*FLOPs saved* counts heads: each exit that a token passes costs one product with the whole vocabulary. Time saved can be
smaller still, because rules and the missing keys and values take time, too. A token that exits has no keys and values
in the layers above, which later tokens need. With *{COPIED}*, they are computed from its state at the exit. With
*{RECOMPUTED}*, the layers above run on it later, which gives the keys and values of the full model.

A method that trains the decoder changes the full model, and agreement does not show whether that became worse. So
compare perplexities: of the full model, with the rule, and with the method's best rule that runs at most {WITH_SHARE}
(it may be a fixed depth).

*Speed-up* is processor time without exits divided by that with exits, one text at a time. Tokens per second depend on
the machine, so records have this ratio alone. Intervals are over seeds and texts, those of speed-ups over seeds only;
{NO_INTERVAL}: fewer than {LEAST_SEEDS} seeds, which is too few for an interval."""


def _paragraphs(text: str) -> list[str]:
    return [*wrapped(text).splitlines(), ""]


def _pays(run: Decoders) -> str:
    """For each decoder: how many methods save time, the fastest one, and the one that predicts text best."""
    text = "**Which method for a decoder, and does it save time?**"
    for exam, found in run.items():
        speeds = {
            (name, fill): one
            for fill in MISSING_KV
            for name, one in drawn_figures(exam, found, f"speed-up {fill}").items()
        }
        if not speeds:
            text += f" On {exam.name}, no method has a rule."
            continue
        (name, fill), _ = max(speeds.items(), key=lambda item: item[1].mean)
        before, after = (math.exp(-found[name].values[f"ln p {rule}"].mean()) for rule in ("full", f"{LEVEL:g}"))
        faster = {name for (name, _), one in speeds.items() if has_interval(one) and interval(one).low > 1}
        which = f"{len(faster) or 'none'} of {len({name for name, _ in speeds})} methods"
        text += (
            f" On {exam.name}, {which} {'is' if len(faster) < 2 else 'are'} shown to be faster than decoding without "
            f"exits (by the 95 % interval of the speed-up, with the better of two ways to get missing keys and "
            f"values). The highest speed-up is that of `{name}`: {_speed(speeds[name, fill])} with {fill}; its "
            f"perplexity goes from {before:.2f} to {after:.2f}.{_predicts_best(exam, found)}"
        )
    return text


def _predicts_best(exam: DecoderExam, found: dict[str, Figures]) -> str:
    """The method with the lowest perplexity if part of the layers run."""
    drawn_of = {name: one for name, each in found.items() if (one := drawn(each, f"ln p {WITHIN}", exam.folder))}
    if not drawn_of:
        return ""
    name = max(drawn_of, key=lambda each: drawn_of[each].mean)
    return f" With at most {WITH_SHARE}, `{name}` has the lowest perplexity: {math.exp(-drawn_of[name].mean):.2f}."


def _about(exam: DecoderExam, found: dict[str, Figures]) -> str:
    """The model and the texts."""
    layers = next(iter(found.values())).exits[-1]
    model = exam.weights or f"the built-in decoder, weights/{BUILT_IN_DECODER.name}"
    texts = exam.text.partition("/")[0] if exam.text else "texts that it generates"
    return (
        f"The model is {model}, with {layers} layers. It learns from {exam.texts:,} texts ({texts}); figures are of "
        f"{exam.recorded_texts} other texts for each seed, {exam.new_tokens} tokens each."
    )


def _answer(exam: DecoderExam, found: dict[str, Figures]) -> str:
    """Which method saves most layers, and what its heads cost; which one saves most FLOPs, and how good it is."""
    layers, flops = (drawn_figures(exam, found, f"{kind} {LEVEL:g}") for kind in ("saved", "FLOPs"))
    if not (name := _best(layers)):
        return f"No method saves layers at {AT_LEVEL}."
    cost = -flops[name].mean
    its = (
        f"needs {percent(cost)} % more FLOPs than its full model" if cost > 0 else f"saves {percent(-cost)} % of FLOPs"
    )
    text = _most(layers, name, f"layers at {AT_LEVEL}") + f" With its heads, it {its}. "
    if not (name := _best(flops)):
        return text + "No method saves FLOPs with these rules."
    full, original = math.exp(-found[name].values["ln p full"].mean()), _before_training(found)
    text += _most(flops, name, "FLOPs with these rules")
    return text + f" The perplexity of its full model is {full:.2f}; before any training it was {original:.2f}."


def _before_training(found: dict[str, Figures]) -> float:
    """The perplexity of the decoder before any training."""
    return float(np.mean([about["original"]["perplexity"] for each in found.values() for about in each.abouts]))


def _best(drawn_of: dict[str, Drawn]) -> str | None:
    """The method that saves most; None if none saves anything."""
    name = max(drawn_of, key=lambda each: drawn_of[each].mean)
    return name if drawn_of[name].mean > 0 else None


def _most(drawn_of: dict[str, Drawn], name: str, what: str) -> str:
    """How much the best method saves, and which others are not shown to save less."""
    saved = {each: one for each, one in drawn_of.items() if one.mean > 0}
    text = f"`{name}` saves the most {what}: {plus_minus(interval(saved[name]))} %."
    if not has_interval(saved[name]):
        return text + f" With fewer than {LEAST_SEEDS} seeds no method is called better than another."
    worse = {worse for better, worse in better_pairs(saved) if better == name}
    similar = [each for each in sorted(saved, key=lambda each: -saved[each].mean) if each != name and each not in worse]
    if not similar:
        return text + " All others save significantly less (Holm's correction over all pairs)."
    return text + f" Not shown to save less: {', '.join(similar)} (Holm's correction over all pairs)."


def _order(found: dict[str, Figures]) -> list[str]:
    """The methods, those first that save most layers."""
    return sorted(found, key=lambda name: -found[name].values[f"saved {LEVEL:g}"].mean())


def _main_table(exam: DecoderExam, found: dict[str, Figures], quick: bool) -> list[str]:
    names = ["method", "layers saved, %", "FLOPs saved, %", "agreement, %", "perplexity"]
    names += [
        "perplexity of the full model",
        f"perplexity with {WITH_SHARE}",
        *(f"speed-up, {fill}" for fill in MISSING_KV),
        "Rouge-L",
        "seeds",
    ]
    rows = []
    for name in _order(found):
        each, own = found[name], {}
        kinds = ("saved", "FLOPs", "agreement", "ln p")
        for figure in (*(f"{kind} {LEVEL:g}" for kind in kinds), "ln p full", f"ln p {WITHIN}"):
            one = drawn(each, figure, exam.folder)
            own[figure] = None if one is None else interval(one)
        cells = [plus_minus(own[figure]) if each.saves else NO_RULE for figure in [*own][:3]]
        cells += [_perplexity(own[f"ln p {LEVEL:g}"]) if each.saves else NO_RULE, _perplexity(own["ln p full"])]
        cells += [
            _perplexity(own[f"ln p {WITHIN}"]),
            *(_speed(drawn(each, f"speed-up {fill}", exam.folder)) for fill in MISSING_KV),
        ]
        rows.append([name, *cells, _share(each.decoding(COPIED, "rouge_l")), len(each.seeds)])
    every = [name for training in trainings(quick) if training.exam == exam for name in training.methods]
    missing = [name for name in every if name not in found]
    heads = np.mean([each.head_layers for each in found.values()])
    note = f"One head costs as many FLOPs as {heads:.2g} layers. "
    note += f"The decoder before any training has a perplexity of {_before_training(found):.2f} on these texts. "
    note += f"Rouge-L (0 to 100) compares generated text with that of the full model, with {COPIED}."
    if without_savings := [name for name in found if not found[name].saves]:
        note += f" {listed(without_savings)} saves no layers: with every seed, all rules that skip a layer have less "
        note += f"than {AT_LEVEL} on calibration text."
    note += f" Not run yet: {listed(missing)}." if missing else ""
    return [*markdown_table(names, rows), "", *_paragraphs(note)]


def _levels_table(exam: DecoderExam, found: dict[str, Figures]) -> list[str]:
    names = [
        "method",
        "agreement after each exit, %",
        *(f"layers saved at {100 * level:g} % agreement, %" for level in LEVELS),
    ]
    rows = []
    for name in _order(found):
        each = found[name]
        exits = zip(each.exits[:-1], each.agreement.mean(axis=0))
        by_exit = ", ".join(f"layer {layer}: {percent(share)}" for layer, share in exits)
        saved = [drawn(each, f"saved {level:g}", exam.folder) for level in LEVELS]
        rows.append([name, by_exit, *(plus_minus(interval(one)) if one and one.mean else NO_RULE for one in saved)])
    return [*markdown_table(names, rows), ""]


def _fills_table(found: dict[str, Figures]) -> list[str]:
    """Agreement of generated tokens, Rouge-L and speed with both fills, and their gaps."""
    names = ["method", *(f"agreement while writing, {fill}, %" for fill in MISSING_KV), "gap, points"]
    names += [*(f"Rouge-L, {fill}" for fill in MISSING_KV), f"time of {RECOMPUTED} / time of {COPIED}"]
    rows = []
    for name in _order(found):
        agreement, rouge, speed = (
            [found[name].decoding(fill, figure) for fill in MISSING_KV]
            for figure in ("agreement", "rouge_l", "speedup")
        )
        gap = NO_RULE if None in agreement else f"{100 * (agreement[1] - agreement[0]):.1f}"
        time = NO_RULE if None in speed else f"{speed[0] / speed[1]:.2f}"
        rows.append([name, *map(_share, agreement), gap, *map(_share, rouge), time])
    note = "Agreement while writing: the share of the written tokens that the full model predicts after the same text."
    return [*_paragraphs(note), *markdown_table(names, rows), ""]


def _lossless_table(found: dict[str, Figures]) -> list[str]:
    """A line per training, because the rule has no part in it."""
    rows, seen = [], []
    for name, each in found.items():
        if each.abouts in seen or each.lossless("speedup") is None:
            continue
        seen.append(each.abouts)
        layers = sorted({about["lossless"]["layer"] or "chosen for each draft" for about in each.abouts})
        equal, drafted = each.lossless("equal_texts"), each.lossless("drafted")
        cells = [", ".join(map(str, layers)), _share(drafted), _share(equal), _times(each.lossless("speedup"))]
        rows.append([f"{name}, lossless", *cells])
    rows.sort(key=lambda row: -float(row[-1][:-1]))
    note = """The text is that of the full model: an exit drafts tokens, and the layers above verify them in one block
    (`mini-ee generate --lossless`). For each seed, we draft with the exit that saves the most layers on calibration
    text; if seeds choose different exits, the column lists them all.
    *accepted tokens*: the share of the generated tokens that the exit drafted and the full model accepted. Methods
    that share a training share a row."""
    if one_exit := [name for name, each in found.items() if each.lossless("speedup") is None]:
        note += f" No exit can draft, so there is no row: {listed(one_exit)}."
    names = ["method", "drafts after layer", "accepted tokens, %", "texts equal to the full model's, %", "speed-up"]
    return [*_paragraphs(" ".join(note.split())), *markdown_table(names, rows), ""]


def _cost_table(found: dict[str, Figures]) -> list[str]:
    """The rates and the processor seconds of each training, and the hours of all."""
    rows, seen = [], []
    for name, each in found.items():
        if each.abouts in seen:
            continue
        seen.append(each.abouts)
        sharing = ", ".join(other for other, figures in found.items() if figures.abouts == each.abouts)
        rates = ", ".join(f"{key} {rate:g}" for key, rate in each.abouts[0]["rates"].items())
        training = [about["cpu_seconds"]["training"] for about in each.abouts if "gpu" not in about["how"]]
        seconds = f"{np.mean(training):.0f}" if training else "on a GPU"
        decoding = f"{each.mean(lambda about: about['cpu_seconds']['decoding']):.0f}"
        agreement = each.mean(lambda about: about["original"]["agreement"])
        rows.append([sharing, rates or "none", _share(agreement), seconds, decoding])
    names = ["trained once", "rates", "full model agrees with the original, %", "training, s", "measuring decoding, s"]
    seconds = "The table gives processor seconds of one seed, for trainings on the CPU alone."
    note = " ".join(filter(None, (_at_an_end(seen), seconds, _hours(seen), _made(seen))))
    return [*_paragraphs(note), *markdown_table(names, rows), ""]


def _at_an_end(seen: list[list[dict]]) -> str:
    """In how many searches the smallest or the largest of the tried pairs of rates was chosen; empty if in none."""
    searches = [(about["rates"], [each["rates"] for each in about["tried"]]) for about, *_ in seen]
    searches = [(rates, tried) for rates, tried in searches if len(tried) > 1]
    text = []
    for name, end in (("smallest", 0), ("largest", -1)):
        if count := sum(rates == tried[end] for rates, tried in searches):
            text.append(
                f"In {count} of {len(searches)} searches the {name} of the tried pairs of rates is chosen, so "
                f"a still {name.replace('est', 'er')} one might be better."
            )
    return " ".join(text)


def _hours(seen: list[list[dict]]) -> str:
    """The processor hours of all seeds, of trainings on the CPU and on a GPU."""
    every = [about for abouts in seen for about in abouts]
    text = "With the search for rates, recording and decoding:"
    for where, gpu in (("on the CPU", False), ("on a GPU, for the processes that control it", True)):
        own = [about["cpu_seconds"].values() for about in every if ("gpu" in about["how"]) == gpu]
        hours = math.fsum(seconds for each in own for seconds in each) / 3600
        text += f" {hours:.2f} processor hours for {len(own)} trainings {where}." if own else ""
    return text


def _made(seen: list[list[dict]]) -> str:
    """With what the records were made. seen: `about` of the seeds of each training."""
    made = [about["how"] for abouts in seen for about in abouts]
    text = "; ".join(f"{name}: {', '.join(sorted({each[name] for each in made}))}" for name in MADE)
    sums = {item for abouts in seen for about in abouts for item in about["data"].items()}
    text += "".join(f"; texts: {name}, sha256 {value}" for name, value in sorted(sums))
    for gpu, count in sorted(Counter(each["gpu"] for each in made if "gpu" in each).items()):
        text += f". Trained on a GPU ({gpu}): {count} of {len(made)} trainings"
    return f"Made with {text}."


def _perplexity(found: Interval | None) -> str:
    """exp of minus the mean ln p, with its interval."""
    if found is None:
        return NO_RULE
    if math.isnan(found.low):
        return f"{math.exp(-found.mean):.2f} {NO_INTERVAL}"
    low, high = math.exp(-found.high), math.exp(-found.low)
    return f"{math.exp(-found.mean):.2f} ({low:.2f} to {high:.2f})"


def _share(value: float | None) -> str:
    return NO_RULE if value is None else percent(value)


def _speed(found: Drawn | None) -> str:
    """A speed-up with its interval over seeds."""
    if found is None:
        return NO_RULE
    at = interval(found)
    return f"{at.mean:.2f}x {f'±{at.high - at.mean:.2f}' if has_interval(found) else NO_INTERVAL}"


def _times(value: float | None) -> str:
    return NO_RULE if value is None else f"{value:.2f}x"


# ---- The picture ----


def draw_saved(path: Path, exams: Decoders) -> None:
    """A panel per decoder, a line per method: layers saved with their interval, and time saved with each fill."""
    most = max(map(len, exams.values()))
    figure, grid = new_panels(len(exams), len(exams), width=4.8, height=1.4 + 0.27 * most)
    for axes, (exam, found) in zip(grid, exams.items()):
        order = [name for name in _order(found)[::-1] if found[name].saves]
        for line, name in enumerate(order):
            each = found[name]
            one = drawn(each, f"saved {LEVEL:g}", exam.folder)
            assert one is not None  # every method has a rule at every level, if only the full model
            at = interval(one)
            label = {"label": "layers"} if not line else {}
            axes.plot([100 * at.low, 100 * at.high], [line, line], "-", color=CYCLE[0], linewidth=1.6)
            axes.plot(100 * at.mean, line, "o", color=CYCLE[0], markersize=6, **label)
            label = {"label": "FLOPs"} if not line else {}
            flops = 100 * each.values[f"FLOPs {LEVEL:g}"].mean()
            axes.plot(flops, line, "o", color=CYCLE[0], markerfacecolor="white", markersize=5, **label)
            for fill, marker, colour in zip(MISSING_KV, "<x", (CYCLE[1], CYCLE[6])):
                if speed := each.decoding(fill, "speedup"):
                    axes.plot(100 * (1 - 1 / speed), line, marker, color=colour, markersize=6)
        for fill, marker, colour in zip(MISSING_KV, "<x", (CYCLE[1], CYCLE[6])):
            axes.plot([], [], marker, color=colour, label=f"time, {fill}")
        axes.axvline(0, color=GREY, linewidth=0.8, zorder=0)
        axes.set_yticks(range(len(order)), order)
        axes.set(xlabel="saved, % of the full model", title=exam.name)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    save_figure(figure, path)
