"""What early exits cost a decoder and what they save: benchmarks, perplexity, writing, and the figures over epsilon.

Sources: Valade 2024 (self-supervised exits), section 4.2; Zeng et al. 2024 (ConsistentEE), generation.

Scored is teacher-forced: one pass reads every exit at every position, and a position's distribution is then that of the
exit at which the rule lets it leave. Each position has seen all layers of those before it, as a prompt has, and as
decoding has with missing_kv="recompute": so one pass serves every rule, exactly. Speed is measured on decoding.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mini_ee.calibration import Observed, agreement, calibrate, end_to_end, observe, replay
from mini_ee.confidence import MEASURES
from mini_ee.data.decoder_texts import CALIBRATION_PROMPTS, Text, cut_text
from mini_ee.data.files import read_text
from mini_ee.data.metrics import rouge_l
from mini_ee.data.multiple_choice import Benchmark, QuestionRequests, make_requests, standard_error
from mini_ee.data.progress import tqdm
from mini_ee.exits.decoding import MISSING_KV, Generated
from mini_ee.exits.generation import generated_texts
from mini_ee.exits.token_exits import TEXTS_BATCH, TokenExits, record_texts
from mini_ee.recording import Record
from mini_ee.rules import NeverExit, Rule, Threshold
from mini_ee.training.run_folder import Run
from mini_ee.training.training_text import check_reads_on

EPSILONS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
COMPARED_MEASURES = tuple(measure for measure in MEASURES if measure != "normalised_entropy")  # entropy over a constant
AGREEMENT_LEVELS = (0.8, 0.9, 0.95)  # of end-to-end agreement, at which measures are compared
AGREEMENT_LEVEL = 0.9  # at which runs are compared
EPSILON_GRID = np.linspace(0.5, 1, 101).round(3)  # values of epsilon tried for a level
TIMED_DECODINGS = 3  # of each timed decoding, after one that warms; the median counts
WRITTEN_TEXTS, WRITTEN_TOKENS = 256, 64  # generated to calibrate on, and as many to check on
PERPLEXITY_PIECES, PERPLEXITY_TOKENS = 200, 128  # of a text for perplexity, at most, and the tokens in each
TIMED_TOKENS = 64  # tokens from each prompt, where speed is measured


# ---- Benchmarks and perplexity ----


class BenchmarkScores(NamedTuple):
    """A benchmark's questions as token ids, and what every exit said of their options."""

    benchmark: Benchmark
    asked: list[QuestionRequests]
    recorded: Record
    whole: Record | None = None  # of the full model, where it is another

    def right(self, exit_index: np.ndarray) -> np.ndarray:
        """(Q,) bool: the questions that are answered, where tokens (N,) leave at these exits."""
        answers, first = [], 0
        log_p, greedy = self.options(exit_index)
        for row, asked in enumerate(self.asked):
            options = slice(first, first := first + len(asked.requests))
            answers.append(self.benchmark.right(row, log_p[options], greedy[options]))
        return np.array(answers)

    def accuracy(self, exit_index: np.ndarray) -> dict[str, float]:
        """The share of questions that are answered, and its standard error."""
        right = self.right(exit_index)
        sources = np.array([question.source for question in self.benchmark.questions])
        return {"accuracy": float(right.mean()), "standard_error": standard_error(right, sources)}

    def options(self, exit_index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of every option of every question: its log p, and whether greedy decoding writes it."""
        at, groups = np.arange(len(exit_index)), self.recorded.groups
        log_p, likeliest = self.recorded.logits[at, exit_index].T
        return np.bincount(groups, weights=log_p), np.bincount(groups, weights=1 - likeliest) == 0


def score_benchmark(run: Run, benchmark: Benchmark, batch_size: int = TEXTS_BATCH) -> BenchmarkScores:
    """Read every exit at every token of every option."""
    most = run.model.backbone.config.max_tokens
    questions = tqdm(benchmark.questions, desc="tokenizing", delay=2)
    asked = [make_requests(question, run.tokenizer.ids_of, most) for question in questions]
    texts = [Text(request.ids, request.start - 1) for one in asked for request in one.requests]
    recorded = record_texts(run.model, texts, batch_size, "scoring", last=False)
    whole = run.model.whole
    full = None if whole is run.model else record_texts(whole, texts, batch_size, "scoring", last=False)
    return BenchmarkScores(benchmark, asked, recorded, full)


def benchmark_answer(scores: BenchmarkScores, rule: Rule) -> dict:
    """The JSON answer of a benchmark under one rule. No speed-up: every exit was read; `sweep` measures it."""
    benchmark, asked, recorded, whole = scores
    exits, positions = recorded.segments.exits, len(recorded.logits)
    left = recorded.replay(rule).exit_index
    each = [scores.accuracy(np.full(positions, k))["accuracy"] for k in range(len(exits))]
    full, layers = each[-1], exits[-1]
    if whole is not None:
        full = scores._replace(recorded=whole).accuracy(np.zeros(positions, int))["accuracy"]
        layers = whole.segments.exits[-1]
    log_p, _ = scores.options(left)
    answers = np.cumsum([0, *(len(one.requests) for one in asked)])[:-1] + [q.answer for q in benchmark.questions]
    answer = {
        "task": benchmark.name,
        "split": benchmark.split,
        "rows": len(asked),
        "choice": benchmark.choice,
        **scores.accuracy(left),
        "full_accuracy": full,
        "log_likelihood": float(log_p[answers].mean()),
        "exits": list(exits),
        "per_exit_accuracy": each,
        **depth(left, exits, layers),
        "rule": rule.to_dict(),
        "rows_truncated": sum(one.cut for one in asked),
    }
    if benchmark.choice != "greedy":
        answer["chance"] = float(np.mean([1 / len(one.requests) for one in asked]))
    most = max(len(question.shots) for question in benchmark.questions)
    if most:
        answer["shots"] = np.bincount([one.shots for one in asked], minlength=most + 1).tolist()
    return answer


def depth(left: np.ndarray, exits: tuple[int, ...], layers: int) -> dict:
    """Where units (N,) left, of a full model of so many layers, under the keys of the JSON answers."""
    mean_layers = float(np.asarray(exits)[left].mean())
    counts = np.bincount(left, minlength=len(exits)).tolist()
    return {"exit_counts": counts, "mean_layers": mean_layers, "layers_saved": 1 - mean_layers / layers}


def perplexity(recorded: Record, rule: Rule) -> float:
    """exp of the mean of -ln p of the next token, each position's from the exit at which it leaves."""
    left = recorded.replay(rule).exit_index
    return float(np.exp(-recorded.logits[np.arange(len(left)), left, 0].mean()))


# ---- Everything over epsilon ----


def sweep(
    run: Run, measure: str, held: Record | None = None, scores: BenchmarkScores | None = None, seed: int = 0
) -> dict:
    """For every epsilon of EPSILONS: thresholds of the paper's rule, and what they keep, cost and save elsewhere.

    held: what was recorded of a text, for perplexity; scores: of a benchmark. Thresholds come from texts that the
    model writes from Table 1's prompts, the guarantee is checked on others; speed is measured on greedy text from the
    prompts, with copy_state in the row itself, with recompute under that name.
    """
    model = run.model
    prompts, calibration, fresh = written_texts(run, seed)
    recorded = [record_texts(model, texts, progress="observing") for texts in (calibration, fresh)]
    taken, checked = (observe(each, measure) for each in recorded)
    rules = [calibrate(taken, epsilon, measure=measure) for epsilon in EPSILONS]
    rows = []
    for epsilon, rule in zip(EPSILONS, rules):
        row = {"epsilon": epsilon, "thresholds": rule.to_dict()["threshold"][:-1]} | kept(checked, rule, model.exits)
        if held is not None:
            row["perplexity"] = perplexity(held, rule)
        if scores is not None:
            row |= scores.accuracy(scores.recorded.replay(rule).exit_index)
        rows.append(row)
    ways = [(rule, missing_kv) for missing_kv in MISSING_KV for rule in rules]
    new_tokens = min(TIMED_TOKENS, run.model.backbone.room(prompts))
    full, *decoded = timed_decoding([(NeverExit(), MISSING_KV[0]), *ways], model, prompts, new_tokens)
    decoded = [each | {"speedup": full["seconds"] / each["seconds"]} for each in decoded]
    for row, propagated, recomputed in zip(rows, decoded, decoded[len(rows) :]):
        row |= propagated | {"recompute": recomputed}
    answer = {
        "rows": rows,
        "exits": list(model.exits),
        "measure": measure,
        "full_tokens_per_second": full["tokens_per_second"],
        "tokens_calibration": len(taken.groups),
        "tokens_fresh": len(checked.groups),
        "measures": at_equal_agreement(*recorded),
    }
    if held is not None:
        answer |= {"full_perplexity": perplexity(held, NeverExit()), "tokens_text": len(held.logits)}
    if scores is not None:
        benchmark, last = scores.benchmark, np.full(len(scores.recorded.logits), len(model.exits) - 1)
        answer |= {"task": benchmark.name, "split": benchmark.split, "task_rows": len(scores.asked)}
        answer["full_accuracy"] = scores.accuracy(last)["accuracy"]
    return answer


def kept(observed: Observed, rule: Threshold, exits: tuple[int, ...]) -> dict:
    """What a rule keeps of its guarantee on some tokens, and where they leave."""
    outcome = replay(observed, rule)
    found = {"agreement": agreement(observed, rule), "end_to_end": float(outcome.agrees.mean())}
    return found | depth(outcome.exit_index, exits, exits[-1])


def at_equal_agreement(
    calibration: Record,
    fresh: Record,
    measures: Sequence[str] = COMPARED_MEASURES,
    levels: Sequence[float] = AGREEMENT_LEVELS,
) -> list[dict]:
    """For each measure and level: what fresh tokens keep and cost at that end-to-end agreement.

    epsilon is the lowest of EPSILON_GRID at which the calibration texts reach the level.
    """
    rows = []
    for measure in measures:
        taken, checked = observe(calibration, measure), observe(fresh, measure)
        rules = [calibrate(taken, epsilon, measure=measure) for epsilon in EPSILON_GRID]
        reached = np.array([end_to_end(taken, rule) for rule in rules])
        for level in levels:
            at = int(np.argmax(reached >= level))  # epsilon 1 reaches every level
            found = kept(checked, rules[at], calibration.segments.exits)
            rows.append({"measure": measure, "level": level, "epsilon": float(EPSILON_GRID[at])} | found)
    return rows


def timed_decoding(
    ways: Sequence[tuple[Rule, str]], model: TokenExits, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[dict]:
    """Greedy text under each (rule, missing_kv), timed in turns in this process, warm, at batch size 1.

    NeverExit is our own cached decoding, without heads. `decoded_agreement` is the share of written tokens that the
    full model would have written there, given the same text before them: with whatever `missing_kv` changes.
    """
    texts, seconds = [], np.empty((TIMED_DECODINGS, len(prompts), len(ways)))
    order = list(np.ndindex(1 + TIMED_DECODINGS, len(prompts)))
    for repeat, number in tqdm(order, desc="decoding", unit="prompt", delay=2):
        for at, (rule, missing_kv) in enumerate(ways):
            begin = time.perf_counter()
            given = [Text(list(prompts[number]), len(prompts[number]) - 1)]
            (text,) = model.write(given, rule, max_new_tokens=new_tokens, missing_kv=missing_kv, stop=())
            if repeat:
                seconds[repeat - 1, number, at] = time.perf_counter() - begin
            else:
                texts.append(text)
    answers = []
    for at, taken in enumerate(np.median(seconds, axis=0).sum(axis=0)):
        own = texts[at :: len(ways)]
        whole = [Text([*prompt, *text.tokens], len(prompt) - 1) for prompt, text in zip(prompts, own)]
        layers = np.concatenate([text.layers_run for text in own])
        likeliest = record_texts(model, whole, progress="checking", last=False).logits[:, -1, 1]
        answers.append(
            {
                "decoded_agreement": float(likeliest.mean()),
                "decoded_layers": float(layers.mean()),
                "seconds": float(taken),
                "tokens_per_second": len(layers) / float(taken),
            }
        )
    return answers


# ---- Texts to measure on ----


def written_texts(run: Run, seed: int) -> tuple[list[list[int]], list[Text], list[Text]]:
    """Table 1's prompts as tokens, and twice WRITTEN_TEXTS texts that the full model writes from them."""
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


# ---- Writing ----


def quality(run: Run, written: list[Generated], full: list[str], references: list[str]) -> dict[str, float]:
    """Mean Rouge-L against the full model's texts and against the references, and the mean depth of a token."""
    found = decoded(run, written)
    layers = float(np.mean([layers for each in written for layers in each.layers_run]))
    return {
        "rouge_l": float(np.mean([rouge_l(*pair) for pair in zip(found, full)])),
        "rouge_l_reference": float(np.mean([rouge_l(*pair) for pair in zip(found, references)])),
        "mean_layers": layers,
        "layers_saved": 1 - layers / run.model.whole.exits[-1],
    }


def decoded(run: Run, written: Sequence[Generated]) -> list[str]:
    """What was written, as text; tokens that end one say nothing."""
    return [run.tokenizer.backend.decode(each.tokens) for each in written]


def measure_speed(points: list[tuple[dict, Callable[[], list[Generated]]]]) -> None:
    """Tokens a second of every point, put into it: all take turns, and the median over TIMED_DECODINGS counts."""
    seconds = np.zeros((TIMED_DECODINGS + 1, len(points)))  # the first round warms up
    for times in tqdm(seconds, desc="timing", unit="round", delay=2):
        for number, (point, timed) in enumerate(points):
            begin = time.perf_counter()
            tokens = sum(len(each.tokens) for each in timed())
            times[number] = time.perf_counter() - begin
            point["tokens"] = tokens
    for (point, _), median in zip(points, np.median(seconds[1:], axis=0)):
        point["tokens_per_second"] = point.pop("tokens") / float(median)
