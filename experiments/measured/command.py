"""Run a command of mini_ee in its own process."""

import json
import subprocess
import sys


def answer_of_command(*arguments, threads: int) -> dict:
    """The JSON output of a command."""
    command = [sys.executable, "-m", "mini_ee", *map(str, arguments), "--threads", str(threads), "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
