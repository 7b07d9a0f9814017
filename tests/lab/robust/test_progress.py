"""Bars: many steps a second on a terminal, in a log file hardly a line."""

import io
import sys
import time

from mini_ee.lab.data.progress import tqdm


class Terminal(io.StringIO):
    def isatty(self):
        return True


def drawn(file):
    """How often a bar of two fifths of a second is drawn."""
    for _ in tqdm(range(20), file=file):
        time.sleep(0.02)
    return file.getvalue().count("\r")


def test_a_log_has_the_begin_and_the_end_of_a_bar_and_a_terminal_its_steps():
    assert drawn(io.StringIO()) <= 2 and drawn(Terminal()) >= 3


def test_standard_error_is_judged_as_it_is_when_the_bar_begins(monkeypatch):
    for file, least, most in ((io.StringIO(), 1, 2), (Terminal(), 3, 20)):
        monkeypatch.setattr(sys, "stderr", file)
        for _ in tqdm(range(20)):
            time.sleep(0.02)
        assert least <= file.getvalue().count("\r") <= most


def test_a_notebook_has_the_steps(monkeypatch):
    """Its standard error is no terminal."""
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    assert drawn(io.StringIO()) >= 3


def test_a_caller_may_ask_for_every_step():
    file = io.StringIO()
    for _ in tqdm(range(5), file=file, mininterval=0, miniters=1):
        pass
    assert file.getvalue().count("\r") >= 5
