"""The worker as a model for NVIDIA Triton's Python backend. No torch.

`mini-ee export RUN --triton DIR` copies this file as model.py into the exported folder, see triton.py. A request is one
text. It goes to the worker at once, and its response is sent when the worker has the answer. The worker makes the
batches, so that no row waits for a deeper one; Triton's own batching is off. Responses after the return of `execute`
need Triton 24.07 or newer.
"""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import triton_python_backend_utils as triton  # the server brings it

from mini_ee.lab.data.lines import decoded
from mini_ee.lab.export.runtime import Runtime
from mini_ee.serve import Refused, Worker, WrongRow, engine_of


class TritonPythonModel:
    """One worker. The server calls the public methods by name."""

    def initialize(self, args: dict) -> None:
        """Open the exported folder. args: with the configuration of the model as JSON."""
        config, runtime = json.loads(args["model_config"]), Runtime(Path(__file__).parent)
        self.inputs = [each["name"] for each in config["input"]]
        self.outputs = {each["name"]: triton.triton_string_to_numpy(each["data_type"]) for each in config["output"]}
        engine = engine_of(runtime)
        runtime.warm_up()
        self.worker = Worker(engine)
        self.senders = ThreadPoolExecutor(1)  # a thread of its own, so that the worker does not wait for it

    def execute(self, requests: list) -> None:
        """Submit each request to the worker. Returns nothing, because responses are sent later."""
        for request in requests:
            try:
                texts, settings = self._row(request)
                future = self.worker.submit(texts, **settings)
            except (Refused, ValueError) as error:
                future = Future()
                future.set_exception(error if isinstance(error, Refused) else WrongRow(str(error)))
            future.add_done_callback(partial(self.senders.submit, self._send, request.get_response_sender()))

    def finalize(self) -> None:
        """Answer the open requests."""
        self.worker.drain()
        self.senders.shutdown()

    def _row(self, request) -> tuple[list[str], dict]:
        """The texts of a row, and its settings: of a decoder, or thresholds of its own."""
        texts, settings = [], {}
        for name in self.inputs:
            tensor = triton.get_input_tensor_by_name(request, name)
            if tensor is not None:  # the server rejects requests without a required input
                values = tensor.as_numpy().tolist()
                if isinstance(values[0], bytes):
                    texts.append(decoded(values[0]))
                else:
                    settings[name] = values[0] if len(values) == 1 else values
        return texts, settings

    def _send(self, sender, future: Future) -> None:
        try:
            fields = future.result()._asdict()
            tensors = [triton.Tensor(name, _vector(fields[name], dtype)) for name, dtype in self.outputs.items()]
            response = triton.InferenceResponse(tensors)
        except Exception as error:
            codes = {Refused: triton.TritonError.UNAVAILABLE, WrongRow: triton.TritonError.INVALID_ARG}
            code = codes.get(type(error), triton.TritonError.INTERNAL)
            response = triton.InferenceResponse(error=triton.TritonError(" ".join(str(error).split()), code))
        sender.send(response, flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _vector(value, dtype: type) -> np.ndarray:
    return np.atleast_1d(np.array(value, dtype))
