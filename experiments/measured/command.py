"""Processes of their own: a command of mini_ee, and a session of ONNX Runtime whose memory is measured."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

SESSION = """
import sys, time, numpy, onnxruntime
def memory(kind):
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(kind))
options = onnxruntime.SessionOptions()
options.log_severity_level, options.intra_op_num_threads = 3, 2
before, begin = (memory("RssAnon"), memory("VmRSS")), time.perf_counter()
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
load = time.perf_counter() - begin
ids = numpy.random.default_rng(0).integers(1000, 30000, (1, int(sys.argv[2])))
feeds = {"input_ids": ids, "attention_mask": numpy.ones_like(ids), "token_type_ids": numpy.zeros_like(ids)}
for _ in range(5):
    session.run(None, feeds)
private, resident = memory("RssAnon") - before[0], memory("VmRSS") - before[1]
print([load, private, resident])
"""


def answer_of_command(*arguments, threads: int) -> dict:
    """The JSON output of a command."""
    command = [sys.executable, "-m", "mini_ee", *map(str, arguments), "--threads", str(threads), "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def cost_of_command(*arguments) -> dict:
    """Minutes of processor time, and peak memory in MB, of a command."""
    command = [sys.executable, "-m", "mini_ee", *map(str, arguments), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    ended, peak = 0, 0
    while not ended:
        time.sleep(0.05)
        peak = max(peak, peak_memory(process.pid))
        ended, status, used = os.wait4(process.pid, os.WNOHANG)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return {"processor_minutes": round((used.ru_utime + used.ru_stime) / 60, 3), "peak_mb": round(peak)}


def peak_memory(pid: int) -> float:
    """Megabytes of a process; 0 if it has ended. (Its resource usage would count this process, too: it was forked.)"""
    with suppress(OSError):
        if match := re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()):
            return int(match[1]) / 1024
    return 0.0


def session_memory(graph: Path, tokens: int) -> dict:
    """Seconds to load a graph, and private and resident megabytes of the session after a few runs."""
    command = [sys.executable, "-c", SESSION, str(graph), str(tokens)]
    sizes = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return dict(zip(("load", "private", "resident"), sizes))
