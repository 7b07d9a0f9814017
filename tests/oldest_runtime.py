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
    "test_queries_and_keys_turn_in_one_node",  # the same
    "test_a_head_that_nobody_asks",  # reads names that ONNX Runtime makes for nodes without a name
    "test_no_rows_and_a_thousand_rows",  # a message that older versions do not have
    "needs_no_torch",  # starts mini-ee itself, which needs ONNX Runtime 1.27
    "need_no_torch",
    "share_one_pool_of_threads",
    "shares_threads_in_a_process",
    "test_a_folder_of_links",
    "test_a_provider_that_falls_back",  # which provider replaces another is the program's decision in 1.27 alone
    "test_onnx_runtimes_words_of_a_provider",
    "opset_23",  # compares with opset 23
    "test_attention_of_heads_that_share_keys",
)


def pytest_configure(config) -> None:
    """As a plugin of pytest: graphs are written in opset OPSET, and mini_ee's own runtime opens the old package."""
    import onnxruntime

    class SessionOptions(onnxruntime.SessionOptions):
        use_per_session_threads = True  # newer versions have this setting

    onnxruntime.SessionOptions = SessionOptions
    from mini_ee.lab.export import builder, writer

    model, in_opset = builder.Builder.model, writer.in_opset
    builder.Builder.model = lambda *arguments: in_opset(model(*arguments), OPSET)
    writer.in_opset = lambda model, opset: model


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
        return subprocess.run([*pytest, *(arguments or [str(TESTS / "lab" / "parity")])], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
