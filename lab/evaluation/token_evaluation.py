"""Quality and speed of a decoder with early exits: benchmarks, perplexity, generated text, and figures over epsilon.

Sources: Valade 2024 (self-supervised exits), section 4.2; Zeng et al. 2024 (ConsistentEE), generation.

Scores are teacher-forced: one pass reads every exit at every position, and a position's distribution is that of the
exit at which the rule stops it. Each position attends to all layers of the positions before it, as in a prompt, and as
in decoding with missing_kv="recompute". So one pass is exact for every rule. Speed is measured in decoding.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mini_ee.lab.calibration import Observed, agreement, calibrate, end_to_end, observe, replay
from mini_ee.lab.confidence import MEASURES
from mini_ee.lab.data.decoder_texts import Text, cut_text
from mini_ee.lab.data.files import read_text
from mini_ee.lab.data.metrics import rouge_l
from mini_ee.lab.data.multiple_choice import Benchmark, QuestionRequests, make_requests, standard_error
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.exits.decoding import MISSING_KV, Generated
from mini_ee.lab.exits.generation import generated_texts
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.exits.token_exits import TEXTS_BATCH, TokenExits
from mini_ee.lab.recording import Record
from mini_ee.lab.rules import Never, Rule, Threshold
from mini_ee.lab.training.run_folder import Run
from mini_ee.lab.training.training_text import check_reads_on
from mini_ee.self_supervised import CALIBRATION_PROMPTS

EPSILONS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
COMPARED_MEASURES = tuple(
    measure for measure in MEASURES if measure != "normalised_entropy"
)  # that is entropy over a constant
AGREEMENT_LEVELS = (0.8, 0.9, 0.95)  # end-to-end agreement at which measures are compared
AGREEMENT_LEVEL = 0.9  # the same for runs
EPSILON_GRID = np.linspace(0.5, 1, 101).round(3)  # values of epsilon tried for a level
TIMED_DECODINGS = 3  # after one that warms up; the median counts
WRITTEN_TEXTS, WRITTEN_TOKENS = 256, 64  # texts to calibrate on, as many to check on, and tokens of each
PERPLEXITY_PIECES, PERPLEXITY_TOKENS = 200, 128  # pieces of a text at most, and tokens of each
TIMED_TOKENS = 64  # tokens from each prompt in a timed decoding


# ---- Benchmarks and perplexity ----


class BenchmarkScores(NamedTuple):
    """A benchmark's Q questions as token ids, and the scores of their options at every exit."""

    benchmark: Benchmark
    questions: list[QuestionRequests]
    recorded: Record  # of all N tokens of all options; an option is a group
    full_model: Record | None = None  # if the full model is another model

    def right(self, exit_index: np.ndarray) -> np.ndarray:
        """(Q,) bool: the questions that are answered correctly if tokens exit at exit_index (N,)."""
        answers, first = [], 0
        log_p, greedy = self.options(exit_index)
        for row, question in enumerate(self.questions):
            options = slice(first, first := first + len(question.requests))
            answers.append(self.benchmark.right(row, log_p[options], greedy[options]))
        return np.array(answers)

    def accuracy(self, exit_index: np.ndarray) -> dict[str, float]:
        """The share of questions that are answered correctly, and its standard error."""
        right = self.right(exit_index)
        sources = np.array([question.source for question in self.benchmark.questions])
        return {"accuracy": float(right.mean()), "standard_error": standard_error(right, sources)}

    def options(self, exit_index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For all options of all questions: log p, and whether greedy decoding generates the option."""
        at, groups = np.arange(len(exit_index)), self.recorded.groups
        # record_texts stores two "logits": ln p of the next token, and 1 if it is the exit's most likely token. A sum
        # over the tokens of an option is its log p, or the number of tokens that greedy decoding would not choose.
        log_p, likeliest = self.recorded.logits[at, exit_index].T
        return np.bincount(groups, weights=log_p), np.bincount(groups, weights=1 - likeliest) == 0


def score_benchmark(run: Run, benchmark: Benchmark, batch_size: int = TEXTS_BATCH) -> BenchmarkScores:
    """Record every exit at every token of every option."""
    most = run.model.backbone.config.max_tokens
    bar = tqdm(benchmark.questions, desc="tokenizing", delay=2)
    questions = [make_requests(question, run.tokenizer.ids_of, most) for question in bar]
    texts = [Text(request.ids, request.start - 1) for question in questions for request in question.requests]
    recorded = record_texts(run.model, texts, batch_size, "scoring", last=False)
    whole = run.model.whole
    full = None if whole is run.model else record_texts(whole, texts, batch_size, "scoring", last=False)
    return BenchmarkScores(benchmark, questions, recorded, full)


def benchmark_answer(scores: BenchmarkScores, rule: Rule) -> dict:
    """The JSON answer of a benchmark under one rule, without speed-up: every exit was read. `sweep` measures speed."""
    benchmark, questions, recorded, full_model = scores
    exits, positions = recorded.segments.exits, len(recorded.logits)
    exit_index = recorded.replay(rule).exit_index
    per_exit = [scores.accuracy(np.full(positions, k))["accuracy"] for k in range(len(exits))]
    full, layers = per_exit[-1], exits[-1]
    if full_model is not None:
        full = scores._replace(recorded=full_model).accuracy(np.zeros(positions, int))["accuracy"]
        layers = full_model.segments.exits[-1]
    log_p, _ = scores.options(exit_index)
    # Options of all questions are in one list: a question's first option comes after all options of those before.
    firsts = np.cumsum([0, *(len(question.requests) for question in questions)])[:-1]
    answers = firsts + [question.answer for question in benchmark.questions]
    answer = {
        "task": benchmark.name,
        "split": benchmark.split,
        "rows": len(questions),
        "choice": benchmark.choice,
        **scores.accuracy(exit_index),
        "full_accuracy": full,
        "log_likelihood": float(log_p[answers].mean()),
        "exits": list(exits),
        "per_exit_accuracy": per_exit,
        **depth(exit_index, exits, layers),
        "rule": rule.to_dict(),
        "rows_truncated": sum(question.cut for question in questions),
    }
    if benchmark.choice != "greedy":
        answer["chance"] = float(np.mean([1 / len(question.requests) for question in questions]))
    most = max(len(question.shots) for question in benchmark.questions)
    if most:
        answer["shots"] = np.bincount([question.shots for question in questions], minlength=most + 1).tolist()
    return answer


def depth(exit_index: np.ndarray, exits: tuple[int, ...], layers: int) -> dict:
    """How many tokens stop at each exit, and their mean depth, as JSON. exit_index (N,); layers: of the full model."""
    mean_layers = float(np.asarray(exits)[exit_index].mean())
    counts = np.bincount(exit_index, minlength=len(exits)).tolist()
    return {"exit_counts": counts, "mean_layers": mean_layers, "layers_saved": 1 - mean_layers / layers}


def perplexity(recorded: Record, rule: Rule) -> float:
    """exp of the mean of -ln p of the next token, with p from the exit at which each position stops."""
    exit_index = recorded.replay(rule).exit_index
    return float(np.exp(-recorded.logits[np.arange(len(exit_index)), exit_index, 0].mean()))


# ---- Everything over epsilon ----


def sweep(
    run: Run, measure: str, held_out: Record | None = None, scores: BenchmarkScores | None = None, seed: int = 0
) -> dict:
    """For every epsilon of EPSILONS: the thresholds of the paper's rule, and agreement, quality and speed with them.

    held_out: the record of a text, for perplexity; scores: of a benchmark. Thresholds are chosen on texts that the
    model generates from Table 1's prompts; agreement is measured on other such texts. Speed is measured on greedy text
    from the prompts: with copy_state under the keys of the row, with recompute under its key `recompute`.
    """
    model = run.model
    prompts, calibration, fresh = written_texts(run, seed)
    recorded = [record_texts(model, texts, progress="observing") for texts in (calibration, fresh)]
    chosen_on, checked = (observe(texts_record, measure) for texts_record in recorded)
    rules = [calibrate(chosen_on, epsilon, measure=measure) for epsilon in EPSILONS]
    rows = []
    for epsilon, rule in zip(EPSILONS, rules):
        row = {"epsilon": epsilon, "thresholds": rule.to_dict()["threshold"][:-1]} | agreement_and_depth(
            checked, rule, model.exits
        )
        if held_out is not None:
            row["perplexity"] = perplexity(held_out, rule)
        if scores is not None:
            row |= scores.accuracy(scores.recorded.replay(rule).exit_index)
        rows.append(row)
    ways = [(rule, missing_kv) for missing_kv in MISSING_KV for rule in rules]
    new_tokens = min(TIMED_TOKENS, run.model.backbone.room(prompts))
    full, *decoded = timed_decoding([(Never(), MISSING_KV[0]), *ways], model, prompts, new_tokens)
    decoded = [speed | {"speedup": full["seconds"] / speed["seconds"]} for speed in decoded]
    for row, copied, recomputed in zip(rows, decoded, decoded[len(rows) :]):
        row |= copied | {"recompute": recomputed}
    answer = {
        "rows": rows,
        "exits": list(model.exits),
        "measure": measure,
        "full_tokens_per_second": full["tokens_per_second"],
        "tokens_calibration": len(chosen_on.groups),
        "tokens_fresh": len(checked.groups),
        "measures": at_equal_agreement(*recorded),
    }
    if held_out is not None:
        answer |= {"full_perplexity": perplexity(held_out, Never()), "tokens_text": len(held_out.logits)}
    if scores is not None:
        benchmark, last = scores.benchmark, np.full(len(scores.recorded.logits), len(model.exits) - 1)
        answer |= {"task": benchmark.name, "split": benchmark.split, "task_rows": len(scores.questions)}
        answer["full_accuracy"] = scores.accuracy(last)["accuracy"]
    return answer


def agreement_and_depth(observed: Observed, rule: Threshold, exits: tuple[int, ...]) -> dict:
    """Agreement with the full model, by exit and end to end, and depth, of observed tokens under a rule."""
    outcome = replay(observed, rule)
    figures = {"agreement": agreement(observed, rule), "end_to_end": float(outcome.agrees.mean())}
    return figures | depth(outcome.exit_index, exits, exits[-1])


def at_equal_agreement(
    calibration: Record,
    fresh: Record,
    measures: Sequence[str] = COMPARED_MEASURES,
    levels: Sequence[float] = AGREEMENT_LEVELS,
) -> list[dict]:
    """For each measure and level: agreement and depth of fresh tokens at this level of end-to-end agreement.

    epsilon is the lowest of EPSILON_GRID with which the calibration texts reach the level.
    """
    rows = []
    for measure in measures:
        chosen_on, checked = observe(calibration, measure), observe(fresh, measure)
        rules = [calibrate(chosen_on, epsilon, measure=measure) for epsilon in EPSILON_GRID]
        reached = np.array([end_to_end(chosen_on, rule) for rule in rules])
        for level in levels:
            at = int(np.argmax(reached >= level))  # the first; with epsilon 1 all tokens agree
            figures = agreement_and_depth(checked, rules[at], calibration.segments.exits)
            rows.append({"measure": measure, "level": level, "epsilon": float(EPSILON_GRID[at])} | figures)
    return rows


def timed_decoding(
    ways: Sequence[tuple[Rule, str]], model: TokenExits, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[dict]:
    """Greedy text decoded in each way, timed in turns in this process, warm, at batch size 1.

    ways: (rule, missing_kv) each. With Never no head is computed. decoded_agreement: the share of generated tokens
    that the full model predicts from the same text before them. It includes errors that missing_kv causes. Seconds are
    the sum over prompts of the median of TIMED_DECODINGS.
    """
    texts, seconds = [], np.empty((TIMED_DECODINGS, len(prompts), len(ways)))
    order = list(np.ndindex(1 + TIMED_DECODINGS, len(prompts)))
    for repeat, number in tqdm(order, desc="decoding", unit="prompt", delay=2):
        for at, (rule, missing_kv) in enumerate(ways):
            begin = time.perf_counter()
            prompt = [Text(list(prompts[number]), len(prompts[number]) - 1)]
            (text,) = model.write(prompt, rule, max_new_tokens=new_tokens, missing_kv=missing_kv, stop=())
            if repeat:
                seconds[repeat - 1, number, at] = time.perf_counter() - begin
            else:
                texts.append(text)
    answers = []
    for at, total in enumerate(np.median(seconds, axis=0).sum(axis=0)):
        way_texts = texts[at :: len(ways)]  # the loop above appends one text for each way, prompt by prompt
        whole = [Text([*prompt, *text.tokens], len(prompt) - 1) for prompt, text in zip(prompts, way_texts)]
        layers = np.concatenate([text.layers_run for text in way_texts])
        likeliest = record_texts(model, whole, progress="checking", last=False).logits[:, -1, 1]
        answers.append(
            {
                "decoded_agreement": float(likeliest.mean()),
                "decoded_layers": float(layers.mean()),
                "seconds": float(total),
                "tokens_per_second": len(layers) / float(total),
            }
        )
    return answers


# ---- Texts to measure on ----


def written_texts(run: Run, seed: int) -> tuple[list[list[int]], list[Text], list[Text]]:
    """(prompts, calibration, fresh): Table 1's prompts as tokens, and texts that the full model generates from them."""
    backbone = run.model.backbone
    prompts = [run.tokenizer.ids_of(prompt) for prompt in CALIBRATION_PROMPTS]
    new_tokens, stop = min(WRITTEN_TOKENS, backbone.room(prompts)), backbone.config.stop_tokens
    calibration, fresh = (
        generated_texts(backbone, prompts, WRITTEN_TEXTS, new_tokens, stop=stop, seed=seed + half * WRITTEN_TEXTS)
        for half in (0, 1)
    )
    return prompts, calibration, fresh


def held_text(path: Path, run: Run, seed: int) -> list[Text]:
    """At most PERPLEXITY_PIECES pieces of a text, drawn with the seed: the bos token and PERPLEXITY_TOKENS each."""
    check_reads_on(run.model.backbone, "a benchmark's folder")
    first = run.tokenizer.ids_of("")
    length = min(PERPLEXITY_TOKENS, run.model.backbone.config.max_tokens - len(first))
    ids = run.tokenizer.ids_of(read_text(path), special=False)
    pieces = cut_text(ids, length, first)
    drawn = np.sort(np.random.default_rng(seed).permutation(len(pieces))[:PERPLEXITY_PIECES])
    return [pieces[row] for row in drawn]


# ---- Generated text ----


def quality(run: Run, written: list[Generated], full: list[str], references: list[str]) -> dict[str, float]:
    """Mean Rouge-L against the full model's texts and against the references, and the mean depth of a token."""
    texts = decoded(run, written)
    layers = float(np.mean([layers for text in written for layers in text.layers_run]))
    return {
        "rouge_l": float(np.mean([rouge_l(*pair) for pair in zip(texts, full)])),
        "rouge_l_reference": float(np.mean([rouge_l(*pair) for pair in zip(texts, references)])),
        "mean_layers": layers,
        "layers_saved": 1 - layers / run.model.whole.exits[-1],
    }


def decoded(run: Run, written: Sequence[Generated]) -> list[str]:
    """The generated texts as strings, without special tokens."""
    return [run.tokenizer.backend.decode(text.tokens) for text in written]


def measure_speed(points: list[tuple[dict, Callable[[], list[Generated]]]]) -> None:
    """Add tokens_per_second to every point: timed in turns, with the median time of TIMED_DECODINGS rounds."""
    seconds = np.zeros((TIMED_DECODINGS + 1, len(points)))  # the first round warms up
    for times in tqdm(seconds, desc="timing", unit="round", delay=2):
        for number, (point, timed) in enumerate(points):
            begin = time.perf_counter()
            tokens = sum(len(generation.tokens) for generation in timed())
            times[number] = time.perf_counter() - begin
            point["tokens"] = tokens
    for (point, _), median in zip(points, np.median(seconds[1:], axis=0)):
        point["tokens_per_second"] = point.pop("tokens") / float(median)
