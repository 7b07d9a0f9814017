"""Lenses: D x D numbers before the model's own LM head, fitted in closed form and then by Eq. 1 on stored states.

A gate decides before any head is read.
"""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import WORDS, random_decoder, save_small_llama, words_tokenizer

import mini_ee
from mini_ee.lab.backbones.hub import BUILT_IN_DECODER, load_backbone
from mini_ee.lab.backbones.llama import Decoder, DecoderConfig
from mini_ee.lab.calibration import POLICY, conformal_cut, observe
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.evaluation import probes
from mini_ee.lab.evaluation.probes import Lens, probe_tokens
from mini_ee.lab.evaluation.savings_estimate import savings_at
from mini_ee.lab.exits import lens, state_store
from mini_ee.lab.exits.decoding import gather
from mini_ee.lab.exits.generation import token_segments
from mini_ee.lab.exits.lens import EPS, RIDGE, LensHead, fit_in_closed_form, reads_much
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.exits.token_exits import TextData, TokenExits
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.token_record import record_tokens
from mini_ee.lab.export.torch_engine import torch_segments
from mini_ee.lab.methods import self_supervised
from mini_ee.lab.methods.self_supervised import Config, heads_loss, sparse_loss, sparse_targets
from mini_ee.lab.rules import Fixed, Never, Policy, Threshold
from mini_ee.lab.training import train_tokens
from mini_ee.lab.training.default_rule import Chosen
from mini_ee.lab.training.method import load_method
from mini_ee.lab.training.stages import Batch
from mini_ee.lab.training.train_run import LENS_LR, defaults_of
from mini_ee.lab.training.training_text import cheapest

GOLDEN = Path(__file__).parents[2] / "golden"
EXACT = 1e-5
PROMPTS = ("the film", "a very dull song was", "book")


def lens_model(kind="llama", exits=(1, 2, 3)):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = TokenExits(random_decoder(kind, exits[-1]), exits)
        model.use_heads("lens")
        return model.eval()


def drawn_texts(count=12, length=10, seed=0):
    draw = random.Random(seed)
    return TextData([Text(draw.choices(range(60), k=length), 0) for _ in range(count)], every=True)


def all_states(model, data):
    return torch.cat([states for states, _ in data.state_batches(model)])


# ---- The head ----
@pytest.mark.parametrize("kind", ["llama", "gemma", "phi"])
def test_before_it_is_fitted_a_lens_is_the_models_own_head(kind):
    decoder = load_backbone(GOLDEN / kind)
    hidden = decoder.hidden_states(torch.tensor([[3, 1, 4, 1, 5]]))[1]
    head = LensHead(decoder)
    torch.testing.assert_close(head(hidden), decoder.lm_logits(hidden), atol=1e-3, rtol=1e-3)
    width = decoder.config.hidden_size
    assert [tuple(parameter.shape) for parameter in head.parameters()] == [(width, width)] == [(len(hidden[0, 0]),) * 2]


def test_the_closed_form_is_the_least_squares_of_the_stacked_problem():
    """Ridge regression is least squares with sqrt(RIDGE N) times the identity as further rows, whose targets are 0."""
    model, data = lens_model(), drawn_texts()
    states = all_states(model, data).double().numpy()
    x = states / np.sqrt((states**2).mean(-1, keepdims=True) + EPS)
    model.begin(data)
    for k, head in enumerate(model.heads):
        rows = np.sqrt(RIDGE * len(x)) * np.eye(x.shape[2])
        expected = np.linalg.lstsq(np.vstack((x[:, k], rows)), np.vstack((x[:, -1], 0 * rows)), rcond=None)[0]
        np.testing.assert_allclose(head.map.weight.detach().numpy(), expected.T, atol=EXACT)


def test_the_closed_form_of_the_last_layer_is_nearly_the_identity_and_parts_are_summed():
    model = lens_model(exits=(1, 2))
    last = all_states(model, drawn_texts(40))[:, -1:].repeat(1, 2, 1)
    fit_in_closed_form(model.heads, last.split(7))
    parts = model.heads[0].map.weight.clone()
    torch.testing.assert_close(parts, torch.eye(24), atol=0.2, rtol=0)
    fit_in_closed_form(model.heads, [last])
    torch.testing.assert_close(parts, model.heads[0].map.weight, atol=EXACT, rtol=0)


@pytest.mark.parametrize("vocabulary, much", [(60, False), (300, False), (600, True), (5000, True)])
def test_a_vocabulary_is_large_if_it_costs_two_layers_or_more(vocabulary, much):
    config = random_decoder("llama", 1).config.to_dict() | {"vocab_size": vocabulary}
    decoder = Decoder(DecoderConfig.from_hugging_face(config))
    layer = sum(weight.numel() for weight in decoder.layers[0].parameters() if weight.dim() == 2)
    assert reads_much(decoder) is much is (vocabulary * 24 >= lens.LARGE * layer)


def test_lenses_are_the_default_where_the_vocabulary_is_large():
    method = load_method("self-supervised")
    assert defaults_of(method, "tokens", BUILT_IN_DECODER)["head"] == "own"
    assert defaults_of(method, "tokens", BUILT_IN_DECODER, "lens")["head_lr"] == LENS_LR


def test_they_are_that_of_smollm2(smollm2_folder):
    defaults = defaults_of(load_method("self-supervised"), "tokens", smollm2_folder)
    assert (defaults["head"], defaults["epochs"], defaults["target"]) == ("lens", 1, "soft")


# ---- Eq. 1 with sparse targets ----
@pytest.mark.parametrize("target", ["soft", "hard"])
@pytest.mark.parametrize("penalty", [0.0, 0.3])
def test_with_as_many_targets_as_words_the_sparse_loss_is_eq_1(target, penalty):
    model, data, config = lens_model(), drawn_texts(4), Config(target=target, penalty=penalty)
    states = data.states(model)
    batch = Batch((), states.labels, list(states.states.unbind(1)), sparse_targets(model, states))
    inputs, labels = data.batch(np.arange(4), torch.device("cpu"))
    expected = heads_loss(model, Batch(inputs, labels, None, None), config)
    torch.testing.assert_close(sparse_loss(model, batch, config), expected, atol=1e-4, rtol=1e-4)


def test_the_sparse_loss_is_a_cross_entropy_over_the_likeliest_words_and_one_more_outcome(monkeypatch):
    monkeypatch.setattr(self_supervised, "SPARSE", 3)
    model, data = lens_model(), drawn_texts(2)
    states = data.states(model)
    targets = sparse_targets(model, states)
    batch = Batch((), states.labels, list(states.states.unbind(1)), targets)
    expected = 0.0
    for row, state in enumerate(states.states):
        p, *qs = (model.classify(k, state[k]).softmax(-1).double().tolist() for k in (2, 0, 1))
        first = sorted(range(60), key=lambda word: -p[word])[:3]
        assert targets[row, 0].tolist() == first
        for q in qs:
            expected -= sum(p[word] * np.log(q[word]) for word in first)
            expected -= (1 - sum(p[word] for word in first)) * np.log(1 - sum(q[word] for word in first))
    loss = sparse_loss(model, batch, Config(target="soft"))
    assert loss.item() == pytest.approx(expected / len(states), rel=1e-4)


# ---- Training ----
@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file, draw = tmp_path_factory.mktemp("lens") / "words.txt", random.Random(0)
    file.write_text(" ".join(draw.choices(WORDS, k=2000)))
    return file


@pytest.fixture(scope="module")
def stories(text):
    file, draw = text.with_name("stories.txt"), random.Random(0)
    file.write_text("\n\n".join(" ".join(draw.choices(WORDS, k=48)) for _ in range(120)))
    return file


@pytest.fixture(scope="module", autouse=True)
def few_stories():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lens, "LIKELY", 20)  # of 60 words
        patch.setattr("mini_ee.lab.training.training_text.HELD_STORIES", 44)
        patch.setattr("mini_ee.lab.training.training_text.LEAST_GROUPS", 16)
        patch.setattr("mini_ee.lab.training.training_text.EPSILON", 0.8)  # 8 texts are enough
        yield


def trained(model, text, out, **options):
    options = {"head": "lens", "texts": 200, "new_tokens": 8, "text": text, "exits": (1, 2, 3)} | options
    return mini_ee.train("self-supervised", model, None, out, **options)


@pytest.fixture(scope="module")
def run(decoder_checkpoint, text, tmp_path_factory):
    return trained(decoder_checkpoint, text, tmp_path_factory.mktemp("lens") / "run", epochs=6)


def test_a_run_has_two_maps_their_short_lists_and_a_gate_and_nothing_of_the_model(run):
    width = run.model.backbone.config.hidden_size
    weights = run.model.own_state()
    assert run.config["head"] == "lens" and {name.split(".")[0] for name in weights} == {"heads", "policy"}
    sizes = [value.numel() for name, value in weights.items() if name.startswith("heads.")]
    assert sorted(sizes) == [60, 60, width**2, width**2]
    again = mini_ee.load_run(run.folder)
    assert all(torch.equal(value, again.model.state_dict()[name]) for name, value in weights.items())


def test_eq_1_starts_from_the_closed_form_and_lowers_the_loss(run):
    losses = [epoch["loss"] for epoch in run.metrics["epochs"] if epoch["stage"] == "heads"]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert [epoch["stage"] for epoch in run.metrics["epochs"]][6:] == ["gate"] * 8
    first, *_ = run.metrics["history"]
    fresh = TokenExits(load_backbone(run.config["backbone"]["folder"]), run.exits)
    fresh.use_heads("lens")
    assert first["step"] == 0 and not torch.equal(run.model.heads[0].map.weight, torch.eye(24))


def test_the_text_is_read_once_into_a_file_that_a_killed_training_goes_on_with(
    decoder_checkpoint, text, tmp_path, monkeypatch
):
    monkeypatch.setattr(state_store, "SAVED", 0)
    read, each_state, sizes = [], TokenExits.each_state, []

    def counted(self, ids, *others, **hooks):
        read.append(len(ids))
        return each_state(self, ids, *others, **hooks)

    monkeypatch.setattr(TokenExits, "each_state", counted)
    expected = trained(decoder_checkpoint, text, tmp_path / "whole", epochs=1).model.own_state()
    assert sum(read) == 200  # every piece once: 180 to learn from, 20 held out

    def killed(*given):
        sizes.extend(path.stat().st_size for path in sorted(tmp_path.rglob("states.bin")))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train_tokens, "json_sha256", lambda *of: killed() if "train" in of[0] else "key")
        with pytest.raises(KeyboardInterrupt):
            trained(decoder_checkpoint, text, tmp_path / "again", epochs=1)
    assert sizes == [20 * 10 * 3 * 24 * 2, 180 * 10 * 3 * 24 * 2]  # float16; a piece begins with two special tokens
    read.clear()
    monkeypatch.setattr(train_tokens, "json_sha256", lambda *of: "key")
    weights = trained(decoder_checkpoint, text, tmp_path / "again", epochs=1).model.own_state()
    assert sum(read) < 40  # the first batch of each part, which tells the size of a state
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "whole"]


def test_states_beyond_half_precision_are_stored_too(tmp_path):
    model, data = lens_model(), drawn_texts(2)
    model.backbone.embeddings.weight.data *= 1e6
    store = data.states(model, lambda shape: state_store.Stored(shape, tmp_path, "key", np.float16))
    assert all_states(model, data).abs().max() > 65504 and store.states.isfinite().all()
    (known,) = (states for states, _ in TextData(data.texts, True, store).state_batches(model))
    torch.testing.assert_close(
        model.classify(0, known[:, 0]), model.classify(0, all_states(model, data)[:, 0]), atol=0.02, rtol=0.02
    )


@pytest.mark.parametrize("method", ["joint", "calm", "layerskip", "consistent"])
def test_any_method_with_heads_learns_with_lenses(method, tmp_path, stories):
    folder = save_small_llama(tmp_path / "llama", words_tokenizer(), max_position_embeddings=64)
    short = {"consistent": {"policy_epochs": 1, "rounds": 1}}.get(method, {})
    options = {"head": "lens", "text": stories, "texts": 60, "new_tokens": 4, "epochs": 1, "exits": (1, 3)} | short
    run = mini_ee.train(method, folder, None, tmp_path / "run", **options)
    again = mini_ee.load_run(tmp_path / "run")
    assert all(isinstance(head, LensHead) for head in again.model.heads) and again.model.policy is not None
    assert not torch.equal(again.model.heads[0].map.weight, torch.eye(16))
    assert run.model.gated is (method in ("joint", "layerskip"))
    stages = [epoch["stage"] for epoch in run.metrics["epochs"]]
    assert (stages[-1] == "gate") is run.model.gated
    prompts = [run.tokenizer.ids_of(prompt) for prompt in PROMPTS]
    written, expected = (
        gather(of_run.model.generate(prompts, of_run.rule, max_new_tokens=4), 3) for of_run in (run, again)
    )
    assert written == expected


# ---- The gate ----
def test_the_gate_decides_before_any_head_and_the_vocabulary_is_read_once_a_token(run, monkeypatch):
    read, logits = [], type(run.model.backbone).lm_logits

    def counted(self, hidden, words=None, rows=()):
        read.append(len(hidden) * (len(rows[0]) if rows else 60))
        return logits(self, hidden, words, rows)

    monkeypatch.setattr(type(run.model.backbone), "lm_logits", counted)
    ids = run.tokenizer.ids_of(PROMPTS[1])
    recorded = record_texts(run.model, [Text(ids, 0)])
    cut = float(1 / (1 + np.exp(-np.median(recorded.segments.exit_logits))))
    short = Threshold(float(np.median(recorded.segments.measures["short_list"])), "short_list")
    listed = int(run.model.heads[0].likely.sum())
    for rule, of_exit, every in ((Policy(cut), 0, 60), (short, listed, 60), (Threshold(1.0), 60, 0)):
        read.clear()
        (written,) = gather(run.model.generate([ids], rule, max_new_tokens=12, stop=()), 1)
        passed = sum(min(layers, 2) for layers in written.layers_run)  # exits that decided about a token
        assert sum(read) == passed * of_exit + 12 * (every or 60)
        assert not every or len(set(written.layers_run)) > 1


def test_the_short_list_has_the_most_frequent_tokens_of_the_training(run):
    assert all(head.likely.sum() == 20 for head in run.model.heads)
    model = lens_model()
    texts = [Text([7, 3, 3, 5, *range(30, 60)], 0), Text([9, 9, 5, 3, 9], 2)]  # after their starts: 3 thrice, 5, ...
    model.begin(TextData(texts))
    assert model.heads[0].likely.nonzero()[:, 0].tolist() == [3, 5, 9, *range(30, 47)]


def test_the_short_list_measure_is_breaking_ties_among_its_tokens(run):
    model, text = run.model, Text(run.tokenizer.ids_of(PROMPTS[1]), 0)
    states = model.backbone.hidden_states(torch.tensor([text.ids]))
    recorded = record_texts(model, [text]).segments.measures["short_list"]
    for k, (layer, head) in enumerate(zip(model.exits, model.heads)):
        logits = head(states[layer][0])[:, head.likely > 0].double().detach().numpy()
        p = np.sort(np.exp(logits) / np.exp(logits).sum(1, keepdims=True))
        np.testing.assert_allclose(recorded[:, k], p[:, -1] - p[:, -2], atol=EXACT)


def test_a_short_list_is_paid_at_every_exit_and_a_head_where_the_token_stops(run):
    recorded, width = record_texts(run.model, drawn_texts(4).texts), 24
    rule = Threshold(float(np.median(recorded.segments.measures["short_list"])), "short_list")
    result = recorded.replay(rule)
    flops, passed = recorded.segments.costs[0], np.minimum(result.exit_index + 1, 2)
    layers = np.cumsum(flops[:, :, 0], axis=1)[np.arange(len(flops)), result.exit_index]
    decisions = passed * (2 * width * (width + 20) + 5 * 2)
    np.testing.assert_allclose(result.cost.flops, layers + 2 * width * 60 + decisions, rtol=1e-6)


def test_the_gate_learns_agreement(run):
    """On the texts that it learned from, its logit is larger where the exit agrees."""
    recorded = record_texts(run.model, drawn_texts(60).texts)
    observed = observe(recorded, POLICY)
    for confidence, agrees in zip(observed.confidence.T, observed.agrees.T):
        if 0 < agrees.mean() < 1:
            assert confidence[agrees].mean() > confidence[~agrees].mean()


def test_the_rule_is_the_cheapest_heads_included():
    """A gate is no better than thresholds in layers here, but reads one head in place of several."""
    model, data = lens_model(), drawn_texts(60)
    recorded = record_texts(model, data.texts)
    never = Chosen(Threshold((np.inf, np.inf, -np.inf), "breaking_ties"), None)
    with torch.no_grad():
        for network in model.policy.networks:
            network[2].bias.fill_(-50.0)  # exits nowhere, so both only pay
    chosen = cheapest(record_texts(model, data.texts), never, 0)
    saved = chosen.metrics["net_saved"]
    assert isinstance(chosen.rule, Never) and chosen.guarantee is None
    layer = (recorded.full_flops - 2 * 24 * 60) / 3
    assert saved["thresholds"] == pytest.approx(-(2 * 2 * 24 * 60 + 2 * 5 * 2) / (3 * layer + 2 * 24 * 60), rel=1e-3)
    assert -0.3 < saved["thresholds"] < saved["gate"] <= 0


@pytest.mark.parametrize("measure, dearer", [(POLICY, "short_list"), ("short_list", POLICY)])
def test_gate_and_short_list_are_calibrated_by_the_conformal_guarantee(run, monkeypatch, measure, dearer):
    assert set(run.metrics["net_saved"]) == {"thresholds", "gate", "short list"}
    monkeypatch.setattr("mini_ee.lab.training.training_text.LEAST_SAVED", -1.0)
    recorded = record_texts(run.model, drawn_texts(80, seed=3).texts)
    recorded.segments.costs[2][dearer][:] = [1e9] * 3
    chosen = cheapest(recorded, Chosen(Threshold((np.inf, np.inf, -np.inf), "breaking_ties"), None), 0)
    observed = observe(recorded, measure)
    drawn = np.isin(observed.groups, np.random.default_rng(0).permutation(80)[:40])
    cut = chosen.rule.least_logit if measure == POLICY else chosen.rule.threshold
    assert cut == pytest.approx(conformal_cut(observed.take(drawn), 0.8), abs=1e-5)
    assert chosen.guarantee["guarantee"] == "conformal" and chosen.guarantee["measure"] == measure


# ---- The estimate ----
def test_the_estimate_reads_lenses_through_a_gate_and_one_head_a_token(monkeypatch):
    """On a model whose upper layers change little lenses agree more often than the logit lens, and one head is paid."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = random_decoder("llama", 3).config.to_dict() | {"vocab_size": 600}
        decoder = Decoder(DecoderConfig.from_hugging_face(config)).eval()
    for depth in (1, 2):
        for name in ("attention_output", "down"):
            getattr(decoder.layers[depth], name).weight.data *= 0.2
    monkeypatch.setattr(probes, "MIN_PROBED", 32)
    texts = drawn_texts(128, 12).texts
    probed = probe_tokens(decoder, texts)
    unfitted = record_texts(Lens(decoder).eval(), texts[3::4])
    assert probed.probe == "lens and gate" and probed.costs.read_once and len(probed.observed.groups) == 32 * 12
    logit_lens = observe(unfitted).agrees.mean(axis=0)
    assert (probed.observed.agrees.mean(axis=0) > logit_lens).all()
    for confidence, agrees in zip(probed.observed.confidence.T, probed.observed.agrees.T):
        assert confidence[agrees].mean() > confidence[~agrees].mean()
    assert (0 <= probed.observed.confidence).all() and (probed.observed.confidence <= 1).all()
    head, rule = probed.costs.head, Threshold((*np.median(probed.observed.confidence, axis=0), -np.inf))
    savings = savings_at(probed.observed, rule, (1, 2, 3), probed.costs)
    every = savings_at(probed.observed, rule, (1, 2, 3), probed.costs._replace(read_once=False))
    assert savings.net_saved == pytest.approx(savings.saved * 3 / (3 + head)) and every.net_saved < savings.net_saved
    assert head == pytest.approx(24 * 600 / (unfitted.segments.costs[0][:, 0, 0].mean() / 2), rel=1e-6)
    with pytest.raises(WrongArguments, match="--texts: expected at least 128 for a vocabulary of 600 words"):
        probe_tokens(decoder, texts[:127])


# ---- The graph of a token ----
def median_rule(run, measure):
    measures = record_texts(run.model, [Text(run.tokenizer.ids_of(PROMPTS[1]), 0)]).segments.measures
    cut = float(np.median(measures[measure]))
    return Policy(float(1 / (1 + np.exp(-cut)))) if measure == POLICY else Threshold(cut, measure)


@pytest.mark.parametrize("measure", [POLICY, "short_list"])
def test_the_graphs_decide_by_gate_or_short_list_and_write_as_torch_does(run, tmp_path, measure):
    out, own = tmp_path / "exported", median_rule(run, measure)
    mini_ee.export(run._replace(rule=own), out, texts=PROMPTS[:2], segments=True)
    runtime = Runtime(out, threads=1)
    ids = [run.tokenizer.ids_of(prompt) for prompt in PROMPTS]
    weights = sum(value.size for value in read_numbers(out).values())
    assert (
        weights
        < run.model.backbone.embeddings.weight.numel()
        + sum(value.numel() for name, value in run.model.state_dict().items() if "embeddings" not in name)
        + 200
    )  # the LM head stands once
    again, in_torch = Runtime(out, threads=1, missing_kv="recompute"), Runtime(out, segments=torch_segments(out))
    for rule in (Never(), Fixed(0), own):
        for engine, missing_kv in ((runtime, "copy_state"), (again, "recompute"), (in_torch, "copy_state")):
            recomputed = run.model.generate(ids, rule, max_new_tokens=6, missing_kv=missing_kv)
            expected = gather(recomputed, 3)
            assert gather(engine.generate(ids, max_new_tokens=6, rule=rule), 3) == expected


@pytest.mark.parametrize("measure", ["short_list", "saturation"])
def test_decoding_costs_what_the_record_says(run, tmp_path, measure):
    rule = median_rule(run, measure)
    mini_ee.export(run._replace(rule=rule), tmp_path / "out", texts=PROMPTS[:2])
    expected = record_texts(run.model, [Text([3], 0)]).replay(rule)
    decisions = 5 * (60 - 2) * min(expected.exit_index[0] + 1, 2)  # a record has two numbers in place of logits
    runtime = Runtime(tmp_path / "out", threads=1)
    for segments in (token_segments(run.model, "copy_state", 1, 4), runtime.segments(1, 4)):
        result = early_exit(segments, rule, segments.begin([[3]]))
        assert result.exit_index == expected.exit_index
        assert result.cost.flops == pytest.approx(expected.cost.flops + decisions)


@pytest.mark.parametrize(
    "precision, ending, most", [("float16", "", 0.02), ("int8", "_int8", 0.2), ("int4", "_int4", 1)]
)
@pytest.mark.parametrize("measure", [POLICY, "short_list"])
def test_an_export_in_fewer_bits_rounds_the_maps_and_not_the_gate(run, tmp_path, precision, ending, most, measure):
    rule = median_rule(run, measure)
    manifest = mini_ee.export(run._replace(rule=rule), tmp_path / "out", texts=PROMPTS[:2], precision=precision)
    assert manifest["verified"]["relative_difference"] < manifest["verified"]["allowed_relative_difference"]
    numbers = read_numbers(tmp_path / "out")
    assert f"heads.0.map.weight{ending}" in numbers and ("policy.networks.0.0.weight" in numbers) is (measure == POLICY)
    ids = np.array([run.tokenizer.ids_of(PROMPTS[1])])
    expected = record_texts(run.model, [Text(ids[0].tolist(), 0)]).segments.measures[measure]
    recorded = record_tokens(Runtime(tmp_path / "out", threads=1), [Text(ids[0].tolist())], 1)
    np.testing.assert_allclose(recorded.segments.measures[measure], expected, rtol=0, atol=most)


def read_numbers(folder):
    import onnx
    from onnx import numpy_helper

    model = onnx.load(folder / "onnx" / "model.onnx")
    numbers, graphs = {}, [model.graph]
    while graphs:
        graph = graphs.pop()
        numbers |= {initializer.name: numpy_helper.to_array(initializer) for initializer in graph.initializer}
        graphs += [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return numbers


# ---- Refusals ----
@pytest.mark.parametrize("method", ["balcony", "sleb", "free", "adainfer"])
def test_heads_that_are_part_of_a_method_are_not_replaced(method, decoder_checkpoint, tmp_path, capsys):
    argv = ["train", method, "--model", decoder_checkpoint, "--task", "continue", "--head", "lens"]
    assert main([*map(str, argv), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert f"--head lens: the heads of {method} are part of the method; leave it out" in error
    assert len(error.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_an_unknown_kind_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="head must be one of lens, found 'prism'"):
        lens_model().use_heads("prism")
