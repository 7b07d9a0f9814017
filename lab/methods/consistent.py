"""ConsistentEE (Zeng et al. 2024, arXiv:2312.11882v2): a policy at every exit learns by REINFORCE when to exit.

The paper and its equations: mini_ee/consistent.py. Here every family of the lab learns by them, examples and tokens, in
stages that can be resumed. Table 1 is computed in consistent_hardness.py.

Deviations besides those of the core, and what the lab offers in addition:
1. `--estimator exact` takes the expectations of Eq. 5 and 6 over all exits, which have no variance.
2. `--epsilon`: in training a fair coin chooses a share of the actions.
3. `--selection learned` judges weights by the reward that is learned. If that is Eq. 4, see deviation 4 of the core.
4. `--target hard`: y is the prediction of the last exit; on tokens, what the full model would generate.
5. Policies are small and start untrained, so they get more epochs and a higher learning rate than the backbone.
6. Table 1: the loss is that of Eq. 1 on held-out examples; forgetting events are counted from epoch to epoch.

On tokens ("Experimental Settings", the part on generation):
7. Step 1 is LoRA on a decoder, as in the paper. Then the decoder is frozen, and its states are computed once. The last
   exit is the LM head, which no step trains but through those adapters.
8. In training, the policy reads states of tokens whose context ran through all layers. Text is generated with the rule
   Policy (p > .5) and missing_kv="copy_state", the paper's state copying.
9. The vanilla reward is the default, as in the paper. Eq. 4 costs nothing extra here, as all exits read every token.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mini_ee.consistent as paper
from mini_ee.lab.data.settings import Settings, option
from mini_ee.lab.exits.policy_networks import PolicyNetworks
from mini_ee.lab.exits.row_exits import States
from mini_ee.lab.rules import Policy
from mini_ee.lab.training.default_rule import sweep
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.policies import policy_rule
from mini_ee.lab.training.stages import Batch, Stage, joint_stage

REWARDS = ("hardness-guided", "vanilla")

ESTIMATORS = ("reinforce", "exact")

TASK_TARGETS = ("label", "hard")

SELECTIONS = ("vanilla", "learned")

REWARDS_BATCH = 64  # examples whose rewards are computed together


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the method."""

    alpha: float = option(paper.ALPHA, "price of a layer in nats, Eq. 3 and 4; a larger one exits earlier", least=0)
    reward: str = option("hardness-guided", "reward: hardness-guided is Eq. 4, vanilla Eq. 3", choices=REWARDS)
    estimator: str = option("reinforce", "estimator of the gradient of Eq. 5", choices=ESTIMATORS)
    trajectories: int = option(
        paper.TRAJECTORIES,
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


# ---- Coins, and the exact estimator ----
def with_coins(exit_logits: Tensor, epsilon: float) -> Tensor:
    """The logits of policies of whose actions a fair coin chooses a share: of $(1 - epsilon) pi + epsilon / 2$.

    exit_logits (B, K - 1), of pi -> (B, K - 1).
    """
    if not epsilon:
        return exit_logits
    coin, policy = (exit_logits.new_tensor(share).log() for share in (epsilon / 2, 1 - epsilon))
    log_exit, log_continue = (torch.logaddexp(policy + F.logsigmoid(z), coin) for z in (exit_logits, -exit_logits))
    return log_exit - log_continue


def exact_loss(log_exit: Tensor, rewards: Tensor) -> Tensor:
    """Eq. 5 over all trajectories: minus the mean over examples of $sum_t P(exit at t) R_t$. Both (B, K)."""
    return -(log_exit.exp() * rewards).sum(dim=1).mean()


def policy_loss(exit_logits: Tensor, rewards: Tensor, config: Config) -> Tensor:
    """Minus Eq. 5, with the estimator of the settings. exit_logits (B, K - 1), rewards (B, K)."""
    log_exit = paper.log_exit_probabilities(with_coins(exit_logits, config.epsilon))
    if config.estimator == "exact":
        return exact_loss(log_exit, rewards)
    return paper.reinforce_loss(log_exit, rewards, paper.sample_exits(log_exit, config.trajectories))


def classifier_loss(losses: Tensor, exit_logits: Tensor, config: Config) -> Tensor:
    """Eq. 6, with the estimator of the settings. Policies get no gradient. losses (B, K), exit_logits (B, K - 1)."""
    exit_logits = with_coins(exit_logits.detach(), config.epsilon)
    if config.estimator == "exact":
        return -exact_loss(paper.log_exit_probabilities(exit_logits), losses)
    return paper.consistent_loss(losses, exit_logits, config.trajectories)


# ---- Training: steps 1 to 4 ----


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
    losses = paper.exit_losses(logits, y_of(logits, batch.labels, config))
    return classifier_loss(losses, model.exit_logits(states), config)


def y_of(logits: Tensor, labels: Tensor, config: Config) -> Tensor:
    """y, (N,): the labels, or the predictions of the last exit. logits (N, K, C)."""
    return logits[:, -1].argmax(dim=1) if config.target == "hard" else labels


@torch.no_grad()
def rewards_of_all(model: nn.Module, data: States, config: Config) -> Tensor:
    """The rewards of all examples or tokens, (N, K). They are computed once, because the heads are frozen."""
    device, rewards = next(model.parameters()).device, []
    depths, guided = torch.tensor(model.exits, device=device), config.reward == "hardness-guided"
    for rows in np.array_split(np.arange(len(data)), max(1, len(data) // REWARDS_BATCH)):
        states, labels = data.batch(rows, device)
        logits = torch.stack([model.classify(k, state) for k, state in enumerate(states)], dim=1)
        y = y_of(logits, labels, config)
        rewards.append(paper.rewards_of(logits, y, depths, config.alpha, guided).cpu())
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
        "score": paper.inferred_reward(exit_logits, rewards),
        "mean_layers": paper.inferred_reward(exit_logits, depths),
    }


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
