"""Solutions of appendix C."""


def first_repeated(answers, times):
    """A counter starts again whenever the answer changes."""
    streak = 0
    for at in range(1, len(answers)):
        streak = streak + 1 if answers[at] == answers[at - 1] else 0
        if streak == times:
            return at
    return len(answers) - 1
