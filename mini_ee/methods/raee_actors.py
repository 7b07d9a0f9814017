"""A datastore whose shards are actors of Ray's (the extra `ray`), each on whichever machine has room. No torch.

    ray.init()
    store = ActorDatastore.load(folder, encoder)

Everything else is as in raee_shards.py: all shards are searched at once and the results merged. A machine without the
folder under the same path can neither load nor save its shard.
"""

import hnswlib
import ray

from mini_ee.methods.raee_datastore import Datastore
from mini_ee.methods.raee_shards import Shards


class _Held:
    def __init__(self, dimension: int):
        self.index = hnswlib.Index("l2", dimension)

    def call(self, name: str, given: tuple, settings: dict):
        return getattr(self.index, name)(*given, **settings)


class _ActorIndex:
    """What stands in for an hnswlib.Index. The actor ends when nobody holds this any more."""

    def __init__(self, dimension: int):
        self._actor = ray.remote(num_cpus=0)(_Held).remote(dimension)

    def __getattr__(self, name: str):
        return lambda *given, **settings: ray.get(self._actor.call.remote(name, given, settings))


class ActorShards(Shards):
    """Each index in an actor. Errors are hnswlib's; ray.exceptions.RayActorError where an actor has died."""

    def _new(self) -> _ActorIndex:
        return _ActorIndex(self.dimension)


class ActorDatastore(Datastore):
    """A datastore with such shards. One that has lost an actor is loaded again."""

    sharded = ActorShards
