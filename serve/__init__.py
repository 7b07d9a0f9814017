"""Serving an exported model under load, and jobs over whole files. No torch.

worker.py          queues, the choice of the next batch, refused, late and cancelled requests
engines.py         run a batch: on graphs by segment, on the one graph, or on the caches of a decoder
monitoring.py      metrics for Prometheus; the guarantee in service
app.py             the HTTP interface; server.py runs it on uvicorn (the extra `serve`)
formats.py         requests and responses in the formats of text-embeddings-inference and OpenAI
request_thresholds.py  fields with which a request asks for thresholds of its own
http_messages.py   heads and bodies; the hosts, keys and pages from which requests may come
several.py         several exports in one server
canary.py          two exports in one server, whose answers are compared
replicas.py        the same application and worker in several processes, on Ray Serve (the extra `ray`)
batch.py           a job over files, in parts that are written whole; batch_parts.py computes them
"""

from mini_ee.serve.engines import engine_of
from mini_ee.serve.worker import Refused, Worker, WrongRow

__all__ = ["Refused", "Worker", "WrongRow", "engine_of"]
