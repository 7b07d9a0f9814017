"""ConsistentEE (Zeng et al. 2024): a policy at each exit learns by REINFORCE when to stop.

Paper: Ziqian Zeng, Yihuai Hong, Hongliang Dai, Huiping Zhuang, Cen Chen: ConsistentEE: A Consistent and Hardness-Guided
Early Exiting Method for Accelerating Language Models Inference. AAAI 2024, arXiv:2312.11882v2.

    Eq. 1   sum_t t l_t / sum_t t                    step 1: all exits learn together: depth_weighted_loss
    Eq. 2   l_t = H(y, P_t(x))                       the loss of the exit after layer t: exit_losses
    Eq. 3   R_t = -l_t - alpha t                     vanilla reward of stopping there: vanilla_rewards
    Eq. 4   R_t = -l_t - alpha (1 - M / L) t         hardness-guided reward: hardness_guided_rewards
    Eq. 5   E[R] = sum_t P(exit at t) R_t            step 3: only the policies learn: reinforce_loss (see deviation 1)
    Eq. 6   l_t at the exit t where it stops         step 4: heads and layers learn, no policy: consistent_loss
    Eq. 7   M, from which layer on all exits are right   step 2, the memorized layer: memorized_layer

Steps 2 to 4 are repeated. A trajectory is the exit where it ends: P(exit at t) = pi_t prod_{i<t} (1 - pi_i), where pi_t
is the policy's probability of stopping in state s_t. At the last exit all examples stop: there are only K trajectories.

Deviations from the paper, and what it leaves open, with the test in tests/spec/test_4_consistent.py or tests/core:
1. Eq. 5 is printed as E[P R], the sum of P^2 R over exits. Rewards are negative, so at its maximum P is spread over
   all exits, as 1 / |R| (test_eq5_taken_literally_would_spread_the_probability). Here it is E[R]. Its gradient:
   REINFORCE, with the mean reward of the example's other trajectories as baseline (test_eq5_the_mean_of_10000_...).
2. At first all exits are equally likely (test_policies_begin_with_equal_chances): with probabilities of 1/2, hardly any
   trajectory would reach a deep layer.
3. t and M count layers, even when there are fewer exits (test_eq3_and_eq4_count_depth_in_layers).
4. "Until convergence": weights stay, and another round follows, if the vanilla reward of held-out examples, which stop
   where pi_t > 1/2, rises. Eq. 4 would reward unlearning the last exit (test_unlearning_the_last_exit_raises_eq4).
5. Heads and policies read the mean over tokens; the paper's read the first one. Step 4 samples exits from the same
   states, with dropout, from which it computes the losses.
6. Tokens (fit_tokens, with llama.TokenExits; `mini-ee train consistent --model LLAMA`): the paper trains a decoder with
   LoRA; here step 1 trains all of it. Then it is frozen, and its states are computed once. A policy reads them after
   the norm of its exit. y is the next token; the reward Eq. 3.
7. The paper also explores epsilon-greedily (after Eq. 5, without an epsilon); here trajectories are drawn from P alone.
   In the lab, coins may choose a share of the actions: `with_coins` in lab/methods/consistent.py.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.bert import Bert, Exits, State
from mini_ee.data import Rows, of_all, open_task, report, usual_rules
from mini_ee.load import exits_of
from mini_ee.rules import Policy
from mini_ee.train import Options, script, train

ALPHA, TRAJECTORIES, WIDTH = 0.07, 8, 32  # ALPHA: the lab's default; the script's is in ConsistentOptions
CHUNK = 1024  # rows whose rewards are computed together


# ---- Eq. 1 to 4 and 7: losses, rewards, hardness ----
def depth_weighted_loss(losses: Iterable[Tensor], depths: Sequence[int]) -> Tensor:
    """Eq. 1, $sum_t t l_t / sum_t t$: the losses of K exits, each of the same shape, and their depths in layers."""
    weighted = [depth * loss for depth, loss in zip(depths, losses, strict=True)]
    return sum(weighted[1:], weighted[0]) / sum(depths)


def exit_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Eq. 2, $l_t = H(y, P_t(x))$: logits (B, K, C), labels (B,) -> (B, K), in float32 at least."""
    log_p = F.log_softmax(logits, dim=2, dtype=torch.promote_types(logits.dtype, torch.float32))
    return -log_p.gather(2, labels[:, None, None].expand(-1, logits.shape[1], 1))[..., 0]


def vanilla_rewards(losses: Tensor, depths: Tensor, alpha: float) -> Tensor:
    """Eq. 3, $R_t = -l_t - alpha t$: losses (B, K), depths (K,) in layers -> (B, K)."""
    return -losses - alpha * depths


def hardness_guided_rewards(losses: Tensor, depths: Tensor, alpha: float, memorized: Tensor) -> Tensor:
    """Eq. 4, $R_t = -l_t - alpha (1 - M / L) t$: memorized (B,) in layers -> (B, K)."""
    return -losses - alpha * (1 - memorized / depths[-1])[:, None] * depths


def memorized_layer(right: Tensor, depths: Tensor) -> Tensor:
    """Eq. 7, M: right (B, K) bool -> (B,), in layers; L if the last exit is wrong."""
    consecutive = right.flip(1).long().cumprod(dim=1).sum(dim=1)  # right exits from the last one down
    return depths[(right.shape[1] - consecutive).clamp(max=right.shape[1] - 1)]


def rewards_of(logits: Tensor, labels: Tensor, depths: Tensor, alpha: float, guided: bool) -> Tensor:
    """Eq. 4, or without `guided` Eq. 3: logits (B, K, C), labels (B,) -> (B, K). To try another reward, edit this."""
    losses = exit_losses(logits, labels)
    if not guided:
        return vanilla_rewards(losses, depths, alpha)
    return hardness_guided_rewards(losses, depths, alpha, memorized_layer(logits.argmax(2) == labels[:, None], depths))


# ---- Eq. 5 and 6: trajectories ----
def log_exit_probabilities(exit_logits: Tensor) -> Tensor:
    """$ln P(exit at t) = ln pi_t + sum_{i<t} ln(1 - pi_i)$: the policies' (B, K - 1) -> (B, K). The last is forced."""
    continued = F.pad(F.logsigmoid(-exit_logits).cumsum(dim=1), (1, 0))  # column t: the sum over i < t
    return continued + F.pad(F.logsigmoid(exit_logits), (0, 1))


def sample_exits(log_exit: Tensor, trajectories: int, generator: torch.Generator | None = None) -> Tensor:
    """The exits at which n sampled trajectories of each example end: (B, K) -> (B, n), indices from 0."""
    return torch.multinomial(log_exit.detach().exp(), trajectories, replacement=True, generator=generator)


def reinforce_loss(log_exit: Tensor, rewards: Tensor, exits: Tensor, baseline: bool = True) -> Tensor:
    """Eq. 5 over sampled trajectories: minus the mean of $(R - b) ln P$. log_exit, rewards (B, K); exits (B, n).

    Its value means nothing, but the expectation of its gradient is that of $-E[R]$ (the log-derivative trick). b does
    not depend on where the trajectory itself ends, so the expectation stays and the variance falls.
    """
    R = rewards.gather(1, exits)  # (B, n)
    advantage = R - leave_one_out(R) if baseline else R
    return -(advantage * log_exit.gather(1, exits)).mean()


def leave_one_out(rewards: Tensor) -> Tensor:
    """The baseline of each trajectory: the mean reward of the example's others, (B, n) -> (B, n)."""
    return (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)


def consistent_loss(losses: Tensor, exit_logits: Tensor, trajectories: int = TRAJECTORIES) -> Tensor:
    """Eq. 6: the loss where examples stop, the mean over examples and trajectories. (B, K), (B, K - 1) -> scalar."""
    return losses.gather(1, sample_exits(log_exit_probabilities(exit_logits), trajectories)).mean()


def inferred_reward(exit_logits: Tensor, rewards: Tensor) -> float:
    """The mean reward if each example stops at the first exit with pi_t > 1/2. (B, K - 1), (B, K)."""
    stops = F.pad(exit_logits > 0, (0, 1), value=True).long()
    return float(rewards.gather(1, stops.argmax(dim=1, keepdim=True)).mean())  # argmax: the first of equal values


# ---- The models ----
def policy_networks(width: int, exits: Sequence[int]) -> nn.ModuleList:
    """A network from s_t (D,) to the logit of pi_t, for each exit but the last."""
    if len(exits) < 2:
        raise ValueError(f"ConsistentEE needs at least two exits to choose from, got {len(exits)}")
    policies = nn.ModuleList(nn.Sequential(nn.Linear(width, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)) for _ in exits[:-1])
    for after, policy in zip(range(len(exits) - 1, 0, -1), policies):
        nn.init.zeros_(policy[2].weight)
        nn.init.constant_(policy[2].bias, -np.log(after))  # pi = 1 / (1 + after), `after` exits follow this one
    return policies


class PolicyExits(Exits):
    """A BERT with heads and policies, which read the same pooled states."""

    def __init__(self, bert: Bert, exits: Sequence[int], classes: int):
        super().__init__(bert, exits, classes)
        self.policies = policy_networks(bert.config["hidden_size"], exits)

    def decide(self, k: int, states: Tensor) -> Tensor:
        """The logit of pi_t at exit k: (B, D) -> (B,)."""
        return self.policies[k](states)[:, 0]

    def exit_logit(self, k: int, state: State) -> np.ndarray:
        return self.decide(k, self.pooled(state.hidden, state.mask)).numpy(force=True)


def exit_logits(model: nn.Module, states: Tensor) -> Tensor:
    """The policies' logits: states (B, K, D), which get no gradient -> (B, K - 1). model: also llama.TokenExits."""
    return torch.stack([model.decide(k, states[:, k].detach()) for k in range(len(model.policies))], 1)


# ---- Training ----
@dataclass(frozen=True)
class Settings:
    """Of the training; the paper gives no learning rates and epochs."""

    alpha: float  # price of a layer, in nats
    guided: bool = True  # Eq. 4, else Eq. 3
    epochs: int = 4  # of step 1
    lr: float = 4e-4  # of step 1
    rounds: int = 2
    policy_epochs: int = 20
    policy_lr: float = 3e-3
    task_lr: float = 3e-5


def fit_rows(model: PolicyExits, learn: Rows, held: Rows, settings: Settings) -> None:
    """Train on examples; `held` ones decide when a step has become worse."""

    def states_of(rows: Tensor) -> Tensor:
        return model.states(learn.batch(rows.numpy()))

    rates = {model.bert: settings.lr, model.heads: settings.lr}
    train(rates, len(learn), lambda rows: joint_loss(model, states_of(rows), learn.labels[rows]), settings.epochs)
    data = [(lambda part=part: of_all(model.states, part), part.labels) for part in (learn, held)]
    alternate(model, settings, data, states_of, [model.bert, model.heads])


def fit_tokens(model: nn.Module, learn: Tensor, held: Tensor, settings: Settings) -> None:
    """Train on texts (N, T): y is the next token. After step 1 the layers are frozen, and only heads learn."""

    def states(texts: Tensor) -> Tensor:
        return model.states(texts[:, :-1]).flatten(0, 1)  # (B (T - 1), K, D)

    def joint(rows: Tensor) -> Tensor:
        return joint_loss(model, states(learn[rows]), learn[rows, 1:].flatten())

    train({model.llama: settings.lr, model.heads: settings.lr}, len(learn), joint, settings.epochs, size=16)
    with torch.no_grad():
        known = [torch.cat([states(part) for part in texts.split(32)]) for texts in (learn, held)]
    data = [(lambda at=at: known[at], texts[:, 1:].flatten()) for at, texts in enumerate((learn, held))]
    alternate(model, settings, data, lambda rows: known[0][rows], [model.heads], size=256)


def joint_loss(model: nn.Module, states: Tensor, labels: Tensor) -> Tensor:
    """The mean of Eq. 1 over examples. states (B, K, D), labels (B,)."""
    return depth_weighted_loss(exit_losses(model.classify(states), labels).T, model.exits).mean()


Data = tuple[Callable[[], Tensor], Tensor]
"""A function that computes the states (N, K, D) with the present weights, and the labels (N,)."""


def alternate(
    model: nn.Module,
    settings: Settings,
    data: Sequence[Data],
    states_of: Callable[[Tensor], Tensor],
    task_modules: Sequence[nn.Module],
    size: int = 32,
) -> None:
    """Steps 2 to 4, until a round does not raise the reward on held-out examples.

    data: training, held-out examples. states_of: training rows -> states, with gradients for step 4's task_modules.
    """
    (states_now, labels), (held_now, held_labels) = data
    depths, best = torch.tensor(model.exits, dtype=torch.float32), -np.inf

    @torch.no_grad()
    def all_rewards(states: Tensor, labels: Tensor, guided: bool) -> Tensor:
        pairs = zip(states.split(CHUNK), labels.split(CHUNK))
        return torch.cat([rewards_of(model.classify(some), of, depths, settings.alpha, guided) for some, of in pairs])

    for _ in range(settings.rounds):
        before = best
        states, held_states = states_now(), held_now()
        rewards = all_rewards(states, labels, settings.guided)  # steps 2 and 3: heads and layers are frozen
        held_rewards = all_rewards(held_states, held_labels, False)

        def policy_step(rows: Tensor) -> Tensor:
            log_exit = log_exit_probabilities(exit_logits(model, states[rows]))
            return reinforce_loss(log_exit, rewards[rows], sample_exits(log_exit, TRAJECTORIES))

        def policy_score() -> float:
            return inferred_reward(exit_logits(model, held_states), held_rewards)

        rates = {model.policies: settings.policy_lr}
        best = train(rates, len(labels), policy_step, settings.policy_epochs, size, policy_score, best)

        def task_step(rows: Tensor) -> Tensor:  # step 4
            states = states_of(rows)
            losses = exit_losses(model.classify(states), labels[rows])
            return consistent_loss(losses, exit_logits(model, states).detach())

        def task_score() -> float:
            return inferred_reward(exit_logits(model, states := held_now()), all_rewards(states, held_labels, False))

        best = train(dict.fromkeys(task_modules, settings.task_lr), len(labels), task_step, 1, size, task_score, best)
        if best == before:
            return


# ---- The script ----
@dataclass
class ConsistentOptions(Options):
    """Options of the script."""

    # The largest of .02, .03, .07 at which the policy loses nothing on the reviews' dev split.
    alpha: float = field(default=0.02, metadata={"help": "price of a layer in nats; a larger one exits earlier"})
    rounds: int = field(default=2, metadata={"help": "most rounds of a policy step and a task step"})


def main(options: ConsistentOptions) -> tuple[Exits, Policy, Rows]:
    """Train on four fifths of the rows; the others end the rounds."""
    torch.manual_seed(options.seed)
    bert = Bert.load(options.model)
    rows, test = open_task(options.task, options.model, len(bert.position.weight), options.rows, options.seed)
    if not rows.names:
        raise ValueError("ConsistentEE needs classes: the reward of an exit is the logarithm of a probability")
    learn, held = rows.split(0.8, 0.2)
    model = PolicyExits(bert, exits_of(options.exits, (2, 4, 8, 12), len(bert.layers)), rows.outputs).eval()
    print(f"ConsistentEE: {len(learn)} training rows, {len(held)} held out")
    fit_rows(model, learn, held, Settings(alpha=options.alpha, epochs=options.epochs, rounds=options.rounds))
    rules = {"policy, pi > .5": Policy(), "policy, pi > .8": Policy(0.8)} | usual_rules(rows)
    report(model, test, rules, "ConsistentEE", options.picture or "consistent.png")
    print("\nThe paper (Table 3, BERT-base, six tasks): 34% of the layers saved on average without loss of accuracy.")
    return model, Policy(), test


if __name__ == "__main__":
    script(main, ConsistentOptions, __doc__)
