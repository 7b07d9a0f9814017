"""T5 token by token: the encoder reads the prompt once, tokens leave the decoder early; caches change nothing."""

import json
import random
import shutil

import numpy as np
import pytest
import torch
from conftest import WORDS, random_decoder
from in_process import answer, refused
from t5_cases import ENGINES, GOLDEN, KINDS, assert_close, golden, t5_folder  # noqa: F401
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import mini_ee.lab.baselines.free as free
from mini_ee.lab.backbones.cache import Cache
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.backbones.t5_layers import EncoderLayer, Layer, Pairs
from mini_ee.lab.baselines.sleb import next_token_losses
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.exits.decoding import Tokens, decode, gather, greedy
from mini_ee.lab.exits.generation import Sampling, generate, generated_texts, token_segments
from mini_ee.lab.exits.lossless import generate_lossless
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.exits.token_exits import TextData, TokenExits
from mini_ee.lab.export.manifest import _check_values
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.sessions import CPU, GraphRule, Session
from mini_ee.lab.export.token_graphs import TokenGraphs
from mini_ee.lab.export.token_segments import OrtTokenModel, OrtTokenSegments, open_sessions
from mini_ee.lab.export.verification import drawn_text
from mini_ee.lab.export.writer import write_graphs
from mini_ee.lab.rules import Fixed, Never, Threshold
from mini_ee.lab.training.run_folder import load_run
from mini_ee.lab.training.stages import Batch
from mini_ee.serve import Worker, engine_of

PROMPTS = ([5, 9, 30, 7, 1], [44, 3, 1], [8, 8, 21, 60, 13, 2, 1])
NEW_TOKENS = 9
MIXED = {"t5": 0.12, "t5-v1.1": 0.1}  # thresholds under which tokens leave at every exit


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def exits_of(kind, init="copy"):
    """A T5 with exits, whose heads were drawn a little away from the model's own."""
    torch.manual_seed(1)
    model = TokenExits(golden(kind)[0], (1, 2, 3), init).eval()
    for head in model.heads:
        head.linear.weight += 0.1 * torch.randn_like(head.linear.weight)
    return model


def written(model, rule, prompts=PROMPTS, **settings):
    settings = {"max_new_tokens": NEW_TOKENS, "stop": ()} | settings
    return [(text.tokens, text.layers_run) for text in gather(model.generate(prompts, rule, **settings), len(prompts))]


def output(model, k, prompt, tokens):
    """What exit k says after the tokens, all read anew without a cache: logits (V,)."""
    pairs = Pairs(torch.tensor([prompt]), None, torch.tensor([[0, *tokens]]))
    hidden = model.backbone.run_layers(model.backbone.embed(pairs), model.backbone.context(pairs), 0, model.exits[k])
    return model.classify(k, hidden[0, -1])


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_that_of_transformers(kind):
    model, inputs, expected = golden(kind)
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(*inputs[:2])]
    texts = gather(generate(model, prompts, max_new_tokens=24), 3)
    assert [row.tokens for row in texts] == expected["greedy"].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_over_a_cache_are_the_whole_answer(kind):
    """Token by token, in blocks, and for some of the rows, against all tokens at once."""
    model, inputs, expected = golden(kind)
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(*inputs[:2])]
    for blocks in ([1] * 10, [4, 1, 5]):
        cache, at = Cache(model, 3, 10), 0
        model.read_prompts(prompts, cache)
        for tokens in blocks:
            hidden = model.embed_written(inputs.decoder_input_ids[:, at : at + tokens], torch.arange(at, at + tokens))
            hidden = model.run_layers(hidden, model.aligned_block(at, tokens, cache), 0, 3)
            assert_close(model.lm_logits(hidden), expected["lm_logits"][:, at : at + tokens])
            at += tokens
    rows, cache = [2, 0], Cache(model, 3, 10)
    model.read_prompts(prompts, cache)
    positions = torch.tensor([[-1, 0, 1], [0, 1, 2]])
    ids = inputs.decoder_input_ids[rows].gather(1, positions.clamp(min=0))
    logits = model.lm_logits(
        model.run_layers(model.embed_written(ids, positions), model.block(positions, cache, rows), 0, 3)
    )
    assert_close(logits[0, 1:], expected["lm_logits"][2, :2])
    assert_close(logits[1], expected["lm_logits"][0, :3])
    with pytest.raises(ValueError, match="expected at most 10 tokens, got 11: ask for fewer tokens"):
        model.block(torch.tensor([[10]] * 3), cache)


@pytest.mark.parametrize("kind", KINDS)
def test_with_recompute_tokens_are_those_of_their_exits_without_a_cache(kind):
    model = exits_of(kind)
    for rule in (Fixed(1), Threshold(MIXED[kind])):
        depths = set()
        for prompt, (tokens, layers) in zip(PROMPTS, written(model, rule, missing_kv="recompute")):
            for count, (token, layer) in enumerate(zip(tokens, layers)):
                assert token == int(output(model, layer - 1, prompt, tokens[:count]).argmax())
            depths |= set(layers)
        assert depths == {1, 2, 3} or isinstance(rule, Fixed)


def with_copied_states(model, prompt, tokens, layers):
    """Logits of each step by loops: a token that left after layer e stands in, with that state, above it."""
    backbone, states, answers = model.backbone, [], []
    for count in range(len(tokens)):
        decoder_ids = [0, *tokens][: count + 1]
        pairs = Pairs(torch.tensor([prompt]), None, torch.tensor([decoder_ids]))
        context, hidden = backbone.context(pairs), backbone.embed(pairs)
        for depth in range(layers[count]):
            hidden = backbone.run_layers(hidden, context, depth, depth + 1)
            for at, (left, state) in enumerate(states):
                if left <= depth + 1:
                    hidden[0, at] = state
        states.append((layers[count], hidden[0, -1].clone()))
        answers.append(model.classify(layers[count] - 1, hidden[0, -1]))
    return answers


@pytest.mark.parametrize("kind", KINDS)
def test_with_copy_state_a_state_stands_in_for_those_above_it(kind):
    model, seen = exits_of(kind), []

    def choose(logits, rows):
        seen.append(torch.from_numpy(logits))
        return greedy(logits, rows)

    steps = decode(token_segments(model, "copy_state", 3, 12), PROMPTS, NEW_TOKENS, Threshold(MIXED[kind]), choose)
    texts = gather(steps, 3)
    assert {layer for text in texts for layer in text.layers_run} == {1, 2, 3}
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts)):
        expected = with_copied_states(model, prompt, *text)
        assert_close(torch.stack([logits[row] for logits in seen]), torch.stack(expected))


@pytest.mark.parametrize("missing_kv", ["copy_state", "recompute"])
def test_a_batch_of_prompts_is_its_prompts_alone(missing_kv):
    model = exits_of("t5")
    together = written(model, Threshold(MIXED["t5"]), missing_kv=missing_kv)
    alone = [written(model, Threshold(MIXED["t5"]), [prompt], missing_kv=missing_kv)[0] for prompt in PROMPTS]
    assert together == alone and len({layer for _, layers in together for layer in layers}) == 3


def test_lossless_text_is_the_full_models():
    model = exits_of("t5-v1.1")
    full = written(model, Never())
    options = {"exit_layer": 2, "head": model.heads[1], "confidence_threshold": 0.0}
    steps = generate_lossless(model.backbone, PROMPTS, max_new_tokens=NEW_TOKENS, **options)
    texts = gather(steps, 3)
    assert [text.tokens for text in texts] == [tokens for tokens, _ in full]
    assert any(2 in text.layers_run for text in texts)


def test_the_encoder_runs_once_and_keys_of_its_output_are_made_once_where_a_token_comes(monkeypatch):
    model, made, encoded = exits_of("t5"), [], []
    right = EncoderLayer.forward
    monkeypatch.setattr(EncoderLayer, "forward", lambda self, *x: encoded.append(len(x[0])) or right(self, *x))
    heads = Layer.memory_heads
    depth_of = {id(layer): depth for depth, layer in enumerate(model.backbone.layers)}
    monkeypatch.setattr(
        Layer,
        "memory_heads",
        lambda self, memory, adapt=None: made.append((depth_of[id(self)], len(memory))) or heads(self, memory, adapt),
    )
    written(model, Fixed(0))
    assert encoded == [3, 3] and made == [(0, 3)]
    made.clear()
    written(model, Never())
    assert made == [(0, 3), (1, 3), (2, 3)]
    made.clear()
    written(model, Threshold(MIXED["t5"]))
    assert max(sum(rows for depth, rows in made if depth == layer) for layer in range(3)) <= 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokens_operations_are_those_that_torch_counts_less_the_two_products_with_what_was_made_of_the_prompt(kind):
    model, prompt = exits_of(kind), PROMPTS[0]
    segments, config = token_segments(model, "copy_state", 1, 12), model.backbone.config
    early_exit(segments, Never(), segments.begin([prompt]))  # the first token has keys and values made of it
    second = Tokens([[7]], [0], [[1]])
    state = segments.start(second)
    for k in range(3):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            state = segments.advance(k, state)
        products = 2 * 2.0 * config.num_attention_heads * config.head_width * len(prompt)
        assert segments.flops(k, second)[0] == [counter.get_total_flops() - products]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_the_repetition_penalty_weakens_what_was_written_alone_as_in_transformers(kind):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(GOLDEN / kind).eval()
    theirs.generation_config.eos_token_id = None
    settings = {"max_new_tokens": 12, "do_sample": False, "use_cache": False, "repetition_penalty": 1.5}
    sampling = Sampling(repetition_penalty=1.5)
    for prompt in PROMPTS:
        (text,) = gather(generate(load_backbone(GOLDEN / kind), [prompt], max_new_tokens=12, sampling=sampling), 1)
        assert text.tokens == theirs.generate(torch.tensor([prompt]), **settings)[0, 1:].tolist()


def test_wrong_prompts_are_told():
    model = golden("t5")[0]
    for prompts, message in (
        ([[]], "expected prompts of at least one token each"),
        ([[64]], "token ids must be from 0 to 63, got 64"),
        ([[3] * 513], "expected at most 512 tokens, got 513: truncate the input"),
    ):
        with pytest.raises(ValueError, match=message):
            list(generate(model, prompts, max_new_tokens=2))
    with pytest.raises(ValueError, match="prompt and continuation together, got 1 and 512"):
        generate(model, PROMPTS, max_new_tokens=512)
    assert len(gather(generate(model, [[3] * 500], max_new_tokens=20), 1)[0].tokens) == 20  # each has its own room


# ---- Whole texts ----


def test_texts_are_read_as_they_were_written():
    """The states of every exit at every token that counts are those of the text's own prompt and answer."""
    model = exits_of("t5")
    texts = TEXTS
    (ids, counted), labels = TextData(texts).batch(np.arange(3), torch.device("cpu"))
    assert labels.tolist() == [12, 13, 14, 22, 60, 61]
    states = model.states(ids, counted)
    at = 0
    for text in texts:
        prompt, tokens = text.ids[: text.start + 1], text.ids[text.start + 1 :]
        for count in range(len(tokens)):
            for k in range(3):
                assert_close(model.classify(k, states[k][at]), output(model, k, prompt, tokens[:count]))
            at += 1
    record = record_texts(model, texts)
    assert record.groups.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2]
    prompt, tokens = texts[0].ids[:5], texts[0].ids[5:]
    for at in range(4):
        for k in range(3):
            log_p = output(model, k, prompt, tokens[:at]).log_softmax(-1)
            assert record.predictions[at, k] == int(log_p.argmax())
            if at < 3:
                np.testing.assert_allclose(record.logits[at, k, 0], float(log_p[tokens[at]]), atol=1e-5)
    scored = record_texts(model, texts, last=False)
    np.testing.assert_allclose(scored.logits[:3], record.logits[:3], atol=1e-6)
    assert len(scored.logits) == 6


def test_texts_that_it_writes_are_replayed_as_they_were_decoded():
    model = exits_of("t5-v1.1")
    texts = generated_texts(model.backbone, PROMPTS, 3, 6, greedy=True)
    full = written(model, Never(), max_new_tokens=6)
    assert [text.ids for text in texts] == [prompt + tokens[:-1] for prompt, (tokens, _) in zip(PROMPTS, full)]
    record = record_texts(model, texts)
    assert record.predictions[:, -1].tolist() == [token for tokens, _ in full for token in tokens]


TEXTS = [Text([5, 9, 30, 7, 1, 12, 13, 14], 4), Text([44, 1, 22], 1), Text([8, 1, 60, 61], 1)]


def test_sleb_and_free_look_at_the_tokens_of_the_answers(monkeypatch):
    """A layer's loss is that of the answers; layers are matched where a token of an answer stands."""
    model, data = exits_of("t5"), TextData(TEXTS)
    inputs, labels = data.batch(np.arange(3), torch.device("cpu"))
    answers = [(text.ids[: text.start + 1], text.ids[text.start + 1 :]) for text in TEXTS]
    logits = [output(model, 2, prompt, tokens[:at]) for prompt, tokens in answers for at in range(len(tokens))]
    expected = float(torch.nn.functional.cross_entropy(torch.stack(logits), labels))
    assert next_token_losses(model.backbone, data, (0, 1, 2))[-1] == pytest.approx(expected, abs=1e-5)
    matched = []
    monkeypatch.setattr(free, "distillation", lambda states, *config: matched.extend(states) or 0.0)
    free.shallow_deep_loss(free.FreeTokens(model.backbone, (1, 3)), Batch(inputs, labels, None, None), free.Config())
    for normed, state in zip(matched, model.states(*inputs), strict=True):
        assert_close(normed, model.backbone.norm(state))


# ---- From a checkpoint to a text ----


@pytest.fixture
def stories(tmp_path):
    """A file of texts of 60 words each."""
    draw = random.Random(0)
    (tmp_path / "stories.txt").write_text("\n\n".join(" ".join(draw.choices(WORDS, k=60)) for _ in range(64)))
    return tmp_path / "stories.txt"


@pytest.fixture(scope="module")
def run_folder(t5_folder, tmp_path_factory):  # noqa: F811
    """A run on the T5 with its tokenizer, with exits after layers 1 and 3."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train = ("--model", t5_folder, "--exits", "1,3", "--out", folder, "--epochs", 1, "--new-tokens", 8)
    with torch.enable_grad():
        train = ("train", "self-supervised", *train, "--texts", 16, "--prompt", "the film was")
        assert main([*map(str, train)]) == 0
    return folder


def test_a_method_of_tokens_is_trained_calibrated_and_writes(run_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mini_ee.lab.training.training_text.CALIBRATION_PIECES", 24)
    shutil.copytree(run_folder, tmp_path / "run")
    output = answer(capsys, "generate", tmp_path / "run", "--prompt", "the film was very", "--max-new-tokens", 6)
    run = load_run(tmp_path / "run")
    assert run.exits == (1, 3)
    ids = run.tokenizer.backend.encode("the film was very").ids
    assert ids[-1] == 1 and len(output["tokens"]) <= 6
    ((tokens, layers),) = written(run.model, run.rule, [ids], max_new_tokens=6, stop=(1,))
    assert (output["tokens"], output["layers"]) == (tokens, layers)
    lossless = answer(capsys, "generate", tmp_path / "run", "--prompt", "the film", "--max-new-tokens", 6, "--lossless")
    plain = answer(
        capsys, "generate", tmp_path / "run", "--prompt", "the film", "--max-new-tokens", 6, "--rule", "never"
    )
    assert lossless["tokens"] == plain["tokens"]
    answer(capsys, "calibrate", tmp_path / "run", "--epsilon", 0.5, "--texts", 24)


def test_a_prompt_takes_no_room_from_the_answer(t5_folder, capsys, monkeypatch):  # noqa: F811
    """The encoder reads it: 500 of 512 tokens leave as many to write as one does."""
    backbone, tokenizer = load_backbone(t5_folder), Tokenizer.from_folder(t5_folder)
    long = " ".join(["film"] * 500)
    assert backbone.room([tokenizer.ids_of(long), [5]]) == 511 and random_decoder("llama", 2).room([[5], [6, 7]]) == 38
    monkeypatch.setattr("mini_ee.lab.cli.generate.WRITTEN_TOKENS", 20)
    monkeypatch.setattr(type(backbone.config), "stop_tokens", ())
    output = answer(capsys, "generate", t5_folder, "--prompt", long)
    assert 500 < output["prompt_tokens"] <= 512 and len(output["tokens"]) == 20


def test_calm_learns_from_stories_whose_beginnings_the_encoder_reads(
    t5_folder,  # noqa: F811
    stories,
    tmp_path,
    capsys,
    monkeypatch,
):
    monkeypatch.setattr("mini_ee.lab.training.training_text.HELD_STORIES", 16)
    options = ("--model", t5_folder, "--exits", "1,3", "--out", tmp_path / "run", "--epochs", 1, "--text", stories)
    with torch.enable_grad():
        report = answer(capsys, "train", "calm", *options, "--new-tokens", 4, "--texts", 40)
    assert report["exits"] == [1, 3] and load_run(tmp_path / "run").model.policy is not None


def test_texts_that_begin_with_nothing_are_refused_in_one_line(t5_folder, stories, tmp_path, capsys):  # noqa: F811
    model = ("--model", t5_folder, "--out", tmp_path / "run")
    output = refused(capsys, "train", "self-supervised", *model, "--text", stories)
    assert "a t5 generates answers to the prompt of its encoder, no text without one" in output
    assert "give --task continue or copy" in output
    output = refused(capsys, "train", "calm", *model)
    assert "give --text FILE" in output


# ---- The export ----


def opened(folder, model, manifest, missing_kv):
    """What decodes by segment, and with copy_state the one graph."""
    sessions = open_sessions(folder, manifest, threads=1)
    yield OrtTokenSegments(sessions, manifest, missing_kv, 3, 12)
    if missing_kv == "copy_state":
        graph_rule = GraphRule(folder, manifest)
        yield OrtTokenModel(Session(folder / "onnx/model.onnx", CPU, 1), graph_rule, manifest, 3, 12, sessions.prompts)


@pytest.mark.parametrize("kind", KINDS)
def test_every_exit_says_in_onnx_what_it_says_in_torch_wherever_tokens_leave(kind, tmp_path):
    model = exits_of(kind)
    manifest = write_graphs(model, TokenGraphs(model), Threshold(MIXED[kind]), tmp_path, segments=True)
    for missing_kv in ("copy_state", "recompute"):
        expected, tokens = drawn_text(token_segments(model, missing_kv, 3, 12), PROMPTS, NEW_TOKENS, 0)
        for segments in opened(tmp_path, model, manifest, missing_kv):
            logits, _ = drawn_text(segments, PROMPTS, NEW_TOKENS, 0, tokens)
            assert max(abs(mine - theirs).max() for mine, theirs in zip(expected, logits, strict=True)) < ENGINES
        for segments in opened(tmp_path, model, manifest, missing_kv):
            texts = gather(decode(segments, PROMPTS, NEW_TOKENS, Threshold(MIXED[kind])), 3)
            assert [tuple(text) for text in texts] == written(model, Threshold(MIXED[kind]), missing_kv=missing_kv)


def test_heads_from_scratch_are_drawn_as_t5_draws_its_own():
    backbone = golden("t5")[0]
    for head in TokenExits(backbone, (1, 2, 3), "scratch").heads[:2]:
        assert head.linear.weight.std().item() == pytest.approx(backbone.config.hidden_size**-0.5, rel=0.1)


def exported(run_folder, tmp_path, capsys, *options):
    """The figures of the export's verification."""
    (tmp_path / "texts").write_text("the film was good\na very very dull song\n")
    return answer(capsys, "export", run_folder, "--out", tmp_path / "out", *options)["verified"]


@pytest.mark.parametrize("precision", ["--int8", "--fp16"])
def test_it_is_exported_in_other_precisions_and_writes(run_folder, tmp_path, capsys, precision):
    exported(run_folder, tmp_path, capsys, precision)
    files = (tmp_path / "texts", "--out", tmp_path / "answers", "--max-new-tokens", 6)
    assert answer(capsys, "run", tmp_path / "out", *files)["rows"] == 2


def test_it_is_exported_and_served_by_both_engines(run_folder, tmp_path, capsys):
    output = exported(run_folder, tmp_path, capsys, "--segments")
    assert output["max_logit_difference"] < 1e-4 and output["exit_agreement"] == 1
    run, runtime = load_run(run_folder), Runtime(tmp_path / "out", threads=1)
    assert runtime.decoder_start_tokens == [0]
    with pytest.raises(ValueError, match="a value of a wrong type for 'begins_with'"):
        _check_values(runtime.config | {"begins_with": "0"}, tmp_path)
    ids = [runtime.encode(text, 6) for text in ("the film was good", "a very very dull song")]
    answered = gather(runtime.generate(ids, max_new_tokens=6), 2)
    assert [tuple(text) for text in answered] == written(run.model, run.rule, ids, max_new_tokens=6, stop=(1,))
    texts = ["the film was good", "a very very dull song", "the film"] * 2
    with Worker(engine_of(runtime)) as worker:
        served = [future.result(60) for future in [worker.submit(text, max_new_tokens=6) for text in texts]]
        with pytest.raises(ValueError, match="expected a prompt of at most 512 tokens"):
            worker.submit("film " * 600).result(60)  # attention over what is read apart grows with its square
    alone = [runtime.run([text], max_new_tokens=6)[0] for text in texts]
    assert [(text.tokens, text.layers) for text in served] == [(text.tokens, text.layers) for text in alone]
    with pytest.raises(ValueError, match="prompt and continuation together, got 1 and 512"):
        runtime.generate([[5, 1]], max_new_tokens=512)
    (tmp_path / "long").write_text("the film\n" + "film " * 600 + "\na song\n")
    for engine in ("onnxruntime", "torch"):
        files = (tmp_path / "long", "--out", tmp_path / engine, "--max-new-tokens", 2, "--engine", engine)
        assert main(["run", str(tmp_path / "out"), *map(str, files)]) == 1
        assert "line 2: expected a prompt of at most 512 tokens" in capsys.readouterr().err
        lines = [json.loads(line) for line in (tmp_path / engine).read_text().splitlines()]
        assert [("error" in line) for line in lines] == [False, True, False]
        assert "expected a prompt of at most 512 tokens" in lines[1]["error"]
    output = refused(capsys, "export", run_folder, "--out", tmp_path / "page", "--web")
    assert "--web: expected a decoder that reads prompts, here an encoder reads them; leave it out" in output
