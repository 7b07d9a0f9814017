"""ConsistentEE (Zeng et al. 2024, arXiv:2312.11882v2): a policy at every exit learns by REINFORCE when to exit.

Paper: Ziqian Zeng, Yihuai Hong, Hongliang Dai, Huiping Zhuang, Cen Chen, ConsistentEE: A Consistent and Hardness-Guided
Early Exiting Method for Accelerating Language Models Inference, AAAI 2024, arXiv:2312.11882v2. Eq. 1, the weighted sum,
is training.stages.depth_weighted_sum, which other methods share; Eq. 2 to 7 are here, for examples and for tokens. The
equations as tests: tests/spec/test_4_consistent.py. Table 1 is computed in consistent_hardness.py.

Symbols:   losses       $l_t = H(y, P_t(x))$ of all exits
           depths       the layers t of the exits, L the last
           memorized    the memorized layer M
           exit_logits  the logits of $pi(Exit | s_t; theta)$
           log_exit     $ln P(exit at t)$

A trajectory is determined by the exit at which it ends: the action is Continue at all exits before, Exit there. So
$P(exit at t) = pi_t prod_{i<t} (1 - pi_i)$. At the last exit every example stops, so there are only K trajectories.

Deviations from the paper, and what it leaves open:
1. Eq. 5 multiplies the reward with the probability inside an expectation over that same probability. Maximising this
   would spread the probability over several exits. Here the objective is $E[R]$. Its gradient is REINFORCE with the
   mean reward of the example's other trajectories as baseline (`reinforce`), or the sum over all exits (`exact`), which
   has no variance.
2. Policies are initialised so that all exits are equally likely. If each exit had probability 1/2, hardly any
   trajectory would reach a deep layer.
3. t and M count layers, also if there are fewer exits than layers.
4. "Until convergence": after every policy epoch and task step, the held-out examples exit if p > .5. Their mean reward
   by Eq. 3 decides whether the weights are kept. Training ends after the first round without an improvement. Eq. 4
   would be wrong here: its M depends on the current weights, so the reward of an example would rise if the last exit
   unlearned it (`--selection learned` uses Eq. 4 nevertheless).
5. The paper gives no learning rates and epochs. Training by Eq. 1 has those that all methods share here. Policies are
   small and start untrained, so they get more epochs and a higher learning rate than the backbone.
6. Heads and policies read the mean over tokens by default; those of the paper read the first token (`pool`).
7. For examples, step 4 computes states with dropout. It samples exits and computes losses from the same states.
8. Table 1: the loss is that of Eq. 1 on held-out examples; forgetting events are counted from epoch to epoch.

On tokens ("Experimental Settings", the part on generation): step 1 is LoRA on a decoder. Then the decoder is frozen, so
steps 2 to 5 run on states that are computed once. Text is generated with the rule Policy (p > .5) and
missing_kv="copy_state", the paper's state copying.

9. s_t is the state after the norm of the internal classifier, because raw states grow from layer to layer.
10. The last exit is the LM head. No step trains it, except through the adapters of step 1.
11. In training, the policy reads states of tokens whose context ran through all layers; state copying is for inference.
12. y is the next token of the text; with `--target hard`, the next token that the full model would generate.
13. The vanilla reward is the default, as in the paper. Eq. 4 costs nothing extra here, as all exits read every token.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.data.settings import Settings, option
from mini_ee.lab.exits.row_exits import States
from mini_ee.lab.rules import Policy
from mini_ee.lab.training.default_rule import sweep
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.policies import POLICY_WIDTH, leave_one_out, policy_network, policy_rule
from mini_ee.lab.training.stages import Batch, Stage, joint_stage

REWARDS = ("hardness-guided", "vanilla")

ESTIMATORS = ("reinforce", "exact")

TASK_TARGETS = ("label", "hard")

SELECTIONS = ("vanilla", "learned")

REWARDS_BATCH = 64  # examples whose rewards are computed together


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the method."""

    alpha: float = option(0.07, "price of a layer in nats, Eq. 3 and 4; a larger one exits earlier", least=0)
    reward: str = option("hardness-guided", "reward: hardness-guided is Eq. 4, vanilla Eq. 3", choices=REWARDS)
    estimator: str = option("reinforce", "estimator of the gradient of Eq. 5", choices=ESTIMATORS)
    trajectories: int = option(
        8,
        "trajectories per example; the baseline of each is the mean reward of the others",
        least=2,
        unused_when=("estimator", "exact"),
    )
    epsilon: float = option(0.0, "share of actions in training that a fair coin chooses", least=0, most=1)
    rounds: int = option(3, "maximum number of rounds; a round is a policy step and a task step", least=1)
    policy_epochs: int = option(20, "epochs of a policy step", least=1)
    policy_lr: float = option(3e-3, "learning rate of the policies", above=0)
    task_epochs: int = option(1, "epochs of a task step", least=1)
    task_lr: float = option(3e-5, "learning rate of backbone and heads in a task step", above=0)
    target: str = option(
        "label", "target y: the label, or the prediction of the last exit (hard)", choices=TASK_TARGETS
    )
    selection: str = option(
        "vanilla", "held-out reward that selects the weights: Eq. 3, or that of --reward (learned)", choices=SELECTIONS
    )


# ---- The model: internal classifiers and policies on one pooled state ----
class PolicyNetworks(nn.Module):
    """A policy network at every exit but the last: $pi(Exit | s_t; theta)$. Raises ValueError for a single exit."""

    def __init__(self, width: int, exits: tuple[int, ...]):
        super().__init__()
        if len(exits) < 2:
            raise ValueError(f"ConsistentEE needs at least two exits to choose from, got {len(exits)}")
        # At an exit with n exits after it, the initial probability is 1 / (1 + n): so all exits are equally likely.
        exits_after = range(len(exits) - 1, 0, -1)
        self.networks = nn.ModuleList(policy_network(width, 1 / (1 + n)) for n in exits_after)
        self.flops = 2.0 * POLICY_WIDTH * (width + 1)  # of one exit_logit

    def exit_logit(self, k: int, state: Tensor) -> Tensor:
        """The logit of $pi(Exit | s_t; theta)$: (..., D) -> (...). No gradient flows into the state."""
        return self.networks[k](state.detach())[..., 0]


# ---- The equations ----
def exit_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Eq. 2, $l_t = H(y, P_t(x))$: logits (B, K, C), labels (B,) -> (B, K), in float32 at least."""
    log_p = F.log_softmax(logits, dim=2, dtype=torch.promote_types(logits.dtype, torch.float32))
    return -log_p.gather(2, labels[:, None, None].expand(-1, logits.shape[1], 1))[:, :, 0]


def vanilla_rewards(losses: Tensor, depths: Tensor, alpha: float) -> Tensor:
    """Eq. 3: what exiting at each exit is worth, $-H(y, P_t(x)) - alpha t$. losses (B, K), depths (K,) -> (B, K)."""
    return -losses - alpha * depths


def hardness_guided_rewards(losses: Tensor, depths: Tensor, alpha: float, memorized: Tensor) -> Tensor:
    """Eq. 4: as Eq. 3, with $alpha (1 - M / L)$ in place of $alpha$. memorized (B,) in layers; returns (B, K)."""
    return -losses - alpha * (1 - memorized / depths[-1])[:, None] * depths


def log_exit_probabilities(exit_logits: Tensor, epsilon: float = 0.0) -> Tensor:
    """The logarithm of the probability of each trajectory: (B, K - 1) -> (B, K).

    $$ln P(exit at t) = ln pi(Exit | s_t) + sum_{i<t} ln pi(Continue | s_i)$$

    The last exit is forced, so it adds no term. With epsilon-greedy actions pi is the mixture of the policy with a fair
    coin: $(1 - epsilon) pi + epsilon / 2$ for either action.
    """
    log_exit, log_continue = F.logsigmoid(exit_logits), F.logsigmoid(-exit_logits)
    if epsilon:
        coin, policy = (exit_logits.new_tensor(share).log() for share in (epsilon / 2, 1 - epsilon))
        log_exit, log_continue = (torch.logaddexp(policy + log_pi, coin) for log_pi in (log_exit, log_continue))
    continued = F.pad(log_continue.cumsum(dim=1), (1, 0))  # column t: the sum over i < t, 0 at the first exit
    return continued + F.pad(log_exit, (0, 1))


def sample_exits(log_exit: Tensor, trajectories: int, generator: torch.Generator | None = None) -> Tensor:
    """The exits at which n sampled trajectories of each example end: (B, K) -> (B, n), indices from 0."""
    return torch.multinomial(log_exit.detach().exp(), trajectories, replacement=True, generator=generator)


def reinforce_loss(log_exit: Tensor, rewards: Tensor, exits: Tensor, baseline: bool = True) -> Tensor:
    """Eq. 5 over sampled trajectories: minus the mean of $(R - b) ln P(tau)$.

    Its value means nothing, but the expectation of its gradient is the gradient of $-E[R]$ (the log-derivative trick).
    The baseline b does not depend on the trajectory itself, so it lowers the variance and keeps the expectation.
    log_exit, rewards (B, K); exits (B, n) as sample_exits draws them, from these same probabilities.
    """
    sampled = rewards.gather(1, exits)  # (B, n); no gradient: rewards come from frozen heads
    advantage = sampled - leave_one_out(sampled) if baseline else sampled
    return -(advantage * log_exit.gather(1, exits)).mean()


def exact_loss(log_exit: Tensor, rewards: Tensor) -> Tensor:
    """Eq. 5 over all trajectories: minus the mean over examples of $sum_t P(exit at t) R_t$. Both (B, K)."""
    return -(log_exit.exp() * rewards).sum(dim=1).mean()


def policy_loss(exit_logits: Tensor, rewards: Tensor, config: Config) -> Tensor:
    """Minus Eq. 5, with the estimator of the settings. exit_logits (B, K - 1), rewards (B, K)."""
    log_exit = log_exit_probabilities(exit_logits, config.epsilon)
    if config.estimator == "exact":
        return exact_loss(log_exit, rewards)
    return reinforce_loss(log_exit, rewards, sample_exits(log_exit, config.trajectories))


def consistent_loss(losses: Tensor, exit_logits: Tensor, config: Config) -> Tensor:
    """Eq. 6: the cross-entropy at the exits where examples stop, the mean over examples and trajectories.

    The policies get no gradient. losses (B, K), exit_logits (B, K - 1).
    """
    log_exit = log_exit_probabilities(exit_logits.detach(), config.epsilon)
    if config.estimator == "exact":
        return (log_exit.exp() * losses).sum(dim=1).mean()
    return losses.gather(1, sample_exits(log_exit, config.trajectories)).mean()


def memorized_layer(right: Tensor, depths: Tensor) -> Tensor:
    """Eq. 7: the depth from which on all exits are right, L if the last one is wrong. (B, K) bool -> (B,)."""
    consecutive = right.flip(1).long().cumprod(dim=1).sum(dim=1)  # right exits from the last one down
    return depths[(right.shape[1] - consecutive).clamp(max=right.shape[1] - 1)]


# ---- Training: steps 1 to 5 ----


def recipe(model: nn.Module, config: Config) -> Generator[Stage, float, None]:
    """Step 1, then rounds of steps 3 and 4, until a round does not improve the held-out reward.

    Step 2 is part of both: M is computed together with the rewards.
    """
    yield joint_stage(model, name="initialise", trainable=lambda name: not name.startswith("policy."))
    best = None  # the best held-out reward of all rounds; a stage that does not beat it is undone
    for number in range(1, config.rounds + 1):
        before = best
        best = yield policy_stage(number, best, config)
        best = yield task_stage(number, best, config, frozen=model.unit == "tokens")
        if best == before:
            return


def policy_stage(number: int, best: float | None, config: Config) -> Stage:
    """Step 3 of a round."""
    return Stage(
        name=f"policy {number}",
        trainable=lambda name: name.startswith("policy."),
        loss=partial(learn_policy, config=config),
        on_states=True,
        make_targets=partial(rewards_of_all, config=config),
        validate=partial(held_out_reward, config=config),
        settings={"epochs": config.policy_epochs, "head_lr": config.policy_lr, "warmup": 0.0},
        to_beat=best,
    )


def task_stage(number: int, best: float | None, config: Config, frozen: bool) -> Stage:
    """Step 4 of a round. frozen: only step 1 trains the backbone, through adapters."""
    return Stage(
        name=f"task {number}",
        trainable=lambda name: not name.startswith(("policy.", "adapters.") if frozen else "policy."),
        loss=partial(learn_task, config=config),
        on_states=frozen,
        validate=partial(held_out_reward, config=config),
        settings={"epochs": config.task_epochs, "lr": config.task_lr, "head_lr": config.task_lr, "warmup": 0.0},
        to_beat=best,
    )


def learn_policy(model: nn.Module, batch: Batch, config: Config) -> Tensor:
    """Step 3, on the states of a frozen model: only the policies are computed. The targets are the rewards."""
    return policy_loss(model.exit_logits(batch.states), batch.targets, config)


def learn_task(model: nn.Module, batch: Batch, config: Config) -> Tensor:
    """Step 4: one forward pass; the frozen policies read its states and draw the trajectories."""
    states = batch.states or model.states(*batch.inputs)
    logits = torch.stack([model.classify(k, state) for k, state in enumerate(states)], dim=1)
    return consistent_loss(exit_losses(logits, y_of(logits, batch.labels, config)), model.exit_logits(states), config)


def y_of(logits: Tensor, labels: Tensor, config: Config) -> Tensor:
    """y, (N,): the labels, or the predictions of the last exit. logits (N, K, C)."""
    return logits[:, -1].argmax(dim=1) if config.target == "hard" else labels


def rewards_of(model: nn.Module, logits: Tensor, labels: Tensor, config: Config) -> Tensor:
    """The reward of exiting at each exit, (N, K), from the logits of all exits, (N, K, C)."""
    losses, depths = exit_losses(logits, labels), torch.tensor(model.exits, device=logits.device)
    if config.reward == "vanilla":
        return vanilla_rewards(losses, depths, config.alpha)
    memorized = memorized_layer(logits.argmax(dim=2) == labels[:, None], depths)
    return hardness_guided_rewards(losses, depths, config.alpha, memorized)


@torch.no_grad()
def rewards_of_all(model: nn.Module, data: States, config: Config) -> Tensor:
    """The rewards of all examples or tokens, (N, K). They are computed once, because the heads are frozen."""
    device, rewards = next(model.parameters()).device, []
    for rows in np.array_split(np.arange(len(data)), max(1, len(data) // REWARDS_BATCH)):
        states, labels = data.batch(rows, device)
        logits = torch.stack([model.classify(k, state) for k, state in enumerate(states)], dim=1)
        rewards.append(rewards_of(model, logits, y_of(logits, labels, config), config).cpu())
    return torch.cat(rewards)


@torch.no_grad()
def held_out_reward(model: nn.Module, held_out: States, config: Config) -> dict[str, float]:
    """The mean reward on the held-out set as `score`, and the mean depth in layers.

    Examples exit as at inference. The reward is that of Eq. 3, or that of the training (`selection`).
    """
    device = next(model.parameters()).device
    selecting = config if config.selection == "learned" else replace(config, reward="vanilla")
    rewards = rewards_of_all(model, held_out, selecting)
    depths = torch.tensor(model.exits, dtype=torch.float32).expand(len(rewards), -1)
    exit_logits = model.exit_logits([state.to(device) for state in held_out.states.unbind(dim=1)]).cpu()
    return {
        "score": inferred_reward(exit_logits, rewards),
        "mean_layers": inferred_reward(exit_logits, depths),
    }


def inferred_reward(exit_logits: Tensor, rewards: Tensor) -> float:
    """The mean reward if each example stops at the first exit whose policy exceeds 1/2.

    exit_logits (B, K - 1), rewards (B, K).
    """
    stops = F.pad(exit_logits > 0, (0, 1), value=True)  # argmax finds the first of equal values
    return float(rewards.gather(1, stops.long().argmax(dim=1, keepdim=True)).mean())


# ---- The method ----
TOKENS = {"alpha": 0.1, "reward": "vanilla", "policy_epochs": 2, "policy_lr": 1e-3, "task_lr": 3e-4}
"""alpha is larger than for a classifier, because the loss of a token falls by tenths of a nat per layer."""
FINE_TUNING = {"lr": 2e-3, "head_lr": 8e-3, "rank": 8}

METHOD = Method(
    Config,
    recipe,
    policy=PolicyNetworks,
    candidates=sweep(Policy()),
    default_rule=policy_rule,
    exits=None,
    classes_only=True,
    defaults={"tokens": TOKENS | FINE_TUNING},
)
