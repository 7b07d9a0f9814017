"""What NVIDIA Triton's Python backend runs: the worker that takes rows together again, as a model. No torch.

`mini-ee export RUN --triton DIR` lays this file as model.py among the exported files; triton.py says what is where. A
request is one text. It goes to the worker at once, and its response is sent when the worker has the answer: rows of
different requests share batches, and none waits for a deeper one. So Triton itself is told of no batches. Responses
that come later than `execute` returns are known to Triton from 24.07 on.
"""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import triton_python_backend_utils as triton  # the server brings it

from mini_ee.data.lines import decoded
from mini_ee.export.runtime import Runtime
from mini_ee.export.serving import Refused, Worker, WrongRow, engine_of


class TritonPythonModel:
    """One worker; the server calls these methods by their names."""

    def initialize(self, args: dict) -> None:
        """Open the exported folder. args: what the server says of the model, its configuration as JSON."""
        config, runtime = json.loads(args["model_config"]), Runtime(Path(__file__).parent)
        self.inputs = [each["name"] for each in config["input"]]
        self.outputs = {each["name"]: triton.triton_string_to_numpy(each["data_type"]) for each in config["output"]}
        engine = engine_of(runtime)
        runtime.warm_up()
        self.worker = Worker(engine)
        self.senders = ThreadPoolExecutor(1)  # to send takes the server's time, which is not the worker's

    def execute(self, requests: list) -> None:
        """Give each request to the worker; nothing is returned, as responses come later."""
        for request in requests:
            try:
                texts, settings = self._row(request)
                future = self.worker.submit(texts, **settings)
            except (Refused, ValueError) as error:
                future = Future()
                future.set_exception(error if isinstance(error, Refused) else WrongRow(str(error)))
            future.add_done_callback(partial(self.senders.submit, self._send, request.get_response_sender()))

    def finalize(self) -> None:
        """Answer what was taken."""
        self.worker.drain()
        self.senders.shutdown()

    def _row(self, request) -> tuple[list[str], dict[str, int]]:
        """The texts of a row, and what a decoder is told of how to go on."""
        texts, settings = [], {}
        for name in self.inputs:
            tensor = triton.get_input_tensor_by_name(request, name)
            if tensor is not None:  # the server sees to it that only what is optional is missing
                (value,) = tensor.as_numpy().tolist()
                if isinstance(value, bytes):
                    texts.append(decoded(value))
                else:
                    settings[name] = value
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
