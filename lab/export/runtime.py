"""Run an exported folder without torch: with numpy, ONNX Runtime, tokenizers, and hnswlib for a rule that retrieves.

    Runtime(folder).run(["A warm and funny film."])
    [Answer(label="positive", confidence=0.98, exit=4, layers=4, milliseconds=3.1, ...)]

    Runtime(encoder_folder).embed(["A warm and funny film."])
    array([[0.03, -0.11, ...]], dtype=float32)

    Runtime(decoder_folder).run(["Once upon a time"], max_new_tokens=50)
    [Continuation(text=" there was a little girl ...", tokens=[...], layers=[...], milliseconds=61.0)]

A batch of rows is one call of model.onnx, which stops by itself. So is one token for each text of a batch.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mini_ee.export import runtime as row_runtime
from mini_ee.export.manifest import GRAPHS, MODEL
from mini_ee.lab.confidence import labels_of, usual_measure
from mini_ee.lab.data.files import MANIFEST, file_sha256
from mini_ee.lab.data.prompt_templates import Prompt, PromptTokenizer
from mini_ee.lab.data.sentence_prompts import PromptedTokenizer, with_prompt
from mini_ee.lab.data.tokenizer import Encoded, Inputs, Tokenizer, batches, check_rows, in_order
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.exits.decoding import MISSING_KV, DecoderSegments, Step, check_ids, check_prompts, decode, gather
from mini_ee.lab.export.manifest import blaming_manifest, read_manifest
from mini_ee.lab.export.row_segments import OrtEncoder, OrtModel
from mini_ee.lab.export.sessions import CPU, GraphRule, Session, wanted_provider
from mini_ee.lab.export.token_segments import OrtTokenModel, OrtTokenSegments, Prompts, open_sessions
from mini_ee.lab.row_thresholds import RowThresholds
from mini_ee.lab.rules import Planned, Rule, rule_from_dict
from mini_ee.lab.segments import Segments, check_finite
from mini_ee.lab.token_tasks import Span, TokenTask, as_json, decided

NEW_TOKENS = 100
DECIMALS = 3  # of the milliseconds that are printed
ID_DIGITS = 12  # hexadecimal digits of a model id
RECOMPUTE = "--missing-kv recompute needs graphs by segment; export the run with --segments, or leave out --missing-kv"


def open_tokenizer(folder: Path, manifest: dict) -> Tokenizer:
    """The tokenizer of an exported folder. It inserts texts into the prompt if the model reads them through one."""
    length = None if manifest["unit"] == "tokens" else manifest["max_length"]
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json", length)
    if "prompts" in manifest:
        given = manifest["prompts"], manifest["default_prompt_name"]
        return PromptedTokenizer(tokenizer.backend, manifest["max_length"], *given)
    if "prompt" not in manifest:
        return tokenizer
    return PromptTokenizer(tokenizer.backend, manifest["max_length"], Prompt.from_dict(manifest["prompt"]))


def vocabulary_sizes(manifest: dict) -> tuple[int, int | None]:
    """The number of tokens and of token types of the model; None if it reads no token types."""
    backbone = manifest["backbone"]
    reads_types = "token_type_ids" in manifest["graphs"]["model"]["inputs"]
    return backbone["vocab_size"], backbone.get("type_vocab_size") if reads_types else None


def open_rule(folder: Path, manifest: dict, provider: str = CPU, threads: int = 0) -> Rule:
    """The rule of an exported folder; if it retrieves, with the encoder and its files."""
    rule = rule_from_dict(manifest["rule"])
    return rule.served(folder, OrtEncoder(folder, manifest, provider, threads)) if "encoder" in manifest else rule


class Answer(row_runtime.Answer):
    """The result for one row, for the commands."""

    def agrees(self, other: "Answer") -> bool:
        """Whether both have the same label, the same labels, or the same span."""
        return decided(self.label) == decided(other.label)

    def to_dict(self) -> dict:
        """What `mini-ee run` prints."""
        fields = self._asdict()
        del fields["logits"]
        if isinstance(self.label, list | Span):
            fields["label"] = as_json(self.label)
        return fields | {"milliseconds": round(self.milliseconds, DECIMALS)}


class Embedding(NamedTuple):
    """The embedding of one text."""

    embedding: np.ndarray  # (d,) float32
    exit: int  # the layer of its exit
    layers: int | float  # the same number, or the mean depth of the tokens if these exit within the text
    milliseconds: float  # of its batch, over the rows of that batch

    def to_dict(self) -> dict:
        """What `mini-ee run` prints."""
        milliseconds = round(self.milliseconds, DECIMALS)
        return self._asdict() | {"embedding": self.embedding.tolist(), "milliseconds": milliseconds}


class Continuation(NamedTuple):
    """The text that a decoder generated after a prompt."""

    text: str
    tokens: list[int]
    layers: list[int]  # depth of each token
    milliseconds: float  # of its batch, over the rows of that batch

    def to_dict(self) -> dict:
        """What `mini-ee run` prints."""
        fields = self._asdict()
        milliseconds = round(fields.pop("milliseconds"), DECIMALS)
        return fields | {"mean_layers": float(np.mean(self.layers)), "milliseconds": milliseconds}


class Runtime:
    """An exported folder, checked and ready to run.

    providers: ONNX Runtime's names, the first one is used (default: CUDA if available, else the CPU). `provider` is the
    one in use. A given provider that is not available is an error, unless allow_fallback. threads: CPU threads for a
    batch (default: ONNX Runtime's choice); see also share_threads. segments: another engine for the same folder
    (torch_engine.torch_segments) instead of ONNX Runtime. `model_id` differs if any file but the card differs.

    Raises FileNotFoundError if the folder or one of its files is missing; ValueError if a file is not the exported one,
    or if a provider is not available. Several threads may call `run`. A copy in another process opens
    the folder again, with the same arguments and rule; it raises ValueError if the folder has another model by then.
    """

    is_exported = True  # False of a training.run_folder.Run
    generates = embeds = False

    def __new__(cls, folder: str | Path, *arguments, **settings) -> "Runtime":
        """The folder of a decoder gives a TokenRuntime, that of a sentence encoder an EmbeddingRuntime."""
        config = read_manifest(Path(folder))
        cls = {"tokens": TokenRuntime, "embeddings": EmbeddingRuntime}.get(config["unit"], cls)
        runtime = super().__new__(cls)
        runtime.config, runtime._opening = config, partial(Runtime, Path(folder).absolute(), *arguments, **settings)
        return runtime

    def __reduce__(self) -> tuple:
        return _opened_again, (self._opening, self.model_id, None if self.rule is self._own_rule else self.rule)

    def __init__(
        self,
        folder: str | Path,
        providers: Sequence[str] | None = None,
        *,
        threads: int = 0,
        allow_fallback: bool = False,
        segments: Segments | None = None,
    ):
        self.folder, self.provider, self._threads = Path(folder), None, threads
        self.name = self.folder.absolute().name  # by which a server's clients know it
        self.exits, self.model_id = tuple(self.config["exits"]), file_sha256(self.folder / MANIFEST)[:ID_DIGITS]
        with blaming_manifest(self.folder):
            self._sizes = vocabulary_sizes(self.config)
            self.tokenizer = open_tokenizer(self.folder, self.config)
            if segments is None:
                wanted = wanted_provider(providers, allow_fallback)
                segments, self.provider = self._open(wanted)
                if self.provider != wanted and providers and not allow_fallback:
                    fallback = f"but ONNX Runtime fell back to {self.provider}"
                    raise ValueError(f"expected {wanted}, {fallback}; install the libraries that it needs")
            self._segments = segments
            self.rule = self._own_rule = open_rule(self.folder, self.config, self.provider or CPU, threads)
            self.rule.check(len(self.exits))

    def _open(self, provider: str) -> tuple[Segments, str]:
        """The engine of ONNX Runtime, and its provider."""
        segments = OrtModel(self.folder, self.config, provider, self._threads)
        return segments, segments.provider

    @property
    def label_names(self) -> list[str]:
        """Empty in a regression."""
        return self.config["task"]["label_names"]

    @property
    def multi_label(self) -> bool:
        """Whether a row may have several labels at once."""
        return self.config.get("task", {}).get("multi_label", False)

    @property
    def token_task(self) -> TokenTask | None:
        """What it decides about tokens, if they have labels, or if a span of them is the answer."""
        return TokenTask.of(self.config)

    @property
    def default_measure(self) -> str:
        """The confidence measure of a rule, if none is named."""
        return usual_measure(self.multi_label, self.token_task is not None)

    @property
    def num_texts(self) -> int:
        """Texts per row, 1 or 2."""
        return self.config["task"]["texts"]

    @property
    def engine(self) -> str:
        """The name of the engine."""
        return self._segments.engine

    @property
    def weight_bytes(self) -> int:
        """Bytes on disk of the graphs and the weights that they share."""
        return sum(path.stat().st_size for path in (self.folder / GRAPHS).iterdir())

    def segments(self) -> Segments:
        """The segments that `early_exit` runs."""
        return self._segments

    def whole_model(self) -> Segments:
        """The same model without early exits, on the same device, with which a speed-up is compared."""
        return self._segments.whole()

    def encode(self, texts) -> Encoded:
        """Tokenize rows of one or two texts. Raises ValueError for a token that the model does not have, and as `run`
        does.
        """
        return self.tokenizer.encode_for(texts, *self._sizes)

    def check(self, row: str | Sequence[str]) -> bool:
        """Whether a row is cut to max_length. Raises ValueError for a row that cannot be classified."""
        return self.encode([row]).truncated > 0

    def warm_up(self) -> None:
        """Run a sentence to each exit, because the first run of a graph is slower."""
        inputs = self.encode([("warm up",) * self.num_texts]).batch(slice(None))
        for k in range(len(self.exits)):
            early_exit(self._segments, Planned([k]), inputs)

    def run(
        self, texts: Sequence, batch_size: int = 32, rule: Rule | None = None, thresholds: np.ndarray | None = None
    ) -> list[Answer]:
        """Answers in the order of the texts; rows of two texts are tuples. The batch bounds the memory.

        thresholds: (N, K - 1), those of each text in place of the rule's, see row_thresholds.py.
        Raises ValueError for a text that is empty or not a string, and for a row with another number of texts.
        """
        rule = rule or self.rule
        check_rows(texts, self.num_texts)
        answers: list[Answer | None] = [None] * len(texts)
        encoded = self.encode(texts)
        order = list(batches(encoded, batch_size))
        begin = time.perf_counter()  # the time of a batch includes its plan
        for rows, (inputs, planned) in zip(order, rule.of_batches(map(encoded.batch, order))):
            row_rule = planned if thresholds is None else RowThresholds(planned, thresholds[rows])
            result = early_exit(self._segments, row_rule, inputs)
            milliseconds = (time.perf_counter() - begin) * 1e3 / len(rows)
            exits = result.exit_index.tolist(), result.cost.depth.tolist()
            for row, answer in zip(rows, self.answers(result.logits, inputs, *exits, milliseconds)):
                answers[row] = answer
            begin = time.perf_counter()
        return answers

    def answers(
        self, logits: np.ndarray, inputs: Inputs, exit_index: Sequence[int], layers: Sequence[float], took: float = 0
    ) -> list[Answer]:
        """Answers of rows that exited with these logits (N, C), or (N, T, C). took: milliseconds of each."""
        labels, exits = labels_of(self, logits, inputs), (self.exits[k] for k in exit_index)
        return list(map(Answer, *labels, exits, layers, repeat(took), logits))


def _opened_again(opening: Callable[[], Runtime], model_id: str, rule: Rule | None) -> Runtime:
    """A copy of a Runtime, which Spark, joblib and multiprocessing make in another process."""
    runtime = opening()
    if runtime.model_id != model_id:
        raise ValueError(f"{runtime.folder}: expected the model {model_id}, found {runtime.model_id}; open it anew")
    runtime.rule = rule or runtime.rule
    return runtime


class EmbeddingRuntime(Runtime):
    """An exported sentence encoder, checked and ready to run; Runtime(folder) makes it."""

    embeds = True

    def embed(
        self, texts: Sequence[str], batch_size: int = 32, rule: Rule | None = None, prompt_name: str | None = None
    ) -> np.ndarray:
        """The embedding of each text, (N, d) float32. prompt_name: of the encoder's prompts (None: its default one).

        Raises ValueError as `run` does, and for an unknown prompt.
        """
        check_rows(texts, 1)
        embeddings = [
            result.embedding for result in self.run(with_prompt(self.tokenizer, texts, prompt_name), batch_size, rule)
        ]
        return np.array(embeddings, np.float32).reshape(len(texts), self.config["num_labels"])

    def answers(
        self, logits: np.ndarray, inputs: Inputs, exit_index: Sequence[int], layers: Sequence[float], took: float = 0
    ) -> list[Embedding]:
        """Embeddings (N, d) of rows that exited."""
        exits = (self.exits[k] for k in exit_index)
        return list(map(Embedding, check_finite(logits, "the embeddings"), exits, layers, repeat(took)))


def _prompt(row: str | Sequence[str]) -> str:
    """The prompt of a row, which may be a tuple with one text."""
    return row[0] if isinstance(row, tuple | list) and len(row) == 1 else row


class TokenRuntime(Runtime):
    """An exported decoder, checked and ready to generate; Runtime(folder) makes it.

    missing_kv: "copy_state" or "recompute", see generation.py (default: as in training). max_new_tokens: for `run`
    (default NEW_TOKENS, at most half of the context). segments: another engine instead of ONNX Runtime, as a function
    (missing_kv, rows, capacity in tokens) -> DecoderSegments. Other arguments and errors as of Runtime.
    """

    num_texts = 1
    generates = True
    default_measure = "breaking_ties"

    def __init__(
        self,
        folder: str | Path,
        providers: Sequence[str] | None = None,
        *,
        missing_kv: str | None = None,
        max_new_tokens: int | None = None,
        segments: Callable[[str, int, int], DecoderSegments] | None = None,
        **settings,
    ):
        missing_kv = missing_kv or self.config.get("missing_kv", MISSING_KV[0])
        if missing_kv not in MISSING_KV:
            raise ValueError(f"missing_kv must be one of {', '.join(MISSING_KV)}, got {missing_kv!r}")
        self.missing_kv, self._model, self._prompts = missing_kv, None, None
        super().__init__(folder, providers, segments=segments, **settings)
        default = min(NEW_TOKENS, max(1, self.config["max_tokens"] // 2))
        self.max_new_tokens = default if max_new_tokens is None else max_new_tokens
        if self._model and missing_kv == "recompute" and not self.by_segment:
            raise ValueError(f"{self.folder}: {RECOMPUTE}")

    def _open(self, provider: str) -> tuple[Callable[[str, int, int], DecoderSegments], str]:
        exported = self.folder, self.config
        self._model, self._graph_rule = Session(self.folder / MODEL, provider, self._threads), GraphRule(*exported)
        sessions = cache(partial(open_sessions, *exported, provider, self._threads))
        if self.decoder_start_tokens is not None:
            self._prompts = Prompts(*exported, provider, self._threads)

        def by_segment(missing_kv: str, num_rows: int, capacity: int) -> OrtTokenSegments:
            return OrtTokenSegments(sessions(), self.config, missing_kv, num_rows, capacity)

        return by_segment, self._model.provider

    @property
    def engine(self) -> str:
        """The name of the engine."""
        return "onnxruntime" if self._model else self._segments(self.missing_kv, 1, 1).engine

    @property
    def by_segment(self) -> bool:
        """Whether graphs by segment were exported too."""
        return f"segment_{self.exits[0]}" in self.config["graphs"]

    def segments(
        self, num_rows: int, capacity: int, missing_kv: str | None = None, rule: Rule | None = None
    ) -> DecoderSegments:
        """The engine of one batch of texts, for `decode`: model.onnx, or graphs by segment if it does not contain the
        rule or `missing_kv`. Raises ValueError if those were not exported.
        """
        missing_kv, rule = missing_kv or self.missing_kv, rule or self.rule
        if self._model is None:
            return self._segments(missing_kv, num_rows, capacity)
        in_graph = self._graph_rule.feeds(rule, None) is not None
        if in_graph and missing_kv == "copy_state":
            return self.one_graph(num_rows, capacity)
        if not self.by_segment:
            raise self._graph_rule.unsupported(rule) if not in_graph else ValueError(f"{self.folder}: {RECOMPUTE}")
        return self._segments(missing_kv, num_rows, capacity)

    def one_graph(self, num_rows: int, capacity: int) -> OrtTokenModel:
        """model.onnx in ONNX Runtime, for one batch of texts."""
        return OrtTokenModel(self._model, self._graph_rule, self.config, num_rows, capacity, self._prompts)

    def encode(self, text: str, max_new_tokens: int | None = None) -> list[int]:
        """Token ids of a prompt. Raises ValueError if it is empty, or too long for the context with max_new_tokens."""
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"expected a prompt, found {'no text' if isinstance(text, str) else repr(text)}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"expected text in UTF-8, found {text[:40]!r}") from None
        ids = self.tokenizer.ids_of(text)
        self.tokenizer.check_ids(ids, self.config["vocab_size"], text)
        self._check([ids], self.max_new_tokens if max_new_tokens is None else max_new_tokens)
        return ids

    def check(self, row: str | Sequence[str]) -> bool:
        """False: a prompt is never cut. Raises ValueError for a prompt that cannot be continued."""
        self.encode(_prompt(row))
        return False

    def warm_up(self) -> None:
        """Generate two tokens, because the first run of a session is slower."""
        gather(self.generate([[0]], max_new_tokens=2), 1)

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, rule: Rule | None = None
    ) -> Iterator[Step]:
        """Greedy continuations of token ids, one step per token. Raises ValueError as generation.generate does."""
        rule = rule or self.rule
        rule.check(len(self.exits))
        segments = self.segments(len(prompts), self._check(prompts, max_new_tokens), rule=rule)
        return decode(segments, prompts, max_new_tokens, rule, stop=self.config["stop"])

    def run(
        self,
        texts: Sequence[str | tuple[str]],
        batch_size: int = 32,
        rule: Rule | None = None,
        max_new_tokens: int | None = None,
    ) -> list[Continuation]:
        """The continuation of each text, in their order. Raises ValueError as `encode` does."""
        count = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        check_rows(texts, self.num_texts)
        prompts = [self.encode(_prompt(row), count) for row in texts]
        answers = []
        for rows in in_order(len(prompts), batch_size):
            some = prompts[rows]
            begin = time.perf_counter()
            generated = gather(self.generate(some, max_new_tokens=count, rule=rule), len(some))
            milliseconds = (time.perf_counter() - begin) * 1e3 / len(some)
            for prompt, (tokens, layers) in zip(some, generated):
                answers.append(Continuation(self.text_after(prompt, tokens), tokens, layers, milliseconds))
        return answers

    def text_after(self, prompt: list[int], tokens: list[int]) -> str:
        """The text of the tokens after the prompt. Both are decoded together, as spaces depend on the token before."""
        decoded = self.tokenizer.backend.decode
        return decoded(prompt + tokens)[len(decoded(prompt)) :]

    @property
    def decoder_start_tokens(self) -> list[int] | None:
        """The tokens with which the decoder starts if an encoder reads the prompt, else None."""
        return self.config.get("begins_with")

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
        sizes = self.config["vocab_size"], self.config["max_tokens"]
        check_ids(prompts, sizes[0])
        longest = max(map(len, prompts))
        if self.decoder_start_tokens is not None and longest > sizes[1]:
            raise ValueError(f"expected a prompt of at most {sizes[1]} tokens, got {longest}: shorten it")
        starts = prompts if self.decoder_start_tokens is None else [self.decoder_start_tokens]
        return check_prompts(starts, max_new_tokens, *sizes)
