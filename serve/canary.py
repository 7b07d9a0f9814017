"""A canary: a share of the requests goes to a new export, the others to the old one. `mini-ee serve OLD --canary NEW`.

Each export has a worker and an application of its own, so the header x-model-id names the export that answered. A
request goes to one of them at random, with all its texts; to the old one if the new one accepts none. After its answer,
each text of the new export also runs in the old one, if there is room: /metrics has the share of equal predictions.
There, all values of the two have the label `model`. No torch.
"""

import logging
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial, reduce
from math import inf

from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.export.runtime import Runtime
from mini_ee.serve.app import App
from mini_ee.serve.http_messages import Access
from mini_ee.serve.monitoring import WINDOW, merge_pages, shown, shown_share
from mini_ee.serve.worker import Refused, RowFuture, Worker

log = logging.getLogger("mini_ee.serve")

SAME = (  # what two exports must have in common, with the keys of the manifest
    ("kind", "unit"),
    ("number of texts in a row", "task", "texts"),
    ("labels", "task", "label_names"),
    ("number of logits, or embedding size", "num_labels"),
    ("choice of one label or several", "task", "multi_label"),
    ("scaling of embeddings to length 1", "normalize"),
)


def check_same(old: Runtime, new: Runtime) -> None:
    """Raises WrongArguments if two exports have other texts, labels or embeddings, or are the same one."""
    for what, *keys in SAME:
        expected, actual = (
            reduce(lambda values, key: values.get(key, {}), keys, runtime.config) for runtime in (old, new)
        )
        if (expected or None) != (actual or None):
            both = f"{expected or 'none'}, found {actual or 'none'}"
            raise WrongArguments(f"--canary {new.folder}: expected the {what} of {old.folder}, {both}")
    if old.model_id == new.model_id:
        raise WrongArguments(f"--canary {new.folder}: expected a new export, found {old.folder}, model {old.model_id}")


class Compared:
    """A worker whose answers are compared with those of another one. For the rest it is that worker."""

    def __init__(self, worker: Worker, other: Worker):
        self._worker, self._other = worker, other
        runtime = worker.engine.runtime
        self._labelled = not runtime.generates and bool(runtime.label_names)
        self.agreements: deque[bool] = deque(maxlen=WINDOW)
        self.rows = 0

    def __getattr__(self, name: str):
        return getattr(self._worker, name)

    def submit(self, texts, deadline: float = inf, long: bool | None = None, **settings) -> RowFuture:
        """As Worker.submit. The other worker gets the texts after the answer, if the request sets no thresholds."""
        future = self._worker.submit(texts, deadline, long, **settings)
        if self._labelled and not any(value is not None for value in settings.values()):
            future.add_done_callback(partial(self._answered, texts))
        return future

    def _answered(self, texts, future: Future) -> None:
        if future.cancelled() or future.exception() is not None or not self._other.has_room():
            return
        with suppress(Refused):  # a client's request has taken the room meanwhile
            self._other.submit(texts).add_done_callback(partial(self._compare, future.result()))

    def _compare(self, answer, future: Future) -> None:
        try:
            agrees = answer.agrees(future.result())
        except (CancelledError, Refused, ValueError):
            return
        self.agreements.append(agrees)
        self.rows += 1

    def comparison(self) -> str:
        """The metrics of the comparison."""
        page = shown("canary_rows_total", "counter", "texts that both exports answered", self.rows)
        help_text = "share of equal predictions of both exports, with its 95% interval"
        return page + shown_share("canary_agreement", help_text, self.agreements)


class Canary:
    """The application of two workers.

    share: of the requests that go to the new export. Raises WrongArguments if the exports answer differently shaped
    requests.
    """

    def __init__(self, old: Worker, new: Worker, share: float, access: Access, seed: int = 0):
        check_same(old.engine.runtime, new.engine.runtime)
        fields = [() if worker.engine.runtime.generates else worker.engine.requested.fields for worker in (old, new)]
        if lacking := [name for name in fields[0] if name not in fields[1]]:
            folder = new.engine.runtime.folder
            log.warning(
                "--canary %s: cannot answer requests with %s: its share of them gets 400", folder, " or ".join(lacking)
            )
        self.old, self.new, self.share = old, Compared(new, old), share
        self._random = random.Random(seed)
        self._old_app = App(old, access, self.page)
        self._new_app = App(self.new, access)  # type: ignore[arg-type]  # Compared has all attributes of its worker

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        """Answer a request of ASGI. Requests by GET are about the old export, except /metrics, which has both."""
        chosen = scope.get("method") == "POST" and self._random.random() < self.share
        app = self._new_app if chosen and self.new.state == "ready" else self._old_app
        await app(scope, receive, send)

    async def page(self) -> str:
        """The metrics of both exports, and how often they agree."""
        pages = {worker.engine.runtime.model_id: worker.page() for worker in (self.old, self.new)}
        return merge_pages(pages, "model") + self.new.comparison()

    def drain(self, seconds: float) -> None:
        """Drain both workers."""
        for worker in (self.new, self.old):
            worker.drain(seconds)
