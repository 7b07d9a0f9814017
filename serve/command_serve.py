"""`mini-ee serve`: an export over HTTP. Torch is imported for a run alone."""

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path

from mini_ee.lab.cli.command_options import number, positive, share, span, whole_number
from mini_ee.lab.cli.engine_options import add_engine, chosen_engine, open_exported
from mini_ee.lab.cli.temporary_export import as_export
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.sessions import share_threads
from mini_ee.serve.engines import engine_of
from mini_ee.serve.http_messages import Hosts
from mini_ee.serve.monitoring import Guarantee, stricter
from mini_ee.serve.worker import BATCH, MAX_OPEN, MAX_WAIT, Worker

HELP = "serve an export or a run over HTTP; requests are batched together"
EXAMPLE = "mini-ee serve exported --shadow .05"
USUAL = "--port", "--device", "--shadow"
HIGHEST_PORT = 65535

OF_RAY = {  # defaults of environment variables; Ray reads them when it is imported
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps Ray's own ports on the loopback interface, on every system
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "mini_ee.serve.replicas.front",
}


def add(sub: ArgumentParser) -> None:
    """Add the options of the command."""
    folder = "folder of an export, best made with --segments, or of a run, which is exported to a temporary folder"
    sub.add_argument("exported", type=Path, metavar="RUN_OR_EXPORTED", help=folder)
    sub.add_argument("--host", default="127.0.0.1", help="address; 0.0.0.0 accepts other machines")
    names = "further host name that the Host header of requests may have; * for any; may be repeated (default none)"
    sub.add_argument("--allow-host", action="append", default=[], metavar="NAME", help=names)
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
    epsilon = "agreement that is to be kept (default the one of calibrate --delta or --guarantee conformal)"
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
    try:
        args.hosts = Hosts("0.0.0.0" if joins else args.host, args.allow_host)
    except ValueError as error:
        raise WrongArguments(f"--allow-host: {error}") from None
    begin = time.perf_counter()
    computed = chosen_engine(args)._asdict()
    summary = (_run_on_ray if args.ray else _run_here)(args)
    return {"export": str(args.exported), **computed, **summary, "seconds": time.perf_counter() - begin}


def _run_here(args: Namespace) -> dict:
    try:
        from mini_ee.serve.app import App
        from mini_ee.serve.canary import Canary
        from mini_ee.serve.server import serve
    except ImportError:
        raise WrongArguments("mini-ee serve needs uvicorn: pip install 'mini-ee[serve]'") from None
    with ExitStack() as stack:
        folder = stack.enter_context(as_export(args.exported, "serve"))
        worker = stack.enter_context(_worker(args, folder))
        engine, canary, served = worker.engine, "", App(worker, args.hosts)
        if args.canary:
            new = stack.enter_context(_worker(args, args.canary))
            served = Canary(worker, new, args.share, args.hosts, args.seed)
            canary = f"; {args.share:g} of the requests: {args.canary}, model {new.engine.runtime.model_id}"
        serve(served, args.host, args.port, _ready(args, engine.runtime, f"queues: {', '.join(engine.queues)}{canary}"))
    requests = worker.metrics.requests
    answered = requests["answered"] + (new.metrics.requests["answered"] if args.canary else 0)
    _say(f"drained; {answered} requests answered")
    summary = {"requests": dict(requests), "provider": engine.runtime.provider, "rule": engine.rule.to_dict()}
    if args.canary:
        summary["canary"] = {"export": str(args.canary), "requests": dict(new.metrics.requests)}
    return summary | {"seed": args.seed}


def _run_on_ray(args: Namespace) -> dict:
    os.environ.update({name: value for name, value in OF_RAY.items() if name not in os.environ})
    try:
        from mini_ee.serve.replicas import Size, serve
    except ImportError:
        raise WrongArguments("--ray needs Ray Serve: pip install 'mini-ee[ray]'") from None
    args.exported, args.threads, args.device = args.exported.absolute(), args.threads or 1, args.device or "cpu"
    worker = _worker(args, args.exported)  # checks everything before Ray starts, so that an error is one line
    worker.drain()
    least, most = args.replicas or (1, 1)
    size = Size(least, most, args.batch_size, args.queue, args.threads, int(args.device == "cuda"))
    replicas = f"replicas: {most if least == most else f'{least} to {most}'}"
    ready = _ready(args, worker.engine.runtime, replicas)
    with redirect_stdout(sys.stderr):  # Ray prints the output of its processes
        requests = serve(partial(_replica, args), size, args.host, args.port, ready, args.hosts)
    if requests is None:
        _say("the cluster serves it now")
    else:
        _say(f"drained; {requests['answered']} requests answered by the replicas that were there")
    return {"replicas": [least, most], "requests": requests, "rule": worker.engine.rule.to_dict(), "seed": args.seed}


def _ready(args: Namespace, runtime: Runtime, details: str) -> Callable[[str], None]:
    """Prints the address when the server listens, and a request to try."""
    path, texts = "/classify", {"text": "A charming film.", "text_b": "It was good."}
    if runtime.generates or runtime.embeds:
        path = "/generate" if runtime.generates else "/embed"
        texts = {"text": "Once upon a time"} if runtime.generates else {"inputs": "A charming film."}
    elif runtime.num_texts == 1:
        del texts["text_b"]

    def ready(address: str) -> None:
        _say(f"{args.exported} on {address}, {details}")
        _say(f"try: curl -s {address}{path} --json '{json.dumps(texts)}'")

    return ready


def _say(text: str) -> None:
    print(f"mini-ee serve: {text}", file=sys.stderr, flush=True)


def _replica(args: Namespace) -> Worker:
    """The worker of a process of its own."""
    share_threads(args.threads)
    return _worker(args, args.exported)


def _worker(args: Namespace, folder: Path) -> Worker:
    """The worker of an exported folder."""
    runtime = open_exported(args, folder)
    engine = _engine(args, runtime)
    runtime.warm_up()
    return Worker(engine, max_wait=args.max_wait / 1e3, max_open=args.queue, batch=args.batch_size)


def _engine(args: Namespace, runtime: Runtime):
    """The engine, which watches a guarantee if --shadow is given."""
    watches = args.shadow is not None or args.tighten or args.epsilon is not None
    if watches and (runtime.generates or runtime.embeds):
        kind = "a decoder" if runtime.generates else "a sentence encoder"
        raise WrongArguments(f"--shadow, --tighten and --epsilon are for classifiers; {args.exported} is {kind}")
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
