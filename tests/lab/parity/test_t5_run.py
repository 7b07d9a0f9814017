"""T5 with exits in its decoder: rows read at the token that an answer starts with, on both engines."""

import numpy as np
import onnx
import pytest
import torch
from conftest import padded_rows
from in_process import answer, is_served_end_to_end, refused
from t5_cases import ENGINES, KINDS, assert_close, golden, t5_folder  # noqa: F401

import mini_ee
from mini_ee.lab.backbones.hub import load_backbone, save_backbone
from mini_ee.lab.backbones.t5_layers import EncoderLayer, Layer
from mini_ee.lab.data.prompt_templates import Prompt, PromptTokenizer
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.evaluation.probes import probe_rows
from mini_ee.lab.exits.prompt_exits import PromptModel
from mini_ee.lab.exits.row_exits import RowExits
from mini_ee.lab.export.row_segments import OrtModel, OrtSegments
from mini_ee.lab.export.writer import write_graphs
from mini_ee.lab.methods.lora_exits import LoRAExits
from mini_ee.lab.methods.lora_exits_peft import save_adapters
from mini_ee.lab.methods.raee_encoders import OwnStates
from mini_ee.lab.recording import read_every_exit
from mini_ee.lab.rules import Fixed, Never, Threshold

IT_WAS = Prompt("{text} was", ("bad", "good", "fine"))
TEXTS = ["the film was good", "a dull and awful meal", "the room was very fine and the song was fine"]


@pytest.fixture(scope="session")
def tokenizer(t5_folder):  # noqa: F811
    return PromptTokenizer(Tokenizer.from_folder(t5_folder).backend, 64, IT_WAS)


# ---- What is read ----


def test_the_tokenizer_ends_texts_with_its_mark_and_knows_words_with_their_space(t5_folder, tokenizer):  # noqa: F811
    of_folder = Tokenizer.from_folder(t5_folder)
    ids = of_folder.encode(["the film was good", ("the film", "a song")]).ids
    assert [of_folder.backend.id_to_token(token) for token in ids[0]] == ["▁the", "▁film", "▁was", "▁good", "</s>"]
    assert [token for token, type_id in enumerate(ids[1]) if type_id == 1] == [2, 5] and of_folder.pad_token_id == 0
    assert of_folder.mask_token_id is None
    assert [of_folder.backend.id_to_token(token) for token in tokenizer.label_tokens] == ["▁bad", "▁good", "▁fine"]
    with pytest.raises(ValueError, match="no .mask.: a decoder continues the prompt"):
        PromptModel(load_backbone(t5_folder), PromptTokenizer_with_mask(of_folder))


def PromptTokenizer_with_mask(of_folder):
    """One that an encoder would be given."""
    of_folder.prompt, of_folder.label_tokens = Prompt("{text} was {mask}", ("bad", "good")), (8, 16)
    return of_folder


@pytest.mark.filterwarnings("ignore")
def test_label_words_are_read_at_the_first_token_of_the_answer_as_transformers_reads_them(t5_folder, tokenizer):  # noqa: F811
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(t5_folder).eval()
    inputs = tokenizer.encode(TEXTS).batch(slice(None))
    ids, mask = torch.from_numpy(inputs.input_ids), torch.from_numpy(inputs.attention_mask)
    with torch.no_grad():
        logits = theirs(ids, attention_mask=mask, decoder_input_ids=torch.zeros(3, 1, dtype=torch.int64)).logits[:, 0]
        model = PromptModel(load_backbone(t5_folder), tokenizer)
        word_logits = early_exit(model.segments(), Never(), inputs).logits
    assert_close(torch.from_numpy(word_logits), logits[:, list(tokenizer.label_tokens)])


def test_every_exit_is_the_head_on_that_layer_and_a_batch_is_its_rows_alone(t5_folder, tokenizer):  # noqa: F811
    model, inputs = PromptModel(load_backbone(t5_folder), tokenizer), tokenizer.encode(TEXTS).batch(slice(None))
    segments = model.segments()
    exit_logits, *_ = read_every_exit(segments, inputs)
    for row in range(3):
        states = model.backbone.hidden_states(torch.from_numpy(tokenizer.encode(TEXTS[row : row + 1]).ids[0])[None])
        expected = [model.backbone.lm_logits(state)[0, 0, list(tokenizer.label_tokens)] for state in states[1:]]
        assert_close(torch.from_numpy(exit_logits[row]), torch.stack(expected).detach())
    for threshold in (0.0, 0.36, 0.4, 1.0):
        together = early_exit(segments, Threshold(threshold), inputs)
        for row in range(3):
            alone = early_exit(segments, Threshold(threshold), inputs.take(np.array([row])))
            assert alone.exit_index[0] == together.exit_index[row]
            np.testing.assert_allclose(alone.logits[0], together.logits[row], atol=1e-5)


# ---- What it costs ----


def counted_maps(monkeypatch):
    """Names of the layers' kinds, and rows of the batch, of each layer that runs."""
    ran = []
    for kind in (EncoderLayer, Layer):
        right = kind.forward
        monkeypatch.setattr(
            kind,
            "forward",
            lambda self, hidden, *more, right=right, kind=kind: (
                ran.append((kind.__name__, len(hidden))) or right(self, hidden, *more)
            ),
        )
    return ran


def test_the_encoder_runs_once_and_what_is_skipped_makes_no_keys_of_it(t5_folder, tokenizer, monkeypatch):  # noqa: F811
    model, inputs = PromptModel(load_backbone(t5_folder), tokenizer), tokenizer.encode(TEXTS).batch(slice(None))
    made = []
    for depth, layer in enumerate(model.backbone.layers):
        layer.cross_key_value.register_forward_hook(lambda module, x, y, depth=depth: made.append((depth, len(x[0]))))
    ran = counted_maps(monkeypatch)
    early_exit(model.segments(), Fixed(0), inputs)
    assert ran == [("EncoderLayer", 3)] * 2 + [("Layer", 3)] and made == [(0, 3)]
    plan = np.array([1, 0, 2])
    rule = Never()
    monkeypatch.setattr(Never, "plan", lambda self, inputs: plan)
    ran.clear(), made.clear()
    assert early_exit(model.segments(), rule, inputs).layers_run.tolist() == [2, 1, 3]
    assert ran == [("EncoderLayer", 3)] * 2 + [("Layer", rows) for rows in (3, 2, 1)]
    assert made == [(0, 3), (1, 2), (2, 1)]


def test_whether_exits_pay_is_asked_with_the_encoder_that_runs_before_them(t5_folder):  # noqa: F811
    backbone, of_folder = load_backbone(t5_folder), Tokenizer.from_folder(t5_folder)
    rows = of_folder.encode(["the film was good", "the meal was bad"] * 8)
    labels = np.array([0, 1] * 8)
    probed = probe_rows(backbone, rows, labels, 2, 0)
    segments = RowExits(backbone, (1, 2, 3), 2, "first").segments()
    (first, _), (layer, _) = (segments.flops(k, rows.batch(slice(1))) for k in (0, 1))
    assert probed.costs.start == pytest.approx((first - layer) / layer) and probed.costs.start > 1


def test_the_start_is_charged_to_the_first_exit():
    """By torch's own counter of products."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # products of the fused kernels are not counted
    from torch.utils.flop_counter import FlopCounterMode

    model = RowExits(golden("t5-v1.1")[0].without_heads(), (1, 3), 2, "first")
    segments, inputs = model.segments(), padded_rows(model.backbone).take(np.array([0]))
    state, counted = None, []
    for k in range(2):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            state = segments.advance(k, segments.start(inputs) if k == 0 else state)
        counted.append(counter.get_total_flops())
    assert [segments.flops(k, inputs)[0] for k in range(2)] == counted
    assert model.backbone.start_flops(9) > 0 and segments.flops(1, inputs)[0] == 2 * model.backbone.layer_flops(9)


def test_what_texts_are_compared_by_is_what_the_encoder_makes_of_them(tmp_path):
    backbone, inputs, expected = golden("t5")
    rows = padded_rows(backbone)
    rows = type(rows)(
        inputs.input_ids.numpy(), inputs.attention_mask.numpy(), np.zeros((3, 9), np.int64), rows.texts[:3]
    )
    for layer in (0, 1):
        real = inputs.attention_mask[..., None]
        mean = (expected[f"encoder.{layer}"] * real).sum(1) / real.sum(1)
        np.testing.assert_allclose(OwnStates(backbone, layer)(rows), mean, atol=1e-5)
    assert OwnStates(backbone, 0).flops(rows) == 0 < OwnStates(backbone, 1).flops(rows)
    with pytest.raises(ValueError, match="the layer must be from 0 to 2, got 3"):
        OwnStates(backbone, 3)


# ---- The export ----


def models(kind):
    """Rows through label words, and through heads, and LoRA streams."""
    prompt = type("Prompted", (), {"prompt": IT_WAS, "mask_token_id": None, "label_tokens": (31, 7, 12)})
    yield PromptModel(golden(kind)[0], prompt).eval(), {}
    yield RowExits(golden(kind)[0].without_heads(), (1, 3), 3, "first").eval(), {}
    lora = LoRAExits(
        golden(kind)[0].without_heads(), (1, 2, 3), 3, "first", rank=2, targets=("query", "cross_value", "down")
    ).eval()
    for parameter in lora.parameters():
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.2)
    yield lora, {"schedule": [[0, 1], [2]]}


@pytest.mark.slow
@pytest.mark.parametrize("kind, step", [("t5", 1), ("t5-v1.1", 2)])
def test_one_graph_and_segments_say_what_torch_says(kind, step, tmp_path):
    """Label words of both kinds, for their vocabulary heads differ; the other two of one kind each."""
    for number, (model, options) in enumerate([*models(kind)][::step][:2]):
        folder, inputs = tmp_path / str(number), padded_rows(model.backbone)
        folder.mkdir()
        source = model.segments(*options.values())
        manifest = write_graphs(model, source, Threshold(0.5), folder, segments=True)
        expected, *_ = read_every_exit(source, inputs)
        for engine in (OrtModel, OrtSegments):
            segments = engine(folder, manifest, threads=1)
            np.testing.assert_allclose(read_every_exit(segments, inputs)[0], expected, atol=ENGINES)
            for threshold in (0.36, 0.5):
                result, wanted = (early_exit(either, Threshold(threshold), inputs) for either in (segments, source))
                np.testing.assert_allclose(result.logits, wanted.logits, atol=ENGINES)
                assert result.layers_run.tolist() == wanted.layers_run.tolist()
            theirs = source if engine is OrtSegments else model.segments()  # the one graph restarts
            assert [segments.flops(k, inputs)[0] for k in range(2)] == [theirs.flops(k, inputs)[0] for k in range(2)]
        if segments.can_join():  # as a server has them: rows of several batches go on as one
            alone = [segments.advance(0, segments.start(inputs.take(np.array([row])))) for row in range(len(inputs))]
            state = segments.joined(inputs, [(row_state, 0) for row_state in alone])
            logits = segments.read(1, segments.advance(1, state))
            np.testing.assert_allclose(logits, expected[:, 1], atol=ENGINES)


@pytest.mark.parametrize("method", ["palbert", "cat"])
def test_segments_that_carry_more_than_hidden_states_are_verified_too(t5_folder, task_folder, tmp_path, method):  # noqa: F811
    """The hidden states of a row are one more than its tokens: the start token's."""
    run = mini_ee.train(method, t5_folder, task_folder, tmp_path / "run", exits=(1, 2, 3), epochs=1, max_train=24)
    assert mini_ee.export(run, tmp_path / "exported", segments=True)["verified"]["max_logit_difference"] < ENGINES


def buckets_of_a_graph(graph):
    """How often positions of a stack are looked up: once in each encoder."""
    nodes = sum(any(name.endswith("encoder_biases.table.weight") for name in node.input) for node in graph.node)
    branches = (attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g"))
    return nodes + sum(map(buckets_of_a_graph, branches))


def test_the_encoder_is_in_the_graph_of_the_first_segment_alone(tmp_path):
    first, *_, (streams, options) = models("t5")
    for model, source, again in ((first[0], first[0].segments(), 0), (streams, streams.segments(*options.values()), 1)):
        folder = tmp_path / type(model).__name__
        folder.mkdir()
        write_graphs(model, source, Threshold(0.5), folder, segments=True)
        names = ("model", "segment_1", "segment_2", "segment_3")
        graphs = {name: onnx.load(folder / f"onnx/{name}.onnx", load_external_data=False).graph for name in names}
        counts = {name: buckets_of_a_graph(graph) for name, graph in graphs.items()}
        assert counts == {"model": 1, "segment_1": 1, "segment_2": 0, "segment_3": again}  # the streams restart there


# ---- Adapters ----


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_peft_computes_what_we_compute(kind, tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install transformers peft")
    peft = pytest.importorskip("peft", reason="pip install transformers peft")
    *_, (model, _) = models(kind)
    inputs = padded_rows(model.backbone)
    ids, mask = torch.from_numpy(inputs.input_ids), torch.from_numpy(inputs.attention_mask)
    save_backbone(model.backbone, tmp_path / "base")
    save_adapters(model, tmp_path, str(tmp_path / "base"))
    start = torch.zeros(len(ids), 1, dtype=torch.int64)
    with torch.no_grad():
        for k, logits in enumerate(model(ids, mask, torch.zeros_like(ids))[:2]):  # they norm the last layer's states
            base = transformers.AutoModel.from_pretrained(tmp_path / "base").eval()
            adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / f"exit_{k + 1}")).eval()
            output = adapted(input_ids=ids, attention_mask=mask, decoder_input_ids=start, output_hidden_states=True)
            assert_close(model.heads[k](output.decoder_hidden_states[k + 1], None), logits)


# ---- From a checkpoint to an export ----


LORA = ("--targets", "query,cross_key,up")
RAEE = ("--template", "{text} so it was", "--words", "0=awful,1=great", "--shots", 2, "--include-embeddings")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, more, engine",
    [("joint", (), "torch"), ("lora-exits", LORA, "onnxruntime"), ("raee", RAEE, "onnxruntime")],
    ids=["joint", "lora-exits", "raee"],
)
def test_it_is_trained_exported_and_run_as_any_other(
    method,
    more,
    engine,
    t5_folder,  # noqa: F811
    task_folder,
    tmp_path,
    capsys,
):
    options = (
        "--model",
        t5_folder,
        "--task",
        task_folder,
        "--epochs",
        1,
        "--exits",
        "1,2,3",
        "--out",
        tmp_path / "run",
    )
    answer(capsys, "train", method, *options, *more)
    result = answer(capsys, "evaluate", tmp_path / "run", "--task", task_folder)
    assert result["method"] == method
    is_served_end_to_end(capsys, tmp_path, tmp_path / "run", task_folder, engine, ())


def test_heads_read_the_one_token_there_is(t5_folder, task_folder, tmp_path, capsys):  # noqa: F811
    options = ("--model", t5_folder, "--task", task_folder, "--out", tmp_path / "run", "--pool", "mean")
    message = refused(capsys, "train", "joint", *options)
    assert "pool must be first for a t5, got 'mean'" in message
