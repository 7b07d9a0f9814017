"""Today's implementation ("project") and the core's, under one spec. Where an interface differs, the adapter is here.

A test asks the fixture `paper` for one of them. Functions are looked up when they
are called, so a bug that is planted in a module (tests/mutants.py) is found.
"""

import numpy as np
import torch
from conftest import lora_model, tensors

from mini_ee import calibrate, consistent, llama, lora_exits, raee, self_supervised
from mini_ee.bert import Bert
from mini_ee.data import Inputs
from mini_ee.lab import calibration
from mini_ee.lab.calibration import observe
from mini_ee.lab.data import decoder_texts
from mini_ee.lab.exits.token_exits import TextData, record_texts
from mini_ee.lab.methods import consistent as project_consistent
from mini_ee.lab.methods import lora_exits as project_lora
from mini_ee.lab.methods import raee as project_raee
from mini_ee.lab.methods import self_supervised as project_self_supervised
from mini_ee.lab.methods.lora_exits_sgmv import sgmv
from mini_ee.lab.methods.lora_exits_streams import parallel, restart
from mini_ee.lab.methods.raee_datastore import Datastore

IMPLEMENTATIONS = ("project", "core")


# ---- LoRAExit ----
class ProjectLoRA:
    """With the core's interface."""

    @staticmethod
    def exit_loss(logits, labels, teacher, weight=0.95, temperature=2.0):
        return project_lora.exit_loss(
            logits, labels, teacher, project_lora.Config(weight=weight, temperature=temperature)
        )

    @staticmethod
    def distillation_loss(student, teacher, temperature):
        return project_lora.distillation_loss(student, teacher, temperature)

    @staticmethod
    def log_soft_label(logits, temperature):
        return project_lora.log_soft_label(logits, temperature)

    @staticmethod
    def teacher_of(k, last, way):
        return project_lora.Config(distill=way).teacher_of(k, last)

    @staticmethod
    def sgmv(y, x, A, B, starts, scale):
        return sgmv(y, x, A, B, starts, scale=scale)

    @staticmethod
    def passes(exits):
        """Layer passes up to each exit: side by side, with restarts."""
        for schedule in (parallel, restart):
            segments = lora_model(exits=exits).segments(schedule(len(exits)))
            yield np.cumsum([segments.layer_passes(k) for k in range(len(exits))]).tolist()


class CoreLoRA:
    """The core's functions."""

    def __getattr__(self, name):
        return getattr(lora_exits, name)

    @staticmethod
    def passes(exits):
        model = core_lora_model(exits=exits)
        return lora_exits.SideBySide(model).passes.tolist(), model.passes.tolist()


LORA = {"project": ProjectLoRA(), "core": CoreLoRA()}


def core_lora_model(targets=("query", "value"), exits=(1, 2, 4), rank=4):
    """conftest.lora_model of the core."""
    config = {"hidden_size": 24, "num_hidden_layers": exits[-1], "num_attention_heads": 3, "intermediate_size": 48}
    with torch.random.fork_rng():
        torch.manual_seed(4)
        bert = Bert(config | {"vocab_size": 60, "max_position_embeddings": 40})
        for parameter in bert.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model = lora_exits.LoRAExits(bert, exits, 3, rank, targets).eval()
        for parameter in model.adapters.parameters():
            torch.nn.init.normal_(parameter, std=0.15)
        for head in model.heads:
            torch.nn.init.normal_(head[0].weight, std=0.3)
            torch.nn.init.normal_(head[3].weight, std=0.3)
    return model


def core_inputs(inputs):
    """A batch of the project as the core's."""
    return Inputs(*tensors(inputs))


# ---- Self-supervised exits ----
class ProjectSelfSupervised:
    """With the core's interface."""

    TRAINING_PROMPTS, CALIBRATION_PROMPTS = decoder_texts.TRAINING_PROMPTS, decoder_texts.CALIBRATION_PROMPTS
    tau = staticmethod(lambda *given: calibration.tau(*given))

    @staticmethod
    def head_loss(logits, full, penalty, target="soft"):
        return project_self_supervised.head_loss(logits, full, penalty, target)

    @staticmethod
    def observed(model, ids):
        """Confidence and agreement of every token of one text."""
        found = observe(record_texts(model, [decoder_texts.Text(ids)], batch_size=2), "breaking_ties")
        return found.confidence, found.agrees

    @staticmethod
    def every_position(model, ids):
        """The logits of one text: (T, K, V)."""
        inputs, _ = TextData([decoder_texts.Text(ids)], every=True).batch(np.array([0]), "cpu")
        with torch.no_grad():
            return torch.stack(list(model(*inputs)), 1)


class CoreSelfSupervised:
    """The core's functions, on one text."""

    TRAINING_PROMPTS, CALIBRATION_PROMPTS = self_supervised.TRAINING_PROMPTS, self_supervised.CALIBRATION_PROMPTS
    tau = staticmethod(lambda *given: calibrate.tau(*given))

    @staticmethod
    def head_loss(logits, full, penalty, target="soft"):
        return self_supervised.head_loss(logits, full, penalty, target)

    @staticmethod
    def observed(model, ids):
        return self_supervised.observed(self_supervised.table_of(model, torch.tensor([ids])))

    @staticmethod
    def every_position(model, ids):
        with torch.no_grad():
            return model.classify(model.states(torch.tensor([ids])))[0]


SELF_SUPERVISED = {"project": ProjectSelfSupervised, "core": CoreSelfSupervised}


def token_models(folder, project):
    """The same decoder with heads after layers 1 and 2, of both."""
    core = llama.TokenExits(llama.Llama.load(folder), (1, 2, 3)).eval()
    return {"project": project, "core": core}


# ---- RAEE ----
class CoreRAEE:
    """The core's functions. A rule is made of the examples and the queries."""

    def __getattr__(self, name):
        return getattr(raee, name)

    @staticmethod
    def retrieval(vectors, values, queries, k=12, tau=0.9, fallback_top=0):
        return raee.Retrieval(lambda inputs: queries, vectors, values, k, tau, fallback_top)


class ProjectRAEE:
    """The same of the project."""

    def __getattr__(self, name):
        return getattr(project_raee, name)

    @staticmethod
    def retrieval(vectors, values, queries, k=12, tau=0.9, fallback_top=0):
        store = Datastore("an encoder", vectors.shape[1], (1, 2, 4, 6))
        store.add(vectors, values, np.zeros(len(values), int), [("text",)] * len(values))
        rule = project_raee.Retrieval(k=k, tau=tau, fallback_top=fallback_top)
        return rule.with_datastore(store, lambda inputs: queries)


RAEE = {"project": ProjectRAEE(), "core": CoreRAEE()}


# ---- ConsistentEE ----
class ProjectConsistent:
    """The project's functions, with the core's interface where it differs. epsilon: the share of actions by coin."""

    def __getattr__(self, name):
        return getattr(project_consistent, name)

    @staticmethod
    def consistent_loss(losses, exit_logits, epsilon=0.0):
        return project_consistent.consistent_loss(losses, exit_logits, project_consistent.Config(epsilon=epsilon))

    @staticmethod
    def policy_loss(exit_logits, rewards):
        return project_consistent.policy_loss(exit_logits, rewards, project_consistent.Config())


class CoreConsistent:
    """The core's functions. It has no actions by coin."""

    def __getattr__(self, name):
        return getattr(consistent, name)

    @staticmethod
    def log_exit_probabilities(exit_logits, epsilon=0.0):
        assert not epsilon
        return consistent.log_exit_probabilities(exit_logits)

    @staticmethod
    def consistent_loss(losses, exit_logits, epsilon=0.0):
        assert not epsilon
        return consistent.consistent_loss(losses, exit_logits)

    @staticmethod
    def policy_loss(exit_logits, rewards):
        log_exit = consistent.log_exit_probabilities(exit_logits)
        return consistent.reinforce_loss(log_exit, rewards, consistent.sample_exits(log_exit, consistent.TRAJECTORIES))


CONSISTENT = {"project": ProjectConsistent(), "core": CoreConsistent()}


def with_coins(*epsilons):
    """(implementation, share of actions by coin) of tests that ask both."""
    return [*(("project", epsilon) for epsilon in epsilons), ("core", 0.0)]
