"""`mini-ee serve`: an export over HTTP. Torch is imported for a run alone."""

import json
import os
import re
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from mini_ee.lab.cli.command_options import number, positive, share, span, whole_number
from mini_ee.lab.cli.engine_options import add_engine, chosen_engine, open_exported
from mini_ee.lab.cli.temporary_export import as_export
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.sessions import share_threads
from mini_ee.serve.engines import engine_of
from mini_ee.serve.http_messages import ANY, Access, Hosts
from mini_ee.serve.monitoring import Guarantee, stricter
from mini_ee.serve.worker import BATCH, MAX_OPEN, MAX_WAIT, Worker

HELP = "serve an export or a run over HTTP; requests are batched together"
EXAMPLE = "mini-ee serve exported --shadow .05"
USUAL = "--port", "--device", "--shadow"
HIGHEST_PORT = 65535
API_KEY = "MINI_EE_API_KEY"  # environment variable
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/,]+")

OF_RAY = {  # defaults of environment variables; Ray reads them when it is imported
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps Ray's own ports on the loopback interface, on every system
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "mini_ee.serve.replicas.front",
}


def add(sub: ArgumentParser) -> None:
    """Add the options of the command."""
    folder = "folder of an export, or of a run, which is exported to a temporary folder"
    more = "; of several, requests name one as their `model`"
    sub.add_argument("exported", type=Path, nargs="+", metavar="RUN_OR_EXPORTED", help=folder + more)
    sub.add_argument("--name", action="append", help="name of the model, once for each folder (default the folder's)")
    sub.add_argument("--host", default="127.0.0.1", help="address; 0.0.0.0 accepts other machines")
    names = "further host name that the Host header of requests may have; * for any; may be repeated (default none)"
    sub.add_argument("--allow-host", action="append", default=[], metavar="NAME", help=names)
    key = f"key that requests need, as Authorization: Bearer KEY (default ${API_KEY}, else none is needed)"
    sub.add_argument("--api-key", metavar="KEY", help=key)
    cors = "origin of web pages whose scripts may send requests, as https://a.example; may be repeated; * for any"
    sub.add_argument("--cors", action="append", default=[], metavar="ORIGIN", help=cors)
    sub.add_argument("--port", type=whole_number, default=8000, help="port; 0 for a free one")
    sub.add_argument("--device", choices=("cpu", "cuda"), help="device (default cuda if there is one, else cpu)")
    add_engine(sub)
    sub.add_argument(
        "--batch-size", type=positive, default=BATCH, help="maximum number of examples, or texts, in a batch"
    )
    wait = "maximum time to wait for a fuller batch, in ms"
    sub.add_argument("--max-wait", type=number, default=MAX_WAIT * 1e3, metavar="MS", help=wait)
    queue = "maximum number of open requests; the next is refused"
    sub.add_argument("--queue", type=positive, default=MAX_OPEN, metavar="N", help=queue)
    canary = sub.add_argument_group("a canary")
    canary.add_argument("--canary", type=Path, metavar="NEW", help="export that answers a share of the requests")
    canary.add_argument("--share", type=share, help="share of the requests for --canary (default .05)")
    replicas = sub.add_argument_group("on Ray")
    on_ray = "serve from replicas on Ray, each with --threads (1 if not given), on cpu without --device"
    replicas.add_argument("--ray", action="store_true", help=on_ray)
    number_of = "number of replicas; 1-4 starts as many as the load needs (default 1)"
    replicas.add_argument("--replicas", type=span, metavar="N", help=number_of)
    guarantee = sub.add_argument_group("the guarantee in service")
    guarantee.add_argument(
        "--shadow",
        type=share,
        metavar="SHARE",
        help="share of requests that also run all layers, to measure the agreement",
    )
    epsilon = "agreement that is to be kept (default the one that the export guarantees)"
    guarantee.add_argument("--epsilon", type=share, help=epsilon)
    guarantee.add_argument(
        "--tighten", action="store_true", help="raise thresholds while the agreement is below --epsilon"
    )


def run(args: Namespace) -> dict:
    """Serve until SIGTERM or SIGINT. Returns the JSON summary."""
    if not 0 <= args.port <= HIGHEST_PORT:
        raise WrongArguments(f"--port must be from 0 to {HIGHEST_PORT}, got {args.port}")
    if not 0 <= args.max_wait < 60_000:
        raise WrongArguments(f"--max-wait must be from 0 to 60000 milliseconds, got {args.max_wait}")
    if args.replicas and not args.ray:
        raise WrongArguments("--replicas is for --ray; without it the server is one process")
    if args.share is not None and args.canary is None:
        raise WrongArguments("--share is the share of --canary: give --canary NEW too")
    if args.canary and args.ray:
        raise WrongArguments("--canary is for one process; on Ray, serve NEW under a name of its own")
    args.share = 0.05 if args.share is None else args.share
    if not 0 < args.share < 1:
        raise WrongArguments(f"--share must be above 0 and below 1, got {args.share}")
    joins = args.ray and os.environ.get("RAY_ADDRESS")  # the addresses of that cluster are not known here
    args.name = _names(args)
    args.access = _access(args, "0.0.0.0" if joins else args.host)
    begin = time.perf_counter()
    computed = chosen_engine(args)._asdict()
    summary = (_run_on_ray if args.ray else _run_here)(args)
    return {**computed, **summary, "seed": args.seed, "seconds": time.perf_counter() - begin}


def _names(args: Namespace) -> list[str]:
    """The name of each export. Raises WrongArguments for too few, or equal ones."""
    several = len(args.exported) > 1
    if several and (args.canary or args.ray):
        flag = "--canary" if args.canary else "--ray"
        raise WrongArguments(f"{flag} is for one export, found {len(args.exported)}; start a server for each")
    names = args.name or [folder.absolute().name for folder in args.exported]
    if len(names) != len(args.exported) or len(set(names)) != len(names) or not all(names):
        given = f"found {', '.join(map(repr, names))} for {len(args.exported)} folders"
        raise WrongArguments(f"--name: expected a name of its own for each folder, {given}")
    return names


def _access(args: Namespace, bound: str) -> Access:
    """Who may send requests. Raises WrongArguments for what is no host, no origin or no key."""
    try:
        hosts = Hosts(bound, args.allow_host)
    except ValueError as error:
        raise WrongArguments(f"--allow-host: {error}") from None
    for origin in args.cors:
        if origin != ANY and not ORIGIN.fullmatch(origin):
            raise WrongArguments(f"--cors: expected an origin such as https://a.example:8080, or *, found {origin!r}")
    if args.cors and not find_spec("starlette"):
        raise WrongArguments("--cors needs starlette: pip install 'mini-ee[serve]'")
    key = os.environ.get(API_KEY) if args.api_key is None else args.api_key
    if key is not None and not re.fullmatch(r"[!-~]+", key):
        raise WrongArguments(f"--api-key or {API_KEY}: expected a key of visible ASCII characters without blanks")
    return Access(hosts, key, tuple(args.cors))


def _run_here(args: Namespace) -> dict:
    try:
        from mini_ee.serve.app import App
        from mini_ee.serve.canary import Canary
        from mini_ee.serve.server import serve
        from mini_ee.serve.several import Several
    except ImportError:
        raise WrongArguments("mini-ee serve needs uvicorn: pip install 'mini-ee[serve]'") from None
    with ExitStack() as stack:
        folders = [stack.enter_context(as_export(folder, "serve")) for folder in args.exported]
        workers = [stack.enter_context(_worker(args, folder, name)) for folder, name in zip(folders, args.name)]
        engine, details, served = workers[0].engine, "", App(workers[0], args.access)
        if args.canary:
            workers.append(new := stack.enter_context(_worker(args, args.canary, args.name[0])))
            served = Canary(workers[0], new, args.share, args.access, args.seed)
            details = f"; {args.share:g} of the requests: {args.canary}, model {new.engine.runtime.model_id}"
        elif len(workers) > 1:
            served = Several(dict(zip(args.name, workers)), args.access)
            details = f"; models: {', '.join(args.name)}"
        serve(
            served, args.host, args.port, _ready(args, engine.runtime, f"queues: {', '.join(engine.queues)}{details}")
        )
    _say(f"drained; {sum(worker.metrics.requests['answered'] for worker in workers)} requests answered")
    summary, *others = map(_summary, [*args.exported, *filter(None, [args.canary])], workers)
    return summary | ({"canary": others[0]} if args.canary else {"others": others} if others else {})


def _summary(folder: Path, worker: Worker) -> dict:
    """The JSON answer about one export."""
    summary = {"export": str(folder), "requests": dict(worker.metrics.requests)}
    return summary | {"provider": worker.engine.runtime.provider, "rule": worker.engine.rule.to_dict()}


def _run_on_ray(args: Namespace) -> dict:
    os.environ.update({name: value for name, value in OF_RAY.items() if name not in os.environ})
    try:
        from mini_ee.serve.replicas import Size, serve
    except ImportError:
        raise WrongArguments("--ray needs Ray Serve: pip install 'mini-ee[ray]'") from None
    args.exported, args.threads, args.device = [args.exported[0].absolute()], args.threads or 1, args.device or "cpu"
    worker = _worker(args, args.exported[0], args.name[0])  # checks all before Ray starts, so that an error is one line
    worker.drain()
    least, most = args.replicas or (1, 1)
    size = Size(least, most, args.batch_size, args.queue, args.threads, int(args.device == "cuda"))
    replicas = f"replicas: {most if least == most else f'{least} to {most}'}"
    ready = _ready(args, worker.engine.runtime, replicas)
    with redirect_stdout(sys.stderr):  # Ray prints the output of its processes
        requests = serve(partial(_replica, args), size, args.host, args.port, ready, args.access)
    if requests is None:
        _say("the cluster serves it now")
    else:
        _say(f"drained; {requests['answered']} requests answered by the replicas that were there")
    summary = {"export": str(args.exported[0]), "replicas": [least, most], "requests": requests}
    return summary | {"rule": worker.engine.rule.to_dict()}


def _ready(args: Namespace, runtime: Runtime, details: str) -> Callable[[str], None]:
    """Prints the address when the server listens, and a request to try."""
    path, texts = "/classify", {"text": "A charming film.", "text_b": "It was good."}
    if runtime.generates or runtime.embeds:
        path = "/generate" if runtime.generates else "/embed"
        texts = {"text": "Once upon a time"} if runtime.generates else {"inputs": "A charming film."}
    elif runtime.num_texts == 1:
        del texts["text_b"]
    if len(args.name) > 1:
        texts["model"] = args.name[0]
    key = f' -H "Authorization: Bearer ${API_KEY}"' if args.access.key else ""

    def ready(address: str) -> None:
        _say(f"{' and '.join(map(str, args.exported))} on {address}, {details}")
        _say(f"try: curl -s {address}{path}{key} --json '{json.dumps(texts)}'")

    return ready


def _say(text: str) -> None:
    print(f"mini-ee serve: {text}", file=sys.stderr, flush=True)


def _replica(args: Namespace) -> Worker:
    """The worker of a process of its own."""
    share_threads(args.threads)
    return _worker(args, args.exported[0], args.name[0])


def _worker(args: Namespace, folder: Path, name: str) -> Worker:
    """The worker of an exported folder."""
    runtime = open_exported(args, folder)
    runtime.name = name
    engine = _engine(args, runtime)
    runtime.warm_up()
    return Worker(engine, max_wait=args.max_wait / 1e3, max_open=args.queue, batch=args.batch_size)


def _engine(args: Namespace, runtime: Runtime):
    """The engine, which watches a guarantee if --shadow is given."""
    watches = args.shadow is not None or args.tighten or args.epsilon is not None
    if watches and (runtime.generates or runtime.embeds):
        kind = "a decoder" if runtime.generates else "a sentence encoder"
        raise WrongArguments(f"--shadow, --tighten and --epsilon are for classifiers; {runtime.folder} is {kind}")
    if runtime.generates:
        return engine_of(runtime, room=args.batch_size)
    is_other = chosen_engine(args).without_guarantee(runtime.folder, runtime.config)
    guarantee = {} if is_other else runtime.config.get("guarantee") or {}
    epsilon = args.epsilon if args.epsilon is not None else guarantee.get("epsilon")
    if args.shadow is None:
        if args.tighten or args.epsilon is not None:
            raise WrongArguments(
                "--tighten and --epsilon need a share of requests that run to full depth: give --shadow .05"
            )
        return engine_of(runtime, seed=args.seed)
    if args.tighten and epsilon is None:
        raise WrongArguments(
            "--tighten needs the agreement to keep: give --epsilon .95, or calibrate the run with --delta"
        )
    try:
        if args.tighten:
            stricter(runtime.rule)
        watched = Guarantee(args.shadow, epsilon, args.tighten)
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    return engine_of(runtime, guarantee=watched, seed=args.seed)
