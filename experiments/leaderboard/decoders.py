"""The leaderboard's decoders: trains every method whose tokens can exit, records its exits, and measures its decoding.

All methods learn the same texts with one seed, in as many epochs, with rates from one grid. A pair of rates is chosen
with the first seed, by the mean ln p of the next token on calibration text if thresholds on the gap run at most three
quarters of the layers. Rules are chosen on the calibration text of their seed, from what was read back from the record;
figures are of other texts. Methods that differ by their rules alone share a training and its record.

OUT/records/decoders-MODEL/METHOD.npz    every seed's outputs of all exits; what needs the model is in `about`
OUT/leaderboard/runs/                    unfinished trainings; removed once they are recorded
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mini_ee.experiments.leaderboard.decoding_figures import decoding_figures, lossless_figures
from mini_ee.experiments.leaderboard.token_rules import (
    LEVEL,
    LEVELS,
    SHARE,
    WITHIN,
    needed_measures,
    own_rules,
    rule_at,
    rule_within,
    score_of_rates,
)
from mini_ee.experiments.records import SeedRecord, read_about, write_record
from mini_ee.experiments.trainings import Sources, alone, how_made, run_in_turns, trained
from mini_ee.lab.backbones.hub import BUILT_IN_DECODER, load_backbone
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.files import file_sha256
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.exits.token_exits import TokenExits
from mini_ee.lab.recording import Record, Recorded
from mini_ee.lab.registry import METHODS
from mini_ee.lab.training.loop import Diverged
from mini_ee.lab.training.method import Method, load_method
from mini_ee.lab.training.train_settings import TextOptions
from mini_ee.lab.training.training_text import Source, texts_to_test

QUICK_METHODS = ("self-supervised", "layerskip")
MOST_TEXTS = 10**6  # more than any file has
DRAFTED_TEXTS, LOSSLESS_TEXTS = 4, 12  # that choose the drafting exit, and that are then generated with it

LEAST_SCORE = -1e3  # of rates with which the training diverges

Say = Callable[[str], None]


class DecoderExam(NamedTuple):
    """A decoder, and how all methods are trained on it."""

    name: str
    weights: str | None  # folder in weights/; None: the built-in decoder
    text: str | None  # file in data/; None: text that the decoder generates
    texts: int
    epochs: int
    rates: tuple[tuple[float, float], ...]  # the grid: pairs of lr and head_lr
    new_tokens: int = 40  # after the beginning of a text, which has 40
    recorded_texts: int = 37  # to choose rules on, and as many to report

    @property
    def folder(self) -> str:
        """The folder of its records."""
        return f"decoders-{self.name}"

    def model_folder(self, sources: Sources) -> Path:
        return BUILT_IN_DECODER if self.weights is None else sources.find("weights", self.weights)


RATES = ((5e-4, 2e-3), (2e-3, 8e-3), (8e-3, 32e-3), (32e-3, 128e-3))
TINY_STORIES = "TinyStories/tinystories_sample.txt"
EXAMS = (
    DecoderExam("stories260K", "stories260K", TINY_STORIES, 1000, 4, RATES),
    DecoderExam("built-in", None, TINY_STORIES, 500, 4, RATES[:2]),  # a step takes ten times as long
)
QUICK_EXAMS = (DecoderExam("built-in", None, None, 150, 1, RATES[1:2], new_tokens=12, recorded_texts=12),)


class Training(NamedTuple):
    """One training, and the methods that it serves."""

    exam: DecoderExam
    methods: tuple[str, ...]  # the first one is trained, and gives the record its name

    @property
    def name(self) -> str:
        return f"{self.exam.name} {self.methods[0]}"

    @property
    def method(self) -> Method:
        return load_method(self.methods[0])

    @property
    def options(self) -> dict[str, Any]:
        """The options of `train`, without rates and seed; models and texts by name."""
        exam, lacks = self.exam, self.method.lacks
        options = {"method": self.methods[0], "task": "continue", "model": exam.weights, "text": exam.text}
        options |= {"new_tokens": exam.new_tokens}
        options |= {} if self.method.search else {"texts": exam.texts}  # a search has a number of its own
        return options if "epochs" in lacks else options | {"epochs": exam.epochs}

    @property
    def rates(self) -> list[dict[str, float]]:
        """The rates to choose from; a single empty one if the method learns nothing by gradients."""
        pairs = [dict(zip(("lr", "head_lr"), pair)) for pair in self.exam.rates]
        some = [{name: rate for name, rate in pair.items() if name not in self.method.lacks} for pair in pairs]
        return [choice for at, choice in enumerate(some) if choice not in some[:at]]

    @property
    def settings(self) -> dict[str, Any]:
        """What a record must have been made with."""
        return self.options | {"grid": self.rates, "chosen_with": SHARE, "recorded_texts": self.exam.recorded_texts}

    def record(self, out: Path) -> Path:
        return out / "records" / self.exam.folder / f"{self.methods[0]}.npz"


# ---- What is trained ----


def token_methods() -> list[str]:
    """The methods whose tokens can exit, in the order of the registry."""
    return [name for name in METHODS if "tokens" in load_method(name).units]


def trainings(quick: bool, only: str | None = None) -> list[Training]:
    """All trainings. only: those that serve this method. Raises WrongArguments if its tokens cannot exit."""
    if only is not None and only not in token_methods():
        raise WrongArguments(f"--only: expected one of {', '.join(token_methods())} for decoders; found {only}")
    planned = []
    for exam in QUICK_EXAMS if quick else EXAMS:
        groups: dict[str, list[str]] = {}
        for name in token_methods():
            method = load_method(name)
            groups.setdefault(("tokens" not in method.defaults and method.trained_as) or name, []).append(name)
        planned += [Training(exam, tuple(names)) for names in groups.values()]
    if only is not None:
        return [training for training in planned if only in training.methods]
    return [training for training in planned if not quick or training.methods[0] in QUICK_METHODS]


def run_decoders(
    out: Path, sources: Sources, seeds: Sequence[int], only: str | None, quick: bool, say: Say, failed: list[str]
) -> int:
    """Train and record what is missing; returns the number of recorded seeds.

    All trainings run with one seed before any runs with the next. failed: gets a line for each that raises. Raises
    WrongArguments if a model or a text is missing.
    """
    every = [(training, seed) for seed in seeds for training in trainings(quick, only)]
    waiting = [(training, seed) for training, seed in every if not is_recorded(out, training, seed)]
    for training, _ in waiting:
        sources.options(training.options)
    say(f"Decoders: {len(every)} trainings with all seeds; {len(waiting)} to run.")

    def run(training: Training, seed: int) -> bool:
        with alone(training.record(out)):
            if is_recorded(out, training, seed):
                return False
            say(f"{training.name}, seed {seed}")
            _run(out, training, seed, sources, say)
        return True

    titled = [(f"{training.name}, seed {seed}", training, seed) for training, seed in waiting]
    return run_in_turns(titled, run, say, failed)


def is_recorded(out: Path, training: Training, seed: int) -> bool:
    """Whether a seed is in the record, made with the present settings and for all methods that it serves."""
    metadata = read_about(training.record(out)).get(seed, {})
    return metadata.get("settings") == training.settings and set(training.methods) <= metadata["methods"].keys()


# ---- One training ----


def _run(out: Path, training: Training, seed: int, sources: Sources, say: Say) -> None:
    """Train, record and measure one seed."""
    at = out / "leaderboard" / "runs" / training.exam.folder / training.methods[0] / str(seed)
    decoder = TokenExits(
        backbone := load_backbone(training.exam.model_folder(sources)), (backbone.config.num_hidden_layers,)
    )
    calibration, reported = texts_of(training, decoder, sources, seed)
    metadata: dict[str, Any] = {"settings": training.settings, "how": how_made(sources.device), "cpu_seconds": {}}
    text = training.exam.text
    metadata["data"] = {text: file_sha256(sources.find("data", text))} if text else {}
    with cpu_seconds(metadata, "search"):
        metadata |= _chosen_rates(out, training, seed, sources, calibration, at, say)
    searched = len(metadata["tried"]) if metadata["tried"] and metadata["tried"][0]["seed"] == seed else 0
    with cpu_seconds(metadata, "training"):
        run = trained(at / "run", training.options | metadata["rates"], seed, sources)
    if searched:  # the run is one of those that the search has trained
        metadata["cpu_seconds"]["training"] = round(metadata["cpu_seconds"]["search"] / searched, 1)
        metadata["cpu_seconds"]["search"] -= metadata["cpu_seconds"]["training"]
    with cpu_seconds(metadata, "recording"):
        full = record_texts(decoder, reported, last=False)
        parts = [token_record(run.model, texts) for texts in (reported, calibration)]
        methods = {name: load_method(name) for name in training.methods}
        rules = {name: own_rules(method, parts[1]) for name, method in methods.items()}
        measures = needed_measures([rule for method_rules in rules.values() for rule in method_rules])
        made = SeedRecord(*(_with_measures(part, measures) for part in parts), {})
        made = write_record(at / "record.npz", seed, made)  # rules are chosen on what is read back
    metadata["original"] = original_figures(full, parts[0])
    with cpu_seconds(metadata, "decoding"):
        metadata["methods"] = {}
        for name, method in methods.items():
            candidates = own_rules(method, made.held_out)
            chosen = {level: rule_at(candidates, made.held_out, level) for level in LEVELS}
            within = (cheap_rule := rule_within(candidates, made.held_out, SHARE)) and cheap_rule.to_dict()
            figures = decoding_figures(run.model, chosen[LEVEL], reported, run.tokenizer)
            metadata["methods"][name] = {
                "rules": {f"{level:g}": rule.to_dict() for level, rule in chosen.items()} | {WITHIN: within},
                "decoding": figures,
            }
        metadata["lossless"] = lossless_figures(run.model, calibration[:DRAFTED_TEXTS], reported[:LOSSLESS_TEXTS])
    write_record(training.record(out), seed, made._replace(about=metadata))
    shutil.rmtree(at)
    seconds_of = ", ".join(f"{name} {seconds:.0f}" for name, seconds in metadata["cpu_seconds"].items())
    say(f"  processor seconds: {seconds_of}")


@contextmanager
def cpu_seconds(metadata: dict, name: str) -> Iterator[None]:
    """Adds the processor seconds of a block to about["cpu_seconds"]."""
    begin = time.process_time()
    yield
    metadata["cpu_seconds"][name] = round(time.process_time() - begin, 1)


def texts_of(training: Training, decoder: TokenExits, sources: Sources, seed: int) -> tuple[list[Text], list[Text]]:
    """(calibration, reported): texts that no method learns, the same for all methods."""
    folder = training.exam.model_folder(sources)
    given = sources.options({"text": training.exam.text}) | {"new_tokens": training.exam.new_tokens}
    source = Source(decoder.backbone, Tokenizer.from_folder(folder, None), TextOptions(**given), seed)
    count = 2 * training.exam.recorded_texts
    texts = texts_to_test(source, count if training.exam.text is None else MOST_TEXTS)
    order = np.random.default_rng(seed).permutation(len(texts))[:count]
    return [texts[at] for at in order[::2]], [texts[at] for at in order[1::2]]


def _chosen_rates(
    out: Path, training: Training, seed: int, sources: Sources, calibration: list[Text], at: Path, say: Say
) -> dict:
    """`rates` and `tried` of the record: those of a seed before, else those with the best score of this seed."""
    for metadata in read_about(training.record(out)).values():
        if metadata.get("settings") == training.settings:
            return {name: metadata[name] for name in ("rates", "tried")}
    if len(training.rates) == 1:
        return {"rates": training.rates[0], "tried": []}
    tried = []
    for number, rates in enumerate(training.rates):
        try:
            run = trained(at / f"try-{number}", training.options | rates, seed, sources)
            score = score_of_rates(token_record(run.model, calibration))
        except Diverged:
            score = LEAST_SCORE
        tried.append({"rates": rates, "score": round(max(score, LEAST_SCORE), 4), "seed": seed})
        say(f"  {rates}: mean ln p {score:.3f} with {SHARE:.0%} of the layers")
    best = int(np.argmax([trial["score"] for trial in tried]))
    if tried[best]["score"] <= LEAST_SCORE:
        raise Diverged("all rates diverge")
    if not (at / "run").exists():
        (at / f"try-{best}").rename(at / "run")
    return {"rates": tried[best]["rates"], "tried": tried}


# ---- Records ----


def token_record(model: TokenExits, texts: Sequence[Text]) -> Record:
    """All exits at the tokens of each text. A model of some of the layers is the exit before its full model."""
    recorded = record_texts(model, texts, last=False)
    if model.whole is model:
        return recorded
    full = record_texts(model.whole, texts, last=False)
    layers, last = model.exits[-1], model.whole.exits[-1]
    flops = np.concatenate((recorded.segments.costs[0], full.segments.costs[0]), axis=1)
    flops[:, 1, 0] -= flops[:, 0, 0]  # a token that is read by the full model pays its layers, and no others
    logits = np.concatenate((recorded.logits, full.logits), axis=1)
    prediction = np.concatenate((recorded.predictions, full.predictions), axis=1)
    segments = Recorded((layers, last), logits, flops, [layers, last - layers], {"prediction": prediction})
    return Record(segments, logits, full.full, recorded.groups)


def _with_measures(recorded: Record, names: set[str]) -> Record:
    """The record with these measures alone."""
    old = recorded.segments
    measures = {name: values for name, values in old.measures.items() if name in names}
    flops, passes, _ = old.costs
    return recorded._replace(segments=Recorded(old.exits, old.logits, flops, passes, measures))


def original_figures(full: Record, recorded: Record) -> dict[str, float]:
    """The decoder before the training: its perplexity, and how often the trained full model predicts the same."""
    agrees = full.predictions[:, -1] == recorded.predictions[:, -1]
    return {"perplexity": float(np.exp(-full.logits[:, -1, 0].mean())), "agreement": float(agrees.mean())}
