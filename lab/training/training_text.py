"""The texts on which a decoder's exits are trained and calibrated.

    pieces      text that the decoder generates from prompts, or a file cut into pieces. The loss is of every position,
                except those of prompts that an encoder reads
    continue    stories, of a file or generated, whose beginnings are given
    copy        sentences of a file, each to be repeated

Without a file the decoder generates the text. The same seed generates the same text.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mini_ee.lab.calibration import POLICY, calibrate_conformal, calibrate_record
from mini_ee.lab.data.decoder_texts import (
    BETWEEN_TEXTS,
    Text,
    continuations,
    copies,
    cut_text,
    read_stories,
)
from mini_ee.lab.data.files import read_text
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.data.values import checked_text
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.generation import generated_texts
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.exits.token_exits import TextData, TokenExits
from mini_ee.lab.recording import Record
from mini_ee.lab.rules import Never
from mini_ee.lab.training.default_rule import Chosen
from mini_ee.lab.training.train_settings import TextOptions
from mini_ee.lab.training.unit import load_unit
from mini_ee.self_supervised import CALIBRATION_PROMPTS, TRAINING_PROMPTS

GIVEN, FOLLOW = 40, 40  # tokens of the beginning of a story, and tokens after it
CALIBRATION_PIECES = 512  # default number for a calibration
PIECES, HELD_PIECES, HELD_STORIES = 1024, 32, 150
GATE_PIECES = 256  # held out if a gate is calibrated
LEAST_GROUPS = 40  # texts without which no gate is calibrated
LEAST_SAVED = 0.1  # of the FLOPs; to stop at exits takes about as much time (SmolLM2, five exits, torch on a CPU)
HELD_SEED, CALIBRATION_SEED, TESTED_SEED = 10**6, 2 * 10**6, 3 * 10**6  # far from the seeds of the batches before
EPSILON = 0.95  # of the default rule, as in Valade 2024, section 3.3.1; so is the measure of the unit


class Source(NamedTuple):
    """A decoder, its tokenizer and the settings from which texts are made."""

    backbone: Any  # a GenerativeBackbone
    tokenizer: Tokenizer
    options: TextOptions
    seed: int
    held: int = HELD_PIECES  # pieces of a file that are held out, at most

    def prompts(self, usual: Sequence[str]) -> list[list[int]]:
        """The prompts of --prompt, or the usual ones, as token ids."""
        return [self.tokenizer.ids_of(checked_text(prompt, "--prompt")) for prompt in self.options.prompt or usual]

    def written(self, usual: Sequence[str], seed: int, count: int, greedy: bool = False) -> list[Text]:
        """Text that the full model generates from the prompts; greedily, once from each."""
        prompts = self.prompts(usual)
        new_tokens = self.options.new_tokens or max(1, min(64, self.backbone.room(prompts)))
        count = len(prompts) if greedy else count
        settings = {"greedy": greedy, "stop": self.backbone.config.stop_tokens, "seed": self.seed + seed}
        return generated_texts(self.backbone, prompts, count, new_tokens, **settings)

    def pieces(self) -> list[Text]:
        """The file in pieces, in an order drawn with the seed."""
        check_reads_on(self.backbone, "--task continue or copy")
        first, most = self.tokenizer.ids_of(""), self.backbone.config.max_tokens
        length = self.options.new_tokens or min(64, most - len(first))
        if length + len(first) > most:
            raise WrongArguments(f"--new-tokens: expected at most {most - len(first)}, got {length}")
        ids = self.tokenizer.ids_of(read_text(self.options.text), special=False)
        if len(ids) < 2 * length:
            raise WrongArguments(
                f"{self.options.text}: expected at least {2 * length} tokens, two pieces of {length}, "
                f"found {len(ids)}; give a longer text or smaller --new-tokens"
            )
        pieces = cut_text(ids, length, first)
        order = np.random.default_rng(self.seed).permutation(len(pieces))
        return [pieces[at] for at in order[: self.options.texts]]

    def stories(self) -> list[Text]:
        """All texts of the file, for the kind."""
        stories = read_stories(self.options.text)
        if self.options.kind == "copy":
            stop = self.backbone.config.stop_tokens
            if not stop:
                raise WrongArguments(
                    "--task copy needs an eos token, and the config.json of the model has none; give --task continue"
                )
            return copies(self.tokenizer.backend, stories, stop[0])
        return continuations(self.tokenizer.backend, stories, GIVEN, self.follow)

    @property
    def follow(self) -> int:
        """Number of tokens after the beginning of a story."""
        return self.options.new_tokens or FOLLOW

    def own_stories(self, count: int, seed: int) -> list[Text]:
        """Stories that the decoder generates from its first token. Their beginnings count as given."""
        check_reads_on(self.backbone, "--text FILE")
        first, length = [[self.backbone.config.bos_token_id or 0]], GIVEN + self.follow
        written = generated_texts(self.backbone, first, count, length, seed=self.seed + seed)
        return [Text(text.ids, GIVEN - 1) for text in written]


def check_reads_on(backbone, instead: str) -> None:
    """Raise WrongArguments for a model that needs a prompt. instead: the advice."""
    if backbone.is_encoder_decoder:
        raise WrongArguments(
            f"a {backbone.config.model_type} generates answers to the prompt of its encoder, no text without one: "
            f"give {instead}"
        )


def check_count(options: TextOptions) -> None:
    """Raise WrongArguments if fewer stories are to be generated for training than are held out."""
    if options.kind != "pieces" and options.text is None and (options.texts or HELD_STORIES) < HELD_STORIES:
        raise WrongArguments(
            f"--texts: expected at least {HELD_STORIES} stories, as many as are held out, got {options.texts}; "
            f"give more"
        )


def texts_to_learn(source: Source) -> tuple[TextData, TextData]:
    """(train, held): training texts, and held-out texts of the same kind for all choices.

    The last tenth of a file of stories is left out, because it is for tests.
    """
    options = source.options
    if options.kind == "pieces":
        if options.text is None:
            texts = source.written(TRAINING_PROMPTS, 0, options.texts or PIECES, options.greedy)
            held, every = (
                source.written(TRAINING_PROMPTS, HELD_SEED, HELD_PIECES),
                not source.backbone.is_encoder_decoder,
            )
            return TextData(texts, every), TextData(held, every)
        pieces = source.pieces()
        if len(pieces) < 2:
            raise WrongArguments("--texts: expected at least 2, one to train on and one to hold out, got 1")
        held = max(1, min(source.held, len(pieces) // 10))
        return TextData(pieces[held:], True), TextData(pieces[:held], True)
    count = options.texts or 1500
    if options.text is None:
        stories = source.own_stories(count + HELD_STORIES, 0)
    else:
        stories = source.stories()
        stories = stories[: len(stories) * 9 // 10]
    if len(stories) < 2 * HELD_STORIES:
        raise ValueError(
            f"{options.text or '--texts'}: expected at least {2 * HELD_STORIES} texts, half of them to hold out, "
            f"found {len(stories)}; give more{f' ({BETWEEN_TEXTS})' if options.text else ''}"
        )
    order = np.random.default_rng(source.seed).permutation(len(stories))
    shuffled = [stories[row] for row in order]
    return TextData(shuffled[HELD_STORIES:][:count]), TextData(shuffled[:HELD_STORIES])


def texts_to_calibrate(source: Source) -> list[Text]:
    """Texts for calibration. They are not the training texts, unless --text is the same file."""
    options = source.options
    if options.text is not None:
        texts = source.pieces() if options.kind == "pieces" else source.stories()[: options.texts]
        if not texts:
            least = f"texts of {GIVEN + source.follow} tokens or more"
            what = "sentences of 4 to 10 words" if options.kind == "copy" else least
            raise ValueError(f"{options.text}: expected {what}, found none; give another text")
        return texts
    return source.written(CALIBRATION_PROMPTS, CALIBRATION_SEED, options.texts or CALIBRATION_PIECES, options.greedy)


def texts_to_test(source: Source, count: int) -> list[Text]:
    """Texts for tests: the last tenth of a file's stories, or generated ones. Of a piece the first half is given."""
    if source.options.kind == "pieces":
        if source.options.text is None:
            return source.written(CALIBRATION_PROMPTS, TESTED_SEED, count)
        _, held = texts_to_learn(source)
        return [Text(text.ids, len(text.ids) // 2) for text in held.texts[:count]]
    if source.options.text is None:
        return source.own_stories(count, TESTED_SEED)
    stories = source.stories()
    if len(stories) < 10:
        raise ValueError(
            f"{source.options.text}: expected at least 10 texts, the last tenth to test on, found {len(stories)}"
        )
    return stories[len(stories) * 9 // 10 :][:count]


def agreement_rule(model: TokenExits, source: Source, held: TextData) -> Chosen:
    """The default rule on tokens, for a method without its own.

    It has thresholds at which a share of at least EPSILON of the held-out tokens agree with the full model. With a gate
    see `cheapest`.
    """
    recorded = record_texts(model, held.texts, progress="observing")
    rule, answer = calibrate_record(recorded, EPSILON, None, load_unit("tokens").default_measure, source.seed)
    thresholds = Chosen(rule, None, None, {"calibration": answer})
    return cheapest(recorded, thresholds, source.seed) if model.gated else thresholds


def cheapest(recorded: Record, thresholds: Chosen, seed: int) -> Chosen:
    """Of the thresholds, the gate and the short list the one that needs the fewest FLOPs, heads included; below
    LEAST_SAVED the full model.

    Gate and short list have one cut, with the conformal guarantee that EPSILON of new tokens are as the full model's.
    """
    candidates = {"thresholds": thresholds}
    if len(np.unique(recorded.groups)) >= LEAST_GROUPS:
        for name, measure in {"gate": POLICY, "short list": "short_list"}.items():
            rule, answer = calibrate_conformal(recorded, EPSILON, measure, seed)
            guarantee = {key: answer[key] for key in ("guarantee", "epsilon", "measure")}
            candidates[name] = Chosen(rule, guarantee, None, {"calibration": answer})
    flops = {name: float(recorded.replay(candidate.rule).cost.flops.mean()) for name, candidate in candidates.items()}
    saved = {name: 1 - mean_flops / recorded.full_flops for name, mean_flops in flops.items()}
    best = max(saved, key=saved.__getitem__)
    chosen = candidates[best] if saved[best] >= LEAST_SAVED else Chosen(Never(), None)
    return chosen._replace(metrics=chosen.metrics | {"net_saved": saved})
