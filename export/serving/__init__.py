"""Serving under load: requests in, answers out, whatever comes at once. No torch.

worker.py   queues, the choice of the next batch, what is refused, late or given up
engines.py  what a batch runs on: an exported model's segments, its one graph, or a decoder's caches
watch.py    what is counted, as Prometheus reads it; the promise in service
app.py      HTTP with JSON; server.py, which runs it on uvicorn (the extra `serve`)
hosts.py    which names of the server a request may have in its Host header
replicas.py the same application and worker in several processes, on Ray Serve (the extra `ray`)
load.py     the load generator; bench.py, with torch, measures with it
triton_model.py  the worker as a model of NVIDIA Triton's; see export/triton.py
"""

from mini_ee.export.serving.engines import engine_of
from mini_ee.export.serving.worker import Refused, Worker, WrongRow

__all__ = ["Refused", "Worker", "WrongRow", "engine_of"]
