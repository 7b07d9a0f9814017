"""FREE (Bae et al. 2023): its loss, its Beta mixture and its synchronised decoding, against loops."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import random_decoder
from torch import nn

import mini_ee
from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.baselines import free
from mini_ee.lab.baselines.free import (
    LAMBDAS,
    Beta,
    Config,
    FreeTokens,
    Mixture,
    OnlineCalibrationSegments,
    build,
    distillation,
    dynamic_match,
    generate_adapting,
    shallow_deep_loss,
    teachers,
)
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.tasks import TOY
from mini_ee.lab.exits.decoding import MISSING_KV, decode, gather
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.exits.token_exits import TextData
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.torch_engine import torch_segments
from mini_ee.lab.rules import Never, Threshold
from mini_ee.lab.training import train_run as training
from mini_ee.lab.training.stages import Batch
from mini_ee.lab.training.train_run import make_request

EXACT = 2e-5  # of a loss of about 5; measured maximum 2e-6
MATCHES = ("dynamic", "uniform", "last")


def decoder(layers=4):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return random_decoder("llama", layers)


@pytest.fixture(scope="module")
def model():
    return FreeTokens(decoder(), (2, 4)).eval()


def mean_square(a, b):
    return float(np.mean((a - b) ** 2))


def cross_entropy(logits, labels):
    return float(np.mean([np.log(np.exp(row).sum()) - row[label] for row, label in zip(logits, labels)]))


# ---- The loss ----
def nearest_from_the_top(apart):
    """Every teacher's student, by a loop."""
    below, student_of = len(apart[0]), {}
    for teacher in reversed(range(len(apart))):
        best = 0
        for student in range(below):
            if apart[teacher][student] < apart[teacher][best]:
                best = student
        student_of[teacher] = below = best
    return [student_of[teacher] for teacher in range(len(apart))]


def distilled_by_hand(states, shallow, match):
    if match == "last":
        return mean_square(states[shallow - 1], states[-1])
    targets = [states[layer - 1] for layer in teachers(shallow, len(states))]
    apart = [[mean_square(s, t) for s in states[:shallow]] for t in targets]
    students = nearest_from_the_top(apart) if match == "dynamic" else range(shallow)
    return np.mean([apart[teacher][student] for teacher, student in enumerate(students)])


@pytest.mark.parametrize(("layers", "shallow"), [(24, 6), (24, 8), (24, 4), (24, 12), (12, 3)])
def test_teachers_are_those_of_the_released_table(layers, shallow):
    every = layers // shallow
    assert [layer - 1 for layer in teachers(shallow, layers)] == list(range(every - 1, layers, every))


def test_the_dynamic_match_is_that_of_a_loop():
    random = np.random.default_rng(0)
    for students in (1, 2, 3, 6):
        for _ in range(50):
            apart = random.random((students, students))
            assert dynamic_match(torch.from_numpy(apart)) == nearest_from_the_top(apart)
    assert dynamic_match(torch.tensor([[0.1, 9.0], [0.1, 9.0]])) == [0, 0]  # nothing is left below the first


@pytest.mark.parametrize("match", MATCHES)
def test_the_distillation_is_that_of_loops_and_teachers_learn_nothing(match):
    torch.manual_seed(0)
    states = [torch.randn(5, 3, dtype=torch.float64, requires_grad=True) for _ in range(6)]
    loss = distillation(states, 3, match)
    expected = distilled_by_hand([state.detach().numpy() for state in states], 3, match)
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-12)
    loss.backward()
    assert all(state.grad is None for state in states[3:])
    assert states[2].grad is not None


def loss_by_hand(model, texts, config):
    """Text by text, with a plain forward pass."""
    shallow, deep = model.exits
    states, logits, labels = [[] for _ in range(deep)], {shallow: [], deep: []}, []
    for text in texts:
        with torch.no_grad():
            hidden = model.backbone.hidden_states(torch.tensor([text.ids]))[1:]
        for at in range(text.start, len(text.ids) - 1):
            labels.append(text.ids[at + 1])
            for layer, layer_hidden in enumerate(hidden, start=1):
                with torch.no_grad():
                    states[layer - 1].append(model.backbone.norm(layer_hidden[0, at]).numpy())
                    if layer in logits:
                        logits[layer].append(model.backbone.lm_logits(layer_hidden[0, at]).numpy())
    losses = {layer: cross_entropy(np.array(some, np.float64), labels) for layer, some in logits.items()}
    weighted = (shallow * losses[shallow] + deep * losses[deep]) / (shallow + deep)
    return weighted + config.alpha * distilled_by_hand([np.array(some) for some in states], shallow, config.match)


@pytest.mark.parametrize("match", MATCHES)
def test_the_loss_is_that_of_loops_over_texts_and_tokens(model, match):
    random = np.random.default_rng(0)
    texts = [Text(random.integers(0, 60, size).tolist(), start) for size, start in ((9, 3), (6, 0), (12, 5))]
    inputs, labels = TextData(texts).batch(np.arange(3), torch.device("cpu"))
    config = Config(match=match, alpha=0.7)
    with torch.no_grad():
        loss = float(shallow_deep_loss(model, Batch(inputs, labels, None, None), config))
    assert loss == pytest.approx(loss_by_hand(model, texts, config), abs=EXACT)


def test_padding_teaches_rows_nothing(random_model):
    rows = random_model((2, 6))
    torch.manual_seed(0)
    ids = torch.randint(5, 60, (3, 8))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    config, labels = Config(), torch.tensor([0, 1, 2])

    def loss(ids):
        with torch.no_grad():
            return float(shallow_deep_loss(rows, Batch((ids, mask, torch.zeros_like(ids)), labels, None, None), config))

    assert loss(ids) == pytest.approx(loss(torch.where(mask > 0, ids, 7)), abs=EXACT)
    assert isinstance(build(rows.backbone, (2, 6), 3, "mean", config), RowExits)


# ---- lambda ----
def beta_density(x, a, b):
    return x ** (a - 1) * (1 - x) ** (b - 1) * math.gamma(a + b) / (math.gamma(a) * math.gamma(b))


@pytest.mark.parametrize(("a", "b"), [(2.0, 5.0), (3.5, 1.25), (0.8, 0.9)])
def test_a_beta_is_found_again_by_its_moments(a, b):
    x = (np.arange(200_000) + 0.5) / 200_000
    density = Beta(a, b).density(x[::1000])
    np.testing.assert_allclose(density, [beta_density(point, a, b) for point in x[::1000]], rtol=1e-9)
    beta = Beta(1.0, 1.0).fitted(x, beta_density(x, a, b))
    np.testing.assert_allclose(beta, (a, b), rtol=2e-3)
    assert Beta(a, b).fitted(np.full(4, 0.5), np.ones(4)) == (a, b)  # nothing varies


def report(count=400):
    random = np.random.default_rng(0)
    agrees = random.random(count) < 0.6
    return np.where(agrees, random.beta(4, 1.5, count), random.beta(1.5, 3, count)), agrees


def fitted_by_hand(gaps, agrees, trust=0.8):
    """(a, b) of those that differ and of those that agree, token by token."""
    weights = []
    for gap, label in zip(gaps, agrees):
        yes, no = beta_density(gap, 2, 1), beta_density(gap, 1, 2)
        weights.append(trust * yes / (yes + no) + (1 - trust) * label)
    betas = []
    for some in ([1 - weight for weight in weights], weights):
        m = sum(w * x for w, x in zip(some, gaps)) / sum(some)
        v = sum(w * (x - m) ** 2 for w, x in zip(some, gaps)) / sum(some)
        a = m * (m * (1 - m) / v - 1)
        betas.append((a, a * (1 - m) / m))
    return betas


def test_a_step_of_em_is_that_of_a_loop():
    gaps, agrees = report()
    np.testing.assert_allclose(Mixture().fitted(gaps, agrees), fitted_by_hand(gaps, agrees), rtol=1e-9)


def test_the_mixing_term_is_not_overwritten_by_labels():
    """The released code's bug: r = .8 posterior, then r = .2 label in its place, so that labels alone count."""
    weights = Mixture().responsibility(np.array([0.9, 0.1]), np.array([False, True]))
    np.testing.assert_allclose(weights, [0.8 * 0.9, 0.8 * 0.1 + 0.2])
    gaps, agrees = report()
    hard = fitted_by_hand(gaps, agrees, trust=0.0)
    assert not np.allclose(Mixture().fitted(gaps, agrees), hard, rtol=0.05)


def test_lambda_is_the_lowest_point_from_which_on_agreement_is_likely():
    random = np.random.default_rng(1)
    for _ in range(50):
        differs, agrees = random.uniform(0.5, 6, 2), random.uniform(0.5, 6, 2)
        likely = []
        for x in LAMBDAS:
            yes, no = beta_density(x, *agrees), beta_density(x, *differs)
            likely.append(yes / (yes + no) > 0.4)
        expected = LAMBDAS[-1]
        for at in reversed(range(10)):
            if not likely[at]:
                break
            expected = LAMBDAS[at]
        assert Mixture(Beta(*differs), Beta(*agrees)).threshold() == pytest.approx(expected)


# ---- Decoding ----
PROMPTS = ([3, 4, 5], [7, 8], [9, 10, 11, 12])


def test_without_leaving_the_text_is_the_full_models(model):
    full = gather(model.generate(PROMPTS, Never(), max_new_tokens=8), 3)
    assert gather(model.generate(PROMPTS, Threshold(math.inf, "breaking_ties"), max_new_tokens=8), 3) == full
    assert model.missing_kv == "recompute"


def test_what_deep_passes_tell_is_what_a_plain_forward_pass_says(model):
    ids = [list(prompt) for prompt in PROMPTS]
    segments = OnlineCalibrationSegments(model, 3, 20)
    with torch.inference_mode():
        written = gather(decode(segments, ids, 12, Threshold(0.05, "breaking_ties")), 3)
        layers = [layer for text in written for layer in text.layers_run]
        assert 2 in layers and 4 in layers
        expected = []
        for prompt, text in zip(ids, written):
            went = [at for at, layer in enumerate(text.layers_run) if layer == 4]
            whole = torch.tensor([[*prompt, *text.tokens[: went[-1]]]]) if went else None
            for at in range(went[-1] + 1 if went else 0):  # the last deep pass takes all with it that wait
                shallow, deep = (state[len(prompt) - 1 + at] for state in model.states(whole, whole >= 0))
                p = model.classify(0, shallow).softmax(-1).topk(2)
                agrees = int(p.indices[0]) == int(model.classify(1, deep).argmax())
                expected.append((float(p.values[0] - p.values[1]), agrees))
    observed = sorted(zip(segments.gaps, segments.agrees))
    assert [agrees for _, agrees in observed] == [agrees for _, agrees in sorted(expected)]
    np.testing.assert_allclose([gap for gap, _ in observed], [gap for gap, _ in sorted(expected)], atol=2e-6)


def test_lambda_moves_between_texts_by_all_that_was_told():
    model = FreeTokens(decoder(), (2, 4)).eval()
    with torch.no_grad():
        model.backbone.lm_head.weight.mul_(4)  # so that gaps are as wide as the grid
    texts = [Text(list(prompt), len(prompt) - 1) for prompt in PROMPTS]
    adapted = generate_adapting(model, texts, 10)
    mixture, level, levels, gaps, agrees = Mixture(), free.FIRST_LAMBDA, [free.FIRST_LAMBDA], [], []
    for text, written in zip(texts, adapted.written):
        segments = OnlineCalibrationSegments(model, 1, 20)
        with torch.inference_mode():
            steps = decode(segments, [text.ids], 10, Threshold(level, "breaking_ties"))
            assert gather(steps, 1) == [written]
        gaps, agrees = gaps + segments.gaps, agrees + segments.agrees
        mixture = mixture.fitted(gaps, agrees)
        level = mixture.threshold()
        levels.append(level)
    assert adapted.thresholds == levels and adapted.observed == len(gaps)
    chosen = free.adapted_rule(model, SimpleNamespace(follow=10), TextData(texts))
    assert chosen.rule == Threshold(levels[-1], "breaking_ties") and len(set(levels)) > 1


# ---- The run ----
@pytest.fixture(scope="module")
def trained(tmp_path_factory, decoder_checkpoint):
    out = tmp_path_factory.mktemp("free") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mini_ee.lab.training.training_text.HELD_STORIES", 4)
        patch.setattr("mini_ee.lab.training.training_text.GIVEN", 8)
        return mini_ee.train("free", decoder_checkpoint, out=out, texts=8, new_tokens=4, epochs=1, shallow=1)


def test_a_run_holds_its_decoder_as_a_checkpoint(trained, decoder_checkpoint, capsys):
    assert trained.exits == (1, 3) and trained.rule.measure == "breaking_ties"
    checkpoint, requested = trained.folder / "backbone", ("--prompt", "the film", "--max-new-tokens", "3", "--json")
    again = load_backbone(checkpoint).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in trained.model.backbone.state_dict().items())
    first = load_backbone(decoder_checkpoint).layers[2].up.weight
    assert not torch.equal(again["layers.2.up.weight"], first)
    assert main(["generate", str(checkpoint), *requested]) == 0
    plain = json.loads(capsys.readouterr().out)["tokens"]
    assert main(["generate", str(trained.folder), "--rule", "never", *requested]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens"] == plain and report["missing_kv"] == "recompute"


def test_exported_tokens_catch_up_on_both_engines(trained, tmp_path):
    mini_ee.export(trained, tmp_path / "exported")
    ids = [trained.tokenizer.backend.encode(prompt).ids for prompt in ("the film was", "dull")]
    engine = torch_segments(tmp_path / "exported")
    for missing_kv in MISSING_KV:
        settings = {"threads": 1, "missing_kv": missing_kv}
        runtimes = [Runtime(tmp_path / "exported", **settings, segments=segments) for segments in (None, engine)]
        for rule in (Threshold(0.02, "breaking_ties"), trained.rule):
            expected = gather(trained.model.generate(ids, rule, max_new_tokens=8, missing_kv=missing_kv, stop=()), 2)
            for runtime in runtimes:
                assert gather(runtime.generate(ids, max_new_tokens=8, rule=rule), 2) == expected
    assert Runtime(tmp_path / "exported").missing_kv == "recompute"  # as the run does


def test_its_tokens_are_no_rows_for_a_datastore(trained, task_folder, tmp_path, capsys):
    argv = ("train", "raee", "--model", trained.folder, "--task", task_folder, "--out", tmp_path / "raee")
    assert main([*map(str, argv)]) == 2
    assert "contains a decoder, whose tokens have no labels; give the run of a classifier" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_shortest_commands_are_asked_for(tmp_path):
    """Defaults for text that the built-in decoder writes are none of rows on the built-in encoder."""
    tokens, rows = (make_request("free", None, task, tmp_path / "x", False, {}) for task in (None, TOY))
    assert (tokens.unit.name, tokens.texts.texts, rows.unit.name, rows.train.epochs) == ("tokens", 1000, "rows", 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shallow", "3"), "must be below the last layer, 3, got 3"),
        (("--exits", "1,2"), "--exits"),
        (("--match", "first"), "--match"),
    ],
)
def test_what_cannot_be_is_one_line(options, message, checkpoint_folder, task_folder, tmp_path, capsys):
    argv = ["train", "free", "--model", str(checkpoint_folder), "--task", str(task_folder)]
    try:
        status = main([*argv, "--out", str(tmp_path / "x"), *options])
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and message in capsys.readouterr().err.rstrip("\n").split("\n")[-1]


def test_a_head_of_its_own_has_no_weights_of_its_own(model):
    assert isinstance(model.heads, nn.ModuleList) and not list(model.heads.parameters())
    ids = torch.tensor([[1, 2, 3]])
    hidden = model.backbone.embed(Tensors(ids))
    assert torch.equal(model.heads[0](hidden), model.backbone.lm_logits(hidden))


def test_an_exit_that_cannot_be_is_refused_before_texts_are_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "mini_ee.lab.training.train_tokens.texts_to_learn", lambda source: pytest.fail("texts were written")
    )
    assert main(["train", "free", "--shallow", "12", "--out", str(tmp_path / "run")]) == 2
    assert "below the last layer, 12, got 12" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("method", "texts", "refused"), [("free", 96, True), ("free", 149, True), ("calm", 96, True), ("free", 150, False)]
)
def test_too_few_texts_are_refused_before_the_model_is_loaded(method, texts, refused, tmp_path, monkeypatch, capsys):
    """Of pieces, which begin anywhere, fewer do."""

    def load(folder):
        raise ValueError("a model was loaded")

    monkeypatch.setattr(training, "load_backbone", load)
    argv = ["train", method, *(["--task", "continue"] if method == "calm" else []), "--texts", str(texts)]
    assert main([*argv, "--out", str(tmp_path / "run")]) == (2 if refused else 1)
    line = f"--texts: expected at least 150 stories, as many as are held out, got {texts}; give more"
    assert (line if refused else "a model was loaded") in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []
    make_request("self-supervised", None, None, tmp_path / "run", False, {"texts": 96})
