"""ConsistentEE: a policy at every exit learns, by REINFORCE, whether a row should leave there.

Source: Zeng et al. 2024, ConsistentEE: A Consistent and Hardness-Guided Early Exiting Method for Accelerating Language
Models Inference. Eq. 1, the weighted sum, is fitting.depth_weighted_sum; Eq. 2 to 7 are here, for classification.

Symbols:   losses = H(y, P_t(x)) of all exits; depths = the layers t of the exits, L the last; memorized = the
           memorized layer M; exit_logits = the logits of pi(Exit | s_t; theta); log_exit = ln P(leave at t).

A trajectory is the exit at which it ends: continue at all exits before, leave there. So P(leave at t) is
pi_t prod_{i<t} (1 - pi_i), the last exit takes whoever is left, and all trajectories of a row can be enumerated.

Deviations, each from a point that the paper leaves open:
1. Eq. 5 multiplies the reward with the probability inside an expectation over it, which would spread the probability.
   Its gradient here is that of E[R]: REINFORCE, with the mean reward of the row's other trajectories as baseline
   (`reinforce`), or the sum over all exits (`exact`), which has no variance.
2. Policies begin so that a row is as likely to leave at one exit as at another: with a chance of 1/2 each, hardly any
   trajectory would reach a deep layer.
3. Where exits are fewer than layers, t and M count layers all the same.
4. "Until convergence": after every policy epoch and task step, held-out rows leave where p > .5, and the mean of
   Eq. 3 over them says whether it is kept; rounds end when none is. Not the mean of Eq. 4: its M is that of the weights
   of the moment, so that a row which the last exit unlearns would be worth more than before.
5. Rates and epochs, of which the paper says nothing: Eq. 1 has those that all methods share here; policies, which are
   small and begin anew, learn faster and longer than what they read.
6. Heads and policies may read the mean over tokens, and do by default; the paper's read the first (`pool`).
7. Step 4 samples where rows leave from states with dropout, those that its losses are of.
8. Table 1: the loss is Eq. 1's, of rows that were held out; what they forget is counted from epoch to epoch.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.backbones.bert import Bert
from mini_ee.backbones.llama import Decoder
from mini_ee.data.metrics import spearman
from mini_ee.data.tokens import Encoded, batches
from mini_ee.training.fit import Batch, Data, Stage, depth_weighted_sum, joint_loss
from mini_ee.units.rows import PolicyExits

REWARDS = ("hardness-guided", "vanilla")

ESTIMATORS = ("reinforce", "exact")

POLICY_WIDTH = 32  # of the hidden layer of a policy network

FEATURES_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class ConsistentEE:
    """Settings of the method. Raises ValueError on a value that makes no sense."""

    alpha: float = 0.02  # trade-off coefficient of Eq. 3 and 4, in nats a layer: the knob for speed
    reward: str = "hardness-guided"
    estimator: str = "reinforce"
    trajectories: int = 8  # of a row in a step
    epsilon: float = 0.0  # share of actions that a fair coin takes while training
    rounds: int = 3  # at most
    policy_epochs: int = 5
    policy_lr: float = 3e-3
    task_epochs: int = 1
    task_lr: float = 3e-5

    def __post_init__(self):
        for name, values in (("reward", REWARDS), ("estimator", ESTIMATORS)):
            if getattr(self, name) not in values:
                raise ValueError(f"{name} must be one of {', '.join(values)}, got {getattr(self, name)!r}")
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"alpha must be a number of at least 0, got {self.alpha}")
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"epsilon is a share of the actions, from 0 to 1, got {self.epsilon}")
        if self.trajectories < 2:
            raise ValueError(
                f"trajectories must be at least 2, the others are the baseline of each, got {self.trajectories}"
            )
        for name in ("rounds", "policy_epochs", "task_epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("policy_lr", "task_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number above 0, got {getattr(self, name)}")


# ---- The model: internal classifiers and policies on one pooled state ----
class ConsistentExits(PolicyExits):
    """A policy network at every exit but the last. Raises ValueError for regression and for a single exit."""

    def __init__(self, backbone: Bert | Decoder, exits: tuple[int, ...], num_labels: int, pool: str = "mean"):
        super().__init__(backbone, exits, num_labels, pool)
        if num_labels < 2:
            raise ValueError(
                "ConsistentEE needs classes: its memorized layer asks whether a prediction is right; "
                "train a regression task with another method"
            )
        if len(exits) < 2:
            raise ValueError(f"ConsistentEE needs at least two exits to choose from, got {len(exits)}")
        width, behind = backbone.config.hidden_size, range(len(exits) - 1, 0, -1)
        self.policies = nn.ModuleList(policy_network(width, 1 / (1 + exits_behind)) for exits_behind in behind)
        self.policy_flops = 2.0 * POLICY_WIDTH * (width + 1)

    def exit_logit(self, k: int, state: Tensor) -> Tensor:
        """The logit of pi(Exit | s_t; theta), (B,). No gradient flows into the state, (B, D)."""
        return self.policies[k](state.detach())[:, 0]

    def graph_exit_logit(self, g, k: int, state: str) -> str:
        """exit_logit."""
        return g.op("Squeeze", g.apply(self.policies[k], state), g.integers(1))


def policy_network(width: int, chance: float) -> nn.Sequential:
    """Two layers; at first it leaves with this chance, whatever the state: with 1 / (1 + exits behind), all exits are
    equally likely."""
    network = nn.Sequential(nn.Linear(width, POLICY_WIDTH), nn.GELU(), nn.Linear(POLICY_WIDTH, 1))
    nn.init.zeros_(network[2].weight)
    nn.init.constant_(network[2].bias, math.log(chance / (1 - chance)))
    return network


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


def leave_one_out(rewards: Tensor) -> Tensor:
    """The baseline of each trajectory: the mean reward of the row's others. (B, n) -> (B, n), n >= 2."""
    return (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)


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


def policy_loss(exit_logits: Tensor, rewards: Tensor, how: ConsistentEE) -> Tensor:
    """Minus Eq. 5, by the estimator that was chosen. exit_logits (B, K - 1), rewards (B, K)."""
    log_exit = log_exit_probabilities(exit_logits, how.epsilon)
    if how.estimator == "exact":
        return exact_loss(log_exit, rewards)
    return reinforce_loss(log_exit, rewards, sample_exits(log_exit, how.trajectories))


def consistent_loss(losses: Tensor, exit_logits: Tensor, how: ConsistentEE) -> Tensor:
    """Eq. 6: the cross-entropy of the exits where rows leave, and of no other, a mean over rows and trajectories."""
    log_exit = log_exit_probabilities(exit_logits.detach(), how.epsilon)
    if how.estimator == "exact":
        return (log_exit.exp() * losses).sum(dim=1).mean()
    return losses.gather(1, sample_exits(log_exit, how.trajectories)).mean()


def memorized_layer(right: Tensor, depths: Tensor) -> Tensor:
    """Eq. 7: the depth from which on all exits are right, L where the last one is wrong. (B, K) bool -> (B,)."""
    memorized_by = right.flip(1).long().cumprod(dim=1).sum(dim=1)  # exits that are right in a row, from the last down
    return depths[(right.shape[1] - memorized_by).clamp(max=right.shape[1] - 1)]


# ---- Training: steps 1 to 5 ----
def recipe(model: ConsistentExits, how: ConsistentEE) -> list[Stage]:
    """Step 1, then rounds of step 3 and step 4. Step 2 is in both: M is computed wherever a reward is."""
    judge = partial(held_out, how=how)
    stages = [
        Stage(
            name="initialise",
            learns=lambda name: not name.startswith("policies."),
            loss=joint_loss,
            score=lambda scores: float(depth_weighted_sum(scores, model.exits)),
        )
    ]
    for number in range(1, how.rounds + 1):
        stages += [
            Stage(
                name=f"policy {number}",
                learns=lambda name: name.startswith("policies."),
                loss=partial(learn_policy, how=how),
                teacher=features,
                judge=judge,
                settings={"epochs": how.policy_epochs, "head_lr": how.policy_lr, "warmup": 0.0},
                round=number,
            ),
            Stage(
                name=f"task {number}",
                learns=lambda name: not name.startswith("policies."),
                loss=partial(learn_task, how=how),
                judge=judge,
                settings={"epochs": how.task_epochs, "lr": how.task_lr, "head_lr": how.task_lr, "warmup": 0.0},
                round=number,
            ),
        ]
    return stages


def learn_policy(model: ConsistentExits, batch: Batch, how: ConsistentEE) -> Tensor:
    """Step 3, on the features of a frozen model: nothing but the policies is computed."""
    states, logits = _parted(model, batch.taught)
    return policy_loss(model.exit_logits(states), rewards_of(model, logits, batch.labels, how), how)


def learn_task(model: ConsistentExits, batch: Batch, how: ConsistentEE) -> Tensor:
    """Step 4: one forward pass, the trajectories of frozen policies on top of it."""
    states = model.states(*batch.inputs)
    logits = torch.stack([model.classify(k, state) for k, state in enumerate(states)], dim=1)
    return consistent_loss(exit_losses(logits, batch.labels), model.exit_logits(states), how)


def features(model: ConsistentExits, encoded: Encoded) -> np.ndarray:
    """The pooled state and the logits of every exit, side by side, float32: (N, K, D + C). Policies need no more."""
    device = next(model.parameters()).device
    width = model.backbone.config.hidden_size + model.num_labels
    found = np.empty((len(encoded), len(model.exits), width), np.float32)
    model.eval()
    with torch.no_grad():
        for rows in batches(encoded, FEATURES_BATCH):
            inputs = encoded.batch(rows)
            arrays = (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)
            states = model.states(*(torch.from_numpy(array).to(device) for array in arrays))
            for k, state in enumerate(states):
                found[rows, k] = torch.cat([state, model.classify(k, state)], dim=1).float().cpu().numpy()
    return found


def _parted(model: ConsistentExits, found: Tensor) -> tuple[list[Tensor], Tensor]:
    """features -> the states of the exits, (B, D) each, and their logits (B, K, C)."""
    states, logits = found.split([model.backbone.config.hidden_size, model.num_labels], dim=2)
    return list(states.unbind(dim=1)), logits


def rewards_of(model: ConsistentExits, logits: Tensor, labels: Tensor, how: ConsistentEE) -> Tensor:
    """The reward of leaving at each exit, (B, K), from the logits of all, (B, K, C)."""
    losses, depths = exit_losses(logits, labels), torch.tensor(model.exits, device=logits.device)
    if how.reward == "vanilla":
        return vanilla_rewards(losses, depths, how.alpha)
    memorized = memorized_layer(logits.argmax(dim=2) == labels[:, None], depths)
    return hardness_guided_rewards(losses, depths, how.alpha, memorized)


def held_out(model: ConsistentExits, held: Data, found: np.ndarray | None, how: ConsistentEE) -> dict[str, float]:
    """Of rows that leave as at inference, at the first exit whose policy says more than 1/2: the mean of Eq. 3, and the
    mean depth in layers.

    found: the rows' features, where they have been computed already.
    """
    device = next(model.parameters()).device
    found = features(model, held.encoded) if found is None else found
    states, logits = _parted(model, torch.from_numpy(found).to(device))
    rewards = rewards_of(model, logits, torch.from_numpy(held.labels).to(device), replace(how, reward="vanilla"))
    depths = torch.tensor(model.exits, dtype=torch.float32, device=device).expand(len(rewards), -1)
    with torch.no_grad():
        exit_logits = model.exit_logits(states)
    return {
        "score": inferred_reward(exit_logits, rewards),
        "mean_layers": inferred_reward(exit_logits, depths),
    }


def inferred_reward(exit_logits: Tensor, rewards: Tensor) -> float:
    """The mean reward of leaving where a policy first says more than 1/2. exit_logits (B, K - 1), rewards (B, K)."""
    leaves = F.pad(exit_logits > 0, (0, 1), value=True)
    return float(rewards.gather(1, leaves.long().argmax(dim=1, keepdim=True)).mean())


# ---- Hardness: the memorized layer beside other measures of it (Table 1) ----
def hardness(model: ConsistentExits, data: Data) -> tuple[np.ndarray, np.ndarray]:
    """The memorized layer of every row, (N,) in layers, and its loss under Eq. 1, (N,) in nats."""
    return hardness_of(features(model, data.encoded)[:, :, -model.num_labels :], data.labels, model.exits)


def hardness_of(logits: np.ndarray, labels: np.ndarray, exits: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The same of any model with exits: logits (N, K, C), labels (N,) whole numbers, exits in layers."""
    right = torch.from_numpy(logits.argmax(axis=2) == labels[:, None])
    losses = exit_losses(torch.from_numpy(logits), torch.from_numpy(labels))
    return memorized_layer(right, torch.tensor(exits)).numpy(), depth_weighted_sum(losses.T, exits).numpy()


def forgetting_events(right: np.ndarray) -> np.ndarray:
    """How often a row was right and is wrong the next time (Toneva et al. 2019): (epochs, N) bool -> (N,).

    >>> forgetting_events(np.array([[True, True], [False, True], [True, True], [False, True]]))
    array([2, 0])
    """
    return (right[:-1] & ~right[1:]).sum(axis=0)


def hardness_correlations(memorized: np.ndarray, losses: np.ndarray, events: np.ndarray) -> dict[str, float]:
    """Table 1: Spearman's correlation of the memorized layer with the loss and with forgetting events; each (N,)."""
    return {"loss": spearman(memorized, losses), "forgetting events": spearman(memorized, events)}
