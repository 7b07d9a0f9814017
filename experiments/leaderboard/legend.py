"""What the columns of the leaderboard mean: column -> its meaning, and what a verdict on hardness needs."""

from mini_ee.experiments.leaderboard.figures import CONTROL, REFERENCE
from mini_ee.experiments.leaderboard.ranking import LEAST_SEEDS
from mini_ee.experiments.leaderboard.tables import NO_INTERVAL, NOTHING

ENOUGH = f"An interval needs {LEAST_SEEDS} seeds on a task, or 2 on each of several tasks."

TERMS = f"""An *exit* is a small classifier (its *head*) after a layer. A *rule* decides at which exit an example
stops. The *full model* is the same model if no example exits early. In *{REFERENCE} training*, all exits learn
together and thresholds decide; the other methods are compared with it. *Held-out* examples come from the train
split; they choose epochs, temperatures and rules, but the weights do not learn from them. The *reported* examples
are those of the test or dev split that are not in the train split, at most 2,000."""

LEGEND = {
    "rank": f"""by the mean accuracy at 2x. In brackets: the ranks that are possible if only significant differences
    count. A difference is significant if it passes Holm's correction for the number of all pairs of methods.
    {NOTHING}: no accuracy at 2x, or a control.""",
    "method": """[METHODS.md](METHODS.md) says what each one does, and where its code is. All start from the same
    checkpoint.""",
    "accuracy at 2x": f"""accuracy on the reported examples, mean over the tasks. It is that of the rule of the
    method that is most accurate on the held-out examples and needs at most half of the FLOPs there (2x fewer), or of a
    mixture: a random part of the examples exits by one rule, the rest by another; the expected accuracy counts. On the
    reported examples it may need slightly more or less than half. FLOPs are relative to the method's own full model;
    both contain the heads. ± is half of the 95 % interval over seeds and examples, {NO_INTERVAL}: too few seeds.
    {ENOUGH}""",
    "minus joint": """accuracy at 2x minus that of joint training, paired: on the seeds that both have. So it can differ
    from a subtraction in the column before. The interval is not corrected for the number of methods. ▲, ▼:
    significantly better or worse than joint training, with Holm's correction over all pairs of methods.""",
    "full model": "accuracy of the method's own model if no example exits early.",
    "layers saved at 1 point": """another rule: the one with the fewest FLOPs among those that lose at most one point
    on held-out examples. The loss is relative to the full model of joint training with the same seed. 0 if every rule
    loses more. A layer that runs twice counts twice. Learning rates are not chosen for this column.""",
    "lost at 1 point": """accuracy that this rule loses on the reported examples, compared with the same full model. It
    can be more than one point, because the rule was chosen on other examples, or because every rule loses more.""",
    "speed-up at 2x": """processor time of the method's full model divided by that of its best single rule within half
    of the FLOPs, with one example at a time. It is above 2 if that rule needs much less than half of the FLOPs.""",
    "training, s": """processor seconds of one training on the CPU, mean over the tasks of the ranks on which every
    method has one (the answer above names them).""",
    "MB added": "compared with a fine-tuned model without exits.",
    "seeds": "the fewest and the most on one of the tasks; the table of each task has its own.",
    CONTROL: """a control, not a method: all examples exit at the same layer of joint training, or a random part of
    them at another one, as the methods may mix two rules. Nothing is trained, added or
    timed for it.""",
    NOTHING: "does not apply.",
}

TASK_LEGEND = {
    "full model, at 1.5x, at 2x, at 3x": f"""accuracy in percent without early exits, and with at most two thirds, a
    half and a third of the FLOPs of the method's full model. ± is half of the 95 % interval ({NO_INTERVAL}: fewer than
    {LEAST_SEEDS} seeds). If few seeds differ a lot, an interval may reach below 0 or above 100 %.""",
    "▲, ▼": "better or worse than joint training (Holm's correction over all cells of the table).",
    "saved at 1 point, lost at 1 point": """layers saved in percent, and points lost, by the rule of *layers saved at 1
    point* (see the first table).""",
    "saved at 1 point of its own": """the same if the loss counts from the method's own full model.""",
    "area": """mean difference from joint training in points, over shares of the FLOPs from 20 to 100 %. A share counts
    if both methods have a rule that needs no more. If fewer than half of the shares count, there is no area. It uses
    the seeds that both have, so it can differ from the columns.""",
    "EEFP": """early-exit failure prediction: how well the largest probability of an exit predicts that this exit is
    wrong and a later one is right (AUROC; 1: perfectly, 0.5: not at all), mean over exits.""",
    "speed-up at 2x, at 1 point": """of the rules of *at 2x* and *saved at 1 point*, in processor time with one example
    at a time, compared with the method's own full model: the mean of the seeds' ratios.""",
    "training, s; MB added": "as in the first table.",
}

FEWER_EPOCHS = """**The ranks of methods with several stages are too low here.** The protocol divided the epochs among
the stages of a method, so these methods were trained with fewer epochs than joint training: two-stage, deebert,
fastbert, adainfer, mixed, cat, dree and consistent. In a review with as many epochs, on TREC, two-stage was more
accurate than joint training, and consistent and dree came close to it. Until they are measured again, the figures do
not show that these methods are worse than others or train faster."""
PREDICTION_NOTE = """The paper that proposed EEFP (arXiv:2508.21495) says that EEFP predicts what early exit saves, and
that the expected calibration error (ECE) does not. The table has Spearman's correlation of both with *saved at 1
point*, over the methods with several exits. So few methods, of which some share a training, do not decide it. The
definition of EEFP in [Each task](#each-task) is ours and was not compared with the paper's."""
EXAM_NOTE = f"""The built-in reviews are generated sentences of seven kinds. Their hardness is assigned by how they
are built, from *plain* (1) to *doubly negated* (7); accuracy need not fall in this order. Hard sentences are also
longer, so we have to tell hardness and length apart. The first two columns are Spearman's correlations of the exit
layer at half of the FLOPs with the *hardness* (1 to 7) and with the *length* in words. If one is positive, harder or
longer sentences exit later. The other two are partial correlations: with hardness among sentences of equal length,
and with length among sentences of equal hardness. ± is half of the 95 % interval ({NO_INTERVAL}: fewer than
{LEAST_SEEDS} seeds). A method exits early on what is easy if the partial correlation with hardness is significantly
larger than that with length (Holm's correction over the methods), and its interval lies above 0. It exits early on
what is short if the same holds the other way round."""
