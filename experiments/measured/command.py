"""A command of mini_ee in a process of its own."""

import json
import subprocess
import sys


def answer_of_command(*arguments, threads: int) -> dict:
    """The JSON that a command prints."""
    command = [sys.executable, "-m", "mini_ee", *map(str, arguments), "--threads", str(threads), "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
