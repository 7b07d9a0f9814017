"""RAEE's datastore with shards that are Ray actors (the extra `ray`), each on a machine with free resources. No torch.

    ray.init()
    store = ActorDatastore.load(folder, encoder)

Everything else is as in raee_shards.py: all shards are searched at once and the results merged. Every machine needs the
folder under the same path, to load and to save its shard.
"""

from collections.abc import Callable
from typing import Any

import hnswlib
import ray

from mini_ee.lab.methods.raee_datastore import Datastore
from mini_ee.lab.methods.raee_shards import Shards


class _IndexActor:
    def __init__(self, dimension: int):
        self.index = hnswlib.Index("l2", dimension)

    def call(self, name: str, arguments: tuple, settings: dict) -> Any:
        return getattr(self.index, name)(*arguments, **settings)


class _RemoteIndex:
    """Behaves like an hnswlib.Index. The actor ends when nothing refers to this object any more."""

    def __init__(self, dimension: int):
        self._actor = ray.remote(num_cpus=0)(_IndexActor).remote(dimension)

    def __getattr__(self, name: str) -> Callable:
        return lambda *arguments, **settings: ray.get(self._actor.call.remote(name, arguments, settings))


class ActorShards(Shards):
    """Each index in an actor. Raises the errors of hnswlib, and ray.exceptions.RayActorError if an actor has died."""

    def _new(self) -> _RemoteIndex:
        return _RemoteIndex(self.dimension)


class ActorDatastore(Datastore):
    """A datastore with such shards. If it has lost an actor, load it again."""

    sharded = ActorShards
