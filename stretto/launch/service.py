"""One process of a run: `python -m stretto.launch.service ROLE …`.

Imports only the one service it is asked for, so that an orchestrator never loads torch. The service ends with its
parent (also when that is killed with -9), and an error leaves as one line on stderr; the traceback goes to stdout,
which the launcher keeps in the same log. An error whose class has `final = True` is one that no restart heals.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from stretto.config import Config, load_run
from stretto.watch.metrics import Metrics

FINAL = 3
"""Exit code of a service that says that starting it again would end the same way."""
PARENT = "STRETTO_PARENT"
"""Environment variable with the process id of the launcher; without it a service outlives whoever started it."""


def main(argv: list[str] | None = None) -> int:
    parent = os.environ.get(PARENT)
    if parent:
        die_with(int(parent))
    arguments = _parser().parse_args(argv)
    name = getattr(arguments, "name", None) or arguments.role
    try:
        arguments.run_service(arguments)
    except KeyboardInterrupt:
        return 0
    except Exception as error:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        print(f"stretto {name}: {sentence(error)}", file=sys.stderr)
        return FINAL if getattr(error, "final", False) else 1
    return 0


def sentence(error: BaseException) -> str:
    """An error as one line: its text, with the type's name where the text alone would not say what is wrong."""
    text = " ".join(str(error).split())
    if not text:
        return type(error).__name__
    return text if isinstance(error, ValueError | RuntimeError | OSError) else f"{type(error).__name__}: {text}"


def die_with(parent: int) -> None:
    """End this process when `parent` ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before we could ask
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _orchestrator(a: argparse.Namespace) -> None:
    from stretto.rollouts.orchestrator import serve

    serve(_config(a.run), a.run, a.host, a.port)


def _worker(a: argparse.Namespace) -> None:
    from stretto.rollouts.worker import work

    work(_config(a.run), a.run, a.name, a.orchestrator)


def _engine(a: argparse.Namespace) -> None:
    from stretto.engine.server import serve

    config = _config(a.run)
    serve(
        a.model, a.name, a.host, a.port, config.engine, a.version, _metrics(a), config.run.seed, config.model.numerics
    )


def _follower(a: argparse.Namespace) -> None:
    from stretto.weights.follower import follow

    config = _config(a.run)
    follow(a.store, a.chain, a.cluster, a.engines.split(","), a.orchestrator, a.cache, config.weights, _metrics(a))


def _trainer(a: argparse.Namespace) -> None:
    from stretto.trainer.loop import train

    train(_config(a.run), a.run, a.orchestrator)


def _config(run: Path) -> Config:
    return load_run(run)


def _metrics(a: argparse.Namespace) -> Metrics:
    return Metrics(a.run / "metrics.jsonl", a.name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stretto.launch.service", description="One process of a run.")
    roles = parser.add_subparsers(dest="role", required=True)

    def role(name: str, run_service: object, *options: str) -> None:
        sub = roles.add_parser(name)
        sub.set_defaults(run_service=run_service)
        for option in ("run", *options):
            kind = {"run": Path, "cache": Path, "model": Path, "port": int, "version": int}.get(option, str)
            sub.add_argument(f"--{option}", type=kind, required=True)

    role("orchestrator", _orchestrator, "host", "port")
    role("worker", _worker, "name", "orchestrator")
    role("engine", _engine, "name", "model", "host", "port", "version")
    role("follower", _follower, "name", "store", "chain", "cluster", "engines", "orchestrator", "cache")
    role("trainer", _trainer, "orchestrator")
    return parser


if __name__ == "__main__":
    sys.exit(main())
