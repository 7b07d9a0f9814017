"""Self-supervised exits (Valade 2024): heads of a frozen decoder learn what it predicts itself. No label is needed.

Paper: Florian Valade, Accelerating Large Language Model Inference with Self-Supervised Early Exits, arXiv:2407.21082v1.

    Eq. 1   sum_k [(1 - lambda) CE(p_k, p_theta) - lambda Entropy(p_k)]  the loss: head_loss is that of one head
    Eq. 2   c_k = c(p_k) at each token of D_c; c(p) = p_(1) - p_(2)      confidence_and_agreement (breaking ties: 3.3.1)
    Eq. 3   t_k = 1 if head k predicts what the full model predicts      confidence_and_agreement
    tau_k   the lowest c such that at least a share epsilon of the tokens at or above it has t_k = 1 (3.3.1): calibrate

Symbols: p_theta the full model, p_k head k after layer exits[k]; the last exit is the LM head: there are K - 1 heads.
D_t, D_c: texts that it writes from the prompts of Table 1, to train and to calibrate (section 3.1 prints them the other
way round). V: the size of the vocabulary.
Inference (3.3.2): a token stops at the first exit with c_k >= tau_k. Its keys and values in deeper layers: llama.py.

Deviations from the paper, and what it leaves open, with the test in tests/spec/test_2_self_supervised.py:
1. p_k is the softmax of logits. The printed CE takes a softmax of p_k once more (test_eq1_position_by_position).
2. The target is the most likely token of p_theta ("hard"), as in the released code; the paper prints p_theta ("soft").
3. Heads are copies of the LM head, and lambda is 0: with the paper's .95 a perfect head gives the right token of Phi's
   vocabulary a probability of only .9% (test_eq1_the_optimum_for_phis_vocabulary). Section 4.1 finds copies without
   penalty too certain, and prefers heads from scratch with .95: in the lab, `--init scratch --penalty .95`.
4. tau_k holds on the tokens that chose it; `tau_with_confidence` (calibrate.py) also on new ones. Epsilon is a share at
   each head alone, over all tokens. Deeper heads see only tokens that have not exited, so all may agree less.
5. Open: texts are sampled from p_theta and have 64 tokens; all positions count, even the prompt's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mini_ee.calibrate import default_rule, tau, tau_with_confidence
from mini_ee.llama import Cache, Llama, Place, TokenExits, generate, pieces, read_texts
from mini_ee.load import exits_of, load_tokenizer
from mini_ee.loop import Result, Table, early_exit
from mini_ee.rules import MEASURES, Never, Rule, Threshold
from mini_ee.train import Options, draw, script, train

TRAINING_PROMPTS = ("This is an example script:", "My name is", "I am a", "Welcome to", "what is a")
CALIBRATION_PROMPTS = (
    "A cat is",
    "In Python, a list is",
    "In C, we can define a function",
    "The capital of France is",
    "The derivative of x^2 is",
)
LAMBDA, MEASURE = 0.0, "breaking_ties"
LENGTH = 64  # tokens of a text


# ---- Eq. 1 ----
def head_loss(logits: Tensor, full: Tensor, penalty: float = LAMBDA, target: str = "hard") -> Tensor:
    """Eq. 1 at each position, $(1 - lambda) CE(p_k, p_theta) - lambda Entropy(p_k)$, in nats and in float32.

    logits of a head and of the full model, (..., V), (..., V) -> (...). target: see deviation 2.
    """
    log_p = logits.float().log_softmax(-1)
    if target == "soft":
        cross_entropy = -(full.float().softmax(-1) * log_p).sum(-1)
    else:
        cross_entropy = -log_p.gather(-1, full.argmax(-1, keepdim=True))[..., 0]
    if penalty == 0:  # the entropy over a vocabulary takes a fifth of a training step
        return cross_entropy
    return (1 - penalty) * cross_entropy - penalty * entropy(log_p)


def entropy(log_p: Tensor) -> Tensor:
    """The entropy, $-sum p ln p$, with a plus sign, unlike rules.entropy: (..., V) -> (...)."""
    return -(log_p.exp() * log_p).sum(-1)


# ---- D_t and D_c ----
@torch.inference_mode()
def written(llama: Llama, prompts: Sequence[Sequence[int]], count: int, seed: int) -> Tensor:
    """Texts that the model writes, sampled from its own distribution: (count, LENGTH), prompts included.

    Each text begins with one of the prompts, in turn. While a prompt lasts, its tokens replace those that were drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    given = [[*prompts[row % len(prompts)]][:LENGTH] for row in range(count)]
    ids = torch.zeros(count, LENGTH, dtype=torch.long)
    cache, rows = Cache(llama.config, count, LENGTH), torch.arange(count)
    ids[:, 0] = torch.tensor([prompt[0] for prompt in given])
    for at in range(LENGTH - 1):
        place = Place(torch.full((count, 1), at), cache, rows)
        x = llama.run(llama.embed_tokens(ids[:, at : at + 1]), place, 0, len(llama.layers))
        p = llama.vocabulary(llama.norm(x[:, -1])).softmax(-1)
        ids[:, at + 1] = torch.multinomial(p, 1, generator=generator)[:, 0]
        for row, prompt in enumerate(given):
            if at + 1 < len(prompt):
                ids[row, at + 1] = prompt[at + 1]
    return ids


@torch.no_grad()
def states_of(model: TokenExits, texts: Tensor) -> Tensor:
    """The states of every exit at every position, (N T, K, D). Nothing below the heads is trained: computed once."""
    return torch.cat([model.states(some).flatten(0, 1) for some in texts.split(32)])


# ---- Training ----
def fit(model: TokenExits, texts: Tensor, epochs: int, lr: float, penalty: float = LAMBDA) -> None:
    """All heads at once, by the sum of Eq. 1 over heads, on texts (N, T). The best epoch: most agreement on a tenth."""
    model.llama.requires_grad_(False)
    states = states_of(model, texts)
    cut = len(states) // 10 * 9
    with torch.no_grad():
        full = torch.cat([model.logits(len(model.heads), some) for some in states[:, -1].split(1024)])

    def loss(rows: Tensor) -> Tensor:
        losses = [head_loss(head(states[rows, k]), full[rows], penalty) for k, head in enumerate(model.heads)]
        return torch.stack(losses).sum(0).mean()

    @torch.no_grad()
    def score() -> float:
        held = [(head(states[cut:, k]).argmax(-1) == full[cut:].argmax(-1)) for k, head in enumerate(model.heads)]
        return float(torch.stack(held).float().mean())

    train({model.heads: lr}, cut, loss, epochs, size=512, score=score)


# ---- Section 3.3.1: thresholds ----
@torch.no_grad()
def logits_of(model: TokenExits, texts: Tensor) -> np.ndarray:
    """The logits of every exit at every position, (N T, K, V)."""
    return torch.cat([model.classify(some) for some in states_of(model, texts).split(1024)]).numpy()


def confidence_and_agreement(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eq. 2 and 3, confidence and agreement of the heads: (N, K, V) -> (N, K - 1) each."""
    heads = range(logits.shape[1] - 1)
    confidence = np.stack([MEASURES[MEASURE](logits[:, k]) for k in heads], axis=1)
    return confidence, logits[:, :-1].argmax(-1) == logits[:, -1:].argmax(-1)


def calibrate(logits: np.ndarray, epsilon: float, texts: np.ndarray | None = None, delta: float = 0.05) -> Threshold:
    """tau_k of every head, as a rule. texts (N,): the text of each token, for the guarantee on new texts."""
    columns = list(zip(*(values.T for values in confidence_and_agreement(logits))))
    if texts is None:
        taus = [tau(c, agrees, epsilon) for c, agrees in columns]
    else:  # Bonferroni: with probability 1 - delta, the tau of every head holds
        level = delta / len(columns)
        taus = [tau_with_confidence(c, agrees, texts, epsilon, level) for c, agrees in columns]
    return Threshold((*taus, -np.inf), MEASURE)


# ---- The script ----
@dataclass
class SelfSupervisedOptions(Options):
    """Options of the script."""

    model: str = field(default="llama", metadata={"help": "folder of a Llama of Hugging Face, or the built-in one"})
    task: str = field(default="", metadata={"help": "file of texts for D_t and D_c; without it, the model writes them"})
    rows: int = field(default=480, metadata={"help": "texts of D_t; D_c has as many"})
    lr: float = field(default=2e-3, metadata={"help": "learning rate of the heads"})
    penalty: float = field(default=LAMBDA, metadata={"help": "lambda of Eq. 1; the paper tries 0, .1 and .95"})
    epsilon: float = field(default=0.9, metadata={"help": "least share of tokens from tau on that agree"})
    prompt: str = field(default="Once upon a time, there was a little", metadata={"help": "prompt that is continued"})


def main(options: SelfSupervisedOptions) -> None:
    """Half of D_c chooses tau, the other half shows what it is worth."""
    torch.manual_seed(options.seed)
    llama, tokenizer = Llama.load(options.model), load_tokenizer(options.model)
    first = llama.config.get("bos_token_id") or 0
    model = TokenExits(llama, exits_of(options.exits, (4, 8, 12), len(llama.layers))).eval()

    def ids_of(text: str) -> list[int]:
        return [first, *tokenizer.encode(text, add_special_tokens=False).ids]

    if options.task:
        both = pieces(read_texts(options.task), tokenizer, first, LENGTH)[: 2 * options.rows]
        learn, calibration = both[: len(both) // 2], both[len(both) // 2 :]
    else:
        prompts = [[ids_of(prompt) for prompt in some] for some in (TRAINING_PROMPTS, CALIBRATION_PROMPTS)]
        learn, calibration = (written(llama, some, options.rows, options.seed + at) for at, some in enumerate(prompts))
    print(f"self-supervised exits: {len(learn)} texts of {LENGTH} tokens to train, {len(calibration)} to calibrate")
    fit(model, learn, options.epochs, options.lr, options.penalty)
    half = len(calibration) // 2
    chosen, fresh = logits_of(model, calibration[:half]), logits_of(model, calibration[half:])
    rules = {f"epsilon {epsilon}": calibrate(chosen, epsilon) for epsilon in (0.8, options.epsilon, 0.95, 0.99)}
    groups = np.repeat(np.arange(half), LENGTH)
    rules[f"epsilon {options.epsilon}, delta .05"] = calibrate(chosen, options.epsilon, groups)
    report_tokens(model, fresh, rules, options.picture or "self_supervised.png")
    # The exact test needs independent rows: a token of each text, drawn. Half of them propose tau, the others test it.
    drawn = np.random.default_rng(options.seed).integers(LENGTH, size=half)
    one = chosen.reshape(half, LENGTH, *chosen.shape[1:])[np.arange(half), drawn]
    propose, test = ((some, some[:, -1].argmax(1)) for some in (one[::2], one[1::2]))
    rule, tested, worse, _ = default_rule(model.exits, propose, test, most_loss=1 - options.epsilon, measure=MEASURE)
    result = early_exit(Table(model.exits, fresh), rule, range(len(fresh)))
    name = f"tau {rule.threshold:.2f} at every head" if isinstance(rule, Threshold) else "the full model"
    print(f"\nWith confidence 95%, at least {options.epsilon:.0%} of tokens agree under {name} ({worse} of {tested}")
    print(f"did not). Of the fresh tokens {agreement(result, fresh):.3f} do, after {result.layers.mean():.2f} layers.")
    print("\nThe paper (Phi-2, heads after layers 6, 12, 18 and 24 of 32): as epsilon falls, MMLU hardly changes, but")
    print("Hellaswag and Winogrande fall. It reports speed-up, which a model this small cannot show.\n")
    for name, rule in (("full model", Never()), (f"epsilon {options.epsilon}", rules[f"epsilon {options.epsilon}"])):
        (text,) = generate(model, rule, [ids_of(options.prompt)], 40)
        shown = " ".join(tokenizer.decode(text.ids).split())
        print(f"{name}, {np.mean(text.layers):.2f} layers a token: {options.prompt} {shown}")


def agreement(result: Result, logits: np.ndarray) -> float:
    """The share of tokens that are predicted as the full model does."""
    return float((result.logits.argmax(1) == logits[:, -1].argmax(1)).mean())


def report_tokens(model: TokenExits, logits: np.ndarray, rules: Mapping[str, Rule], path: str) -> None:
    """Print, and draw, agreement and layers of each exit and each rule on fresh tokens, logits (N, K, V)."""
    alone, all_heads = (model.flops(LENGTH / 2, every_head) for every_head in (False, True))
    title = f"on {len(logits)} fresh tokens"
    print(f"\n{title:32}{'agreement':>10}{'layers':>8}{'FLOPs saved':>13}   tau of each head")
    exits = []
    for k, layer in enumerate(model.exits):
        exits.append((layer, float((logits[:, k].argmax(1) == logits[:, -1].argmax(1)).mean())))
        print(f"{f'all exit after layer {layer}':32}{exits[-1][1]:10.3f}{layer:8.2f}{1 - alone[k] / alone[-1]:13.0%}")
    points = {}
    for name, rule in rules.items():
        result = early_exit(Table(model.exits, logits), rule, range(len(logits)))
        points[name] = result.layers.mean(), agreement(result, logits)
        saved = 1 - (all_heads if rule.needs else alone)[result.exit_index].mean() / alone[-1]
        taus = " ".join(f"{t:.2f}" for t in np.atleast_1d(getattr(rule, "threshold", ()))[:-1])
        print(f"{name:32}{points[name][1]:10.3f}{points[name][0]:8.2f}{saved:13.0%}   {taus}")
    draw(path, "Self-supervised exits", "agreement with the full model", exits, points)


if __name__ == "__main__":
    script(main, SelfSupervisedOptions, __doc__)
