"""`mini-ee serve`: an exported folder behind HTTP. No torch here."""

import sys
import time
from pathlib import Path

from mini_ee import WrongArguments
from mini_ee.cli.options import number, positive, whole_number
from mini_ee.export.runtime import Runtime
from mini_ee.export.serving.engines import engine_of
from mini_ee.export.serving.watch import Promise, stricter
from mini_ee.export.serving.worker import BATCH, MAX_OPEN, MAX_WAIT, Worker
from mini_ee.export.sessions import CPU, CUDA

HELP = "an exported folder behind HTTP, rows of different requests in one batch"
EXAMPLE = "mini-ee serve exported --shadow .05"
HIGHEST_PORT = 65535


def add(sub) -> None:
    """Its options."""
    sub.add_argument("exported", type=Path, metavar="EXPORTED", help="best exported with --segments")
    sub.add_argument("--host", default="127.0.0.1", help="127.0.0.1, this machine alone; 0.0.0.0 for all others")
    sub.add_argument("--port", type=whole_number, default=8000, help="8000; 0 for a free one")
    sub.add_argument("--device", choices=("cpu", "cuda"), help="cuda where it is there by default, else cpu")
    sub.add_argument("--batch-size", type=positive, default=BATCH, help=f"rows of a batch, or texts at once; {BATCH}")
    told = f"how long a row may be held for company; {MAX_WAIT * 1e3:.0f}"
    sub.add_argument("--max-wait", type=number, default=MAX_WAIT * 1e3, metavar="MS", help=told)
    told = f"requests that may be open at once, the next is refused; {MAX_OPEN}"
    sub.add_argument("--queue", type=positive, default=MAX_OPEN, metavar="N", help=told)
    promise = sub.add_argument_group("the promise in service")
    promise.add_argument("--shadow", type=number, metavar="SHARE", help="of requests that run to full depth beside")
    promise.add_argument("--epsilon", type=number, help="the agreement to keep; by default what was calibrated")
    promise.add_argument("--tighten", action="store_true", help="raise thresholds while it is not kept")


def run(args) -> dict:
    """Serve until it is told to end; returns the JSON summary."""
    try:
        from mini_ee.export.serving.server import serve
    except ImportError:
        raise WrongArguments("mini-ee serve needs uvicorn: pip install 'mini-ee[serve]'") from None
    if not 0 <= args.port <= HIGHEST_PORT:
        raise WrongArguments(f"--port must be from 0 to {HIGHEST_PORT}, got {args.port}")
    if not 0 <= args.max_wait < 60_000:
        raise WrongArguments(f"--max-wait must be from 0 to 60000 milliseconds, got {args.max_wait}")
    providers = {None: None, "cpu": [CPU], "cuda": [CUDA]}[args.device]
    runtime = Runtime(args.exported, providers, threads=args.threads or 0)
    engine = _engine(args, runtime)
    runtime.warm_up()
    begin = time.perf_counter()
    with Worker(engine, max_wait=args.max_wait / 1e3, max_open=args.queue, batch=args.batch_size) as worker:

        def ready(address: str) -> None:
            queues = ", ".join(engine.queues)
            print(f"mini-ee serve: {args.exported} on {address}, queues: {queues}", file=sys.stderr, flush=True)

        serve(worker, args.host, args.port, ready)
    watch = worker.watch
    summary = {"export": str(args.exported), "requests": dict(watch.requests), "rule": engine.rule.to_dict()}
    print(f"mini-ee serve: drained; {watch.requests['answered']} requests answered", file=sys.stderr)
    return summary | {"seed": args.seed, "seconds": time.perf_counter() - begin, "provider": runtime.provider}


def _engine(args, runtime: Runtime):
    """The engine, with a promise where one is watched."""
    if runtime.config["unit"] == "tokens":
        if args.shadow is not None:
            raise WrongArguments(f"--shadow is for rows; {args.exported} holds a decoder")
        return engine_of(runtime, room=args.batch_size)
    promise = runtime.config.get("promise") or {}
    epsilon = args.epsilon if args.epsilon is not None else promise.get("epsilon")
    if args.shadow is None:
        if args.tighten or args.epsilon is not None:
            raise WrongArguments("--tighten and --epsilon go by the rows in the shadow: say which share, --shadow .05")
        return engine_of(runtime, seed=args.seed)
    if args.tighten and epsilon is None:
        raise WrongArguments(
            "--tighten keeps an agreement: say which, --epsilon .95, or calibrate the run with --delta"
        )
    try:
        if args.tighten:
            stricter(runtime.rule)
        watched = Promise(args.shadow, epsilon, args.tighten)
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    return engine_of(runtime, promise=watched, seed=args.seed)
