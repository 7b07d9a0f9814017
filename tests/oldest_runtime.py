"""Run tests/parity on graphs of opset 18 with an old ONNX Runtime, in an environment of its own. By hand:

    python tests/oldest_runtime.py 1.19.2 [arguments of pytest]

pip puts that version of onnxruntime into a temporary folder, in front of the installed one. Versions before 1.19 need
numpy below 2, which is put there too. Every graph that a test exports is written in opset 18.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent
OPSET = 18
LEFT_OUT = (
    "test_builder",  # writes graphs of opset 23 without the export
    "test_weights_are_stored_once",  # the size of a graph file: opset 18 has more nodes
    "test_every_graph_passes_the_checker",  # the opset of the graphs
    "test_a_wrong_graph_is_found",  # changes nodes that opset 18 does not have
    "need_no_torch",  # starts mini-ee itself, which needs ONNX Runtime 1.27
    "opset_23",  # compares with opset 23
    "test_attention_of_heads_that_share_keys",
)


def pytest_configure(config) -> None:
    """As a plugin of pytest: graphs are written in opset OPSET, and mini_ee's own runtime opens the old package."""
    import onnxruntime

    class SessionOptions(onnxruntime.SessionOptions):
        use_per_session_threads = True  # newer versions have this setting

    onnxruntime.SessionOptions = SessionOptions
    from mini_ee.export import writer

    plain = writer.in_opset
    writer.in_opset = lambda model, opset: plain(model, min(opset, OPSET))


def main(version: str, *arguments: str) -> int:
    """Run the tests; returns the exit status of pytest."""
    packages = [f"onnxruntime=={version}"]
    if tuple(map(int, version.split(".")[:2])) < (1, 19):
        packages.append("numpy<2")
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *packages]
        subprocess.run(pip, check=True)
        path = os.pathsep.join(filter(None, (folder, str(TESTS), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path}
        found = [sys.executable, "-c", "import onnxruntime; print(onnxruntime.__version__)"]
        print("onnxruntime", subprocess.run(found, env=environment, text=True, stdout=subprocess.PIPE).stdout.strip())
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "oldest_runtime", "-k", f"not ({' or '.join(LEFT_OUT)})"]
        return subprocess.run([*pytest, *(arguments or [str(TESTS / "parity")])], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
