"""Several exports in one server: `mini-ee serve A B --name a --name b`. A request chooses one by its field `model`.

A request without `model` is for the one export that answers its path; if several do, it is refused. Each export has a
worker and an application of its own, so x-model-id names the export that answered. /v1/models lists them, /health has
the state of each, and the values in /metrics have the label `export`. No torch.
"""

from collections.abc import Callable

from mini_ee.lab.data.values import shortened
from mini_ee.serve.app import App
from mini_ee.serve.http_messages import Access, HTTPError, Request
from mini_ee.serve.monitoring import merge_pages
from mini_ee.serve.worker import Worker


class Several(App):
    """The application of several workers, by the names of their exports."""

    def __init__(self, workers: dict[str, Worker], access: Access):
        self.apps = {name: App(worker, access) for name, worker in workers.items()}
        first, *_ = workers.values()  # counts the responses that no export gave, and has room for what is being read
        super().__init__(first, access, self._pages)
        self._model_headers = []
        self.answers = {path: handler for app in self.apps.values() for path, handler in app.answers.items()}
        self.gets.pop("/info", None)  # is about one model

    def drain(self, seconds: float) -> None:
        """Drain all workers."""
        for app in self.apps.values():
            app.drain(seconds)

    def chosen(self, request: Request) -> App:
        """The application of the export that a request names. Raises HTTPError for another name."""
        able = [name for name, app in self.apps.items() if request.path in app.answers]
        name = request.fields.get("model")
        name = able[0] if name is None and len(able) == 1 else name
        if name not in able:
            unknown = isinstance(name, str) and name not in self.apps
            expected = f"the field model as {' or '.join(able)} for {request.path}"
            raise HTTPError(404 if unknown else 400, f"expected {expected}, found {shortened(name)}")
        return self.apps[name]

    def models(self) -> dict[str, dict]:
        """Name -> the model as GET /v1/models shows it."""
        return {name: model for app in self.apps.values() for name, model in app.models().items()}

    async def _health(self, scope: dict, send: Callable) -> None:
        states = {name: app.health() for name, app in self.apps.items()}
        other = next((of for state in states.values() if (of := state["status"]) != "ready"), None)
        await self._send(send, 503 if other else 200, {"status": other or "ready", "exports": states})

    async def _live(self, scope: dict, send: Callable) -> None:
        dead = [name for name, app in self.apps.items() if app.worker.state == "dead"]
        await self._send(send, 503 if dead else 200, {"status": "dead" if dead else self.worker.state})

    async def _pages(self) -> str:
        return merge_pages({name: app.worker.page() for name, app in self.apps.items()}, "export")
