"""ConsistentEE: a policy at every exit learns, by REINFORCE, whether a unit should leave there.

Paper: Ziqian Zeng, Yihuai Hong, Hongliang Dai, Huiping Zhuang, Cen Chen, ConsistentEE: A Consistent and Hardness-Guided
Early Exiting Method for Accelerating Language Models Inference, AAAI 2024, arXiv:2312.11882v2. Eq. 1, the weighted sum,
is training.stages.depth_weighted_sum, which other methods share; Eq. 2 to 7 are here, for rows and for tokens.

Symbols:   losses = H(y, P_t(x)) of all exits; depths = the layers t of the exits, L the last; memorized = the
           memorized layer M; exit_logits = the logits of pi(Exit | s_t; theta); log_exit = ln P(leave at t).

A trajectory is the exit at which it ends: continue at all exits before, leave there. So P(leave at t) is
pi_t prod_{i<t} (1 - pi_i), the last exit takes whoever is left, and all trajectories of a unit can be enumerated.

Deviations from the paper, and what it leaves open:
1. Eq. 5 multiplies the reward with the probability inside an expectation over it, which would spread the probability.
   Its gradient here is that of E[R]: REINFORCE, with the mean reward of the unit's other trajectories as baseline
   (`reinforce`), or the sum over all exits (`exact`), which has no variance.
2. Policies begin so that a unit is as likely to leave at one exit as at another: with a chance of 1/2 each, hardly any
   trajectory would reach a deep layer.
3. Where exits are fewer than layers, t and M count layers all the same.
4. "Until convergence": after every policy epoch and task step, held-out units leave where p > .5, and the mean of Eq. 3
   over them says whether it is kept; rounds end with the first that does not improve. Not the mean of Eq. 4: its M is
   that of the weights of the moment, so that a row which the last exit unlearns would be worth more than before
   (`--selection learned` takes it all the same).
5. Rates and epochs, of which the paper says nothing: Eq. 1 has those that all methods share here; policies, which are
   small and begin anew, learn faster and longer than what they read.
6. Heads and policies may read the mean over tokens, and do by default; the paper's read the first (`pool`).
7. On rows step 4 samples where rows leave from states with dropout, those that its losses are of.
8. Table 1, which consistent_hardness.py measures: the loss is Eq. 1's, of rows that were held out; what they forget is
   counted from epoch to epoch.

Of tokens ("Experimental Settings", the part on generation): step 1 is LoRA on a decoder, which is frozen then, so that
steps 2 to 5 run on states that are computed once. A text is written under the rule Policy (p > .5), with
missing_kv="copy_state", the paper's state copying.
9. s_t is the state as the internal classifier reads it, behind that head's norm: raw states grow from layer to layer.
10. The last exit keeps the LM head, which no step trains but through the adapters of step 1.
11. While it learns, the policy sees states of tokens whose past ran through all layers; state copying is for inference.
12. y is the token that follows in the text; `--target hard` makes it the one that the full model would have written.
13. The vanilla reward is the default, as in the paper; Eq. 4 is free here, where all exits read every token anyway.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.data.options import Settings, option
from mini_ee.exits.rows import States
from mini_ee.rules import Policy
from mini_ee.training.default_rule import sweep
from mini_ee.training.method import Method
from mini_ee.training.policies import POLICY_WIDTH, leave_one_out, policy_network, policy_rule
from mini_ee.training.stages import Batch, Stage, joint_stage

REWARDS = ("hardness-guided", "vanilla")

ESTIMATORS = ("reinforce", "exact")

TARGETS = ("label", "hard")

SELECTIONS = ("vanilla", "learned")

REWARDS_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the method."""

    alpha: float = option(0.07, "the price of a layer in nats, Eq. 3 and 4: the knob for speed", least=0)
    reward: str = option("hardness-guided", "Eq. 4, or Eq. 3 (vanilla)", choices=REWARDS)
    estimator: str = option("reinforce", "of the gradient of Eq. 5", choices=ESTIMATORS)
    trajectories: int = option(
        8,
        "sampled of a unit in a step; the others are the baseline of each",
        least=2,
        unused_when=("estimator", "exact"),
    )
    epsilon: float = option(0.0, "share of actions that a fair coin takes while training", least=0, most=1)
    rounds: int = option(3, "of policy and task steps, at most", least=1)
    policy_epochs: int = option(20, "of a policy step", least=1)
    policy_lr: float = option(3e-3, "learning rate of the policies", above=0)
    task_epochs: int = option(1, "of a task step", least=1)
    task_lr: float = option(3e-5, "learning rate of backbone and heads in a task step", above=0)
    target: str = option("label", "y: the label, or what the last exit says (hard)", choices=TARGETS)
    selection: str = option("vanilla", "held-out reward that says what is kept: Eq. 3, or --reward", choices=SELECTIONS)


# ---- The model: internal classifiers and policies on one pooled state ----
class PolicyNetworks(nn.Module):
    """A policy network at every exit but the last: pi(Exit | s_t; theta). Raises ValueError for a single exit."""

    def __init__(self, width: int, exits: tuple[int, ...]):
        super().__init__()
        if len(exits) < 2:
            raise ValueError(f"ConsistentEE needs at least two exits to choose from, got {len(exits)}")
        behind = range(len(exits) - 1, 0, -1)  # at first all exits are equally likely
        self.networks = nn.ModuleList(policy_network(width, 1 / (1 + exits_behind)) for exits_behind in behind)
        self.flops = 2.0 * POLICY_WIDTH * (width + 1)  # of one exit_logit

    def exit_logit(self, k: int, state: Tensor) -> Tensor:
        """The logit of pi(Exit | s_t; theta): (..., D) -> (...). No gradient flows into the state."""
        return self.networks[k](state.detach())[..., 0]


# ---- The equations ----
def exit_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Eq. 2, l_t = H(y, P_t(x)): logits (B, K, C), labels (B,) -> (B, K), in float32 at least."""
    log_p = F.log_softmax(logits, dim=2, dtype=torch.promote_types(logits.dtype, torch.float32))
    return -log_p.gather(2, labels[:, None, None].expand(-1, logits.shape[1], 1))[:, :, 0]


def vanilla_rewards(losses: Tensor, depths: Tensor, alpha: float) -> Tensor:
    """Eq. 3: what leaving at each exit is worth, -H(y, P_t(x)) - alpha t. losses (B, K), depths (K,) -> (B, K)."""
    return -losses - alpha * depths


def hardness_guided_rewards(losses: Tensor, depths: Tensor, alpha: float, memorized: Tensor) -> Tensor:
    """Eq. 4: as Eq. 3, with alpha (1 - M / L) in place of alpha. memorized (B,) in layers; returns (B, K)."""
    return -losses - alpha * (1 - memorized / depths[-1])[:, None] * depths


def log_exit_probabilities(exit_logits: Tensor, epsilon: float = 0.0) -> Tensor:
    """ln P(leave at t) = ln pi(Exit | s_t) + sum_{i<t} ln pi(Continue | s_i): (B, K - 1) -> (B, K).

    The last exit is forced: it adds no term of its own. With epsilon-greedy pi is the mixture of the policy with a
    fair coin, (1 - epsilon) pi + epsilon / 2 for either action.
    """
    leave, go_on = F.logsigmoid(exit_logits), F.logsigmoid(-exit_logits)
    if epsilon:
        coin = exit_logits.new_tensor(epsilon / 2).log()
        keep = exit_logits.new_tensor(1 - epsilon).log()
        leave, go_on = (torch.logaddexp(keep + action, coin) for action in (leave, go_on))
    before = F.pad(go_on.cumsum(dim=1), (1, 0))
    return before + F.pad(leave, (0, 1))


def sample_exits(log_exit: Tensor, trajectories: int, generator: torch.Generator | None = None) -> Tensor:
    """The exits where so many trajectories of each row end: (B, K) -> (B, n), indices from 0."""
    return torch.multinomial(log_exit.detach().exp(), trajectories, replacement=True, generator=generator)


def reinforce_loss(log_exit: Tensor, rewards: Tensor, exits: Tensor, baseline: bool = True) -> Tensor:
    """Eq. 5 over sampled trajectories: minus the mean of (R - b) ln P(tau), whose gradient is that of -E[R].

    log_exit, rewards (B, K); exits (B, n) as sample_exits draws them.
    """
    received = rewards.gather(1, exits)
    advantage = received - leave_one_out(received) if baseline else received
    return -(advantage * log_exit.gather(1, exits)).mean()


def exact_loss(log_exit: Tensor, rewards: Tensor) -> Tensor:
    """Eq. 5 over all trajectories: minus the mean over rows of sum_t P(leave at t) R_t. Both (B, K)."""
    return -(log_exit.exp() * rewards).sum(dim=1).mean()


def policy_loss(exit_logits: Tensor, rewards: Tensor, config: Config) -> Tensor:
    """Minus Eq. 5, by the estimator that was chosen. exit_logits (B, K - 1), rewards (B, K)."""
    log_exit = log_exit_probabilities(exit_logits, config.epsilon)
    if config.estimator == "exact":
        return exact_loss(log_exit, rewards)
    return reinforce_loss(log_exit, rewards, sample_exits(log_exit, config.trajectories))


def consistent_loss(losses: Tensor, exit_logits: Tensor, config: Config) -> Tensor:
    """Eq. 6: the cross-entropy of the exits where rows leave, and of no other, a mean over rows and trajectories."""
    log_exit = log_exit_probabilities(exit_logits.detach(), config.epsilon)
    if config.estimator == "exact":
        return (log_exit.exp() * losses).sum(dim=1).mean()
    return losses.gather(1, sample_exits(log_exit, config.trajectories)).mean()


def memorized_layer(right: Tensor, depths: Tensor) -> Tensor:
    """Eq. 7: the depth from which on all exits are right, L where the last one is wrong. (B, K) bool -> (B,)."""
    memorized_by = right.flip(1).long().cumprod(dim=1).sum(dim=1)  # exits that are right in a row, from the last down
    return depths[(right.shape[1] - memorized_by).clamp(max=right.shape[1] - 1)]


# ---- Training: steps 1 to 5 ----


def recipe(model: nn.Module, config: Config) -> Generator[Stage, float, None]:
    """Step 1, then rounds of step 3 and step 4 until one brings no better held-out reward. Step 2 is in both: M is
    computed wherever a reward is.
    """
    yield joint_stage(model, name="initialise", trainable=lambda name: not name.startswith("policy."))
    best = None  # of all rounds: whatever does not beat it is undone
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
        validate=partial(held_out, config=config),
        settings={"epochs": config.policy_epochs, "head_lr": config.policy_lr, "warmup": 0.0},
        to_beat=best,
    )


def task_stage(number: int, best: float | None, config: Config, frozen: bool) -> Stage:
    """Step 4 of a round. frozen: the backbone was trained in step 1, through adapters, and stays."""
    return Stage(
        name=f"task {number}",
        trainable=lambda name: not name.startswith(("policy.", "adapters.") if frozen else "policy."),
        loss=partial(learn_task, config=config),
        on_states=frozen,
        validate=partial(held_out, config=config),
        settings={"epochs": config.task_epochs, "lr": config.task_lr, "head_lr": config.task_lr, "warmup": 0.0},
        to_beat=best,
    )


def learn_policy(model: nn.Module, batch: Batch, config: Config) -> Tensor:
    """Step 3, on the states of a frozen model: nothing but the policies is computed; the targets are the rewards."""
    return policy_loss(model.exit_logits(batch.states), batch.targets, config)


def learn_task(model: nn.Module, batch: Batch, config: Config) -> Tensor:
    """Step 4: one forward pass, the trajectories of frozen policies on top of it."""
    states = batch.states or model.states(*batch.inputs)
    logits = torch.stack([model.classify(k, state) for k, state in enumerate(states)], dim=1)
    return consistent_loss(exit_losses(logits, y_of(logits, batch.labels, config)), model.exit_logits(states), config)


def y_of(logits: Tensor, labels: Tensor, config: Config) -> Tensor:
    """y, (N,): the labels, or the likeliest class or token of the last exit. logits (N, K, C)."""
    return logits[:, -1].argmax(dim=1) if config.target == "hard" else labels


def rewards_of(model: nn.Module, logits: Tensor, labels: Tensor, config: Config) -> Tensor:
    """The reward of leaving at each exit, (N, K), from the logits of all, (N, K, C)."""
    losses, depths = exit_losses(logits, labels), torch.tensor(model.exits, device=logits.device)
    if config.reward == "vanilla":
        return vanilla_rewards(losses, depths, config.alpha)
    memorized = memorized_layer(logits.argmax(dim=2) == labels[:, None], depths)
    return hardness_guided_rewards(losses, depths, config.alpha, memorized)


@torch.no_grad()
def rewards_of_all(model: nn.Module, data: States, config: Config) -> Tensor:
    """What leaving at each exit is worth, of all units: (N, K). The heads are frozen: so it is computed once."""
    device, found = next(model.parameters()).device, []
    for units in np.array_split(np.arange(len(data)), max(1, len(data) // REWARDS_BATCH)):
        states, labels = data.batch(units, device)
        logits = torch.stack([model.classify(k, state) for k, state in enumerate(states)], dim=1)
        found.append(rewards_of(model, logits, y_of(logits, labels, config), config).cpu())
    return torch.cat(found)


@torch.no_grad()
def held_out(model: nn.Module, held: States, config: Config) -> dict[str, float]:
    """Of units that leave as at inference, at the first exit whose policy says more than 1/2: the mean of Eq. 3,
    or of the reward that is learned, as `score`, and the mean depth in layers.
    """
    device = next(model.parameters()).device
    rewards = rewards_of_all(
        model, held, config if config.selection == "learned" else replace(config, reward="vanilla")
    )
    depths = torch.tensor(model.exits, dtype=torch.float32).expand(len(rewards), -1)
    exit_logits = model.exit_logits([state.to(device) for state in held.states.unbind(dim=1)]).cpu()
    return {
        "score": inferred_reward(exit_logits, rewards),
        "mean_layers": inferred_reward(exit_logits, depths),
    }


def inferred_reward(exit_logits: Tensor, rewards: Tensor) -> float:
    """The mean reward of leaving where a policy first says more than 1/2. exit_logits (B, K - 1), rewards (B, K)."""
    leaves = F.pad(exit_logits > 0, (0, 1), value=True)
    return float(rewards.gather(1, leaves.long().argmax(dim=1, keepdim=True)).mean())


# ---- The method ----
TOKENS = {"alpha": 0.1, "reward": "vanilla", "policy_epochs": 2, "policy_lr": 1e-3, "task_lr": 3e-4}
"""Layers are dearer than to a classifier: from one to the next the loss of a token falls by tenths of a nat."""
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
