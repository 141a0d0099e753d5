"""The typed configuration tree: one TOML file, one tree, `a.b=c` overrides.

Each option has one home, beside the component it sets, and one sentence under it. Unknown keys are errors that
name the nearest key that exists. This module imports nothing of ours.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Positive = Annotated[int, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class ConfigError(ValueError):
    """A sentence for the user: which key is wrong, and what to write instead."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )


class RunConfig(Section):
    name: str = "quickstart"
    """Folder under `root`; a finished or unfinished run of that name is never overwritten."""
    root: Path = Path("runs")
    """Where runs are written."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Task order, sampling and initial shuffles all derive from it."""
    store: str = ""
    """Object store URL, of this run alone; empty is the run folder's own `store/`."""


class ModelConfig(Section):
    path: str = "nano"
    """Hugging Face checkpoint folder, or `nano` for the one shipped with the package."""

    @property
    def folder(self) -> Path:
        """Where the checkpoint lies on this machine."""
        return Path(str(resources.files("stretto") / "assets" / "nano")) if self.path == "nano" else Path(self.path)


class TasksConfig(Section):
    source: str = "repair"
    """`repair` generates small Python bug-repair tasks; anything else is a folder of Harbor task folders."""
    train: Positive = 4000
    """Tasks to generate for training, or to take from a folder at most; used up, they come again in a new order."""
    heldout: int = Field(default=200, ge=0)
    """Held-out tasks: templates seen in training, instances never."""
    new_templates: int = Field(default=100, ge=0)
    """Held-out tasks from templates never trained on."""


class HarnessConfig(Section):
    max_turns: Positive = 10
    """Assistant turns per rollout; reaching it ends the rollout as `truncated`."""
    max_tokens: Positive = 640
    """Token budget of one rollout, prompt and observations included."""
    max_turn_tokens: Positive = 96
    """Tokens one assistant turn may sample."""
    system_prompt: str = ""
    """Text of the system message; empty sends none (a mid-trained model knows its product)."""
    show_tools: bool = False
    """Put the tools' JSON schemas into the system message, for models that were not trained on them."""


class SandboxConfig(Section):
    seconds: float = Field(default=2.0, gt=0)
    """Wall-clock limit of one command in the box."""
    memory_mib: Positive = 128
    """Memory limit of one box."""
    workspace_mib: Positive = 8
    """Size of the box's tmpfs workspace."""
    warm: int = Field(default=4, ge=0)
    """Boxes kept started ahead of need; each is used once."""


class GradingConfig(Section):
    hidden_calls: Positive = 24
    """Fresh random inputs on which a submission must equal the oracle."""
    seconds: float = Field(default=1.0, gt=0)
    """Wall-clock limit for one submission's hidden calls."""
    bad_call_penalty: float = Field(default=0.02, ge=0)
    """Subtracted per tool call that could not be carried out, at most five times."""
    control: Literal["none", "shuffle"] = "none"
    """`shuffle` permutes rewards within each group: the control run that must not learn."""


class RolloutsConfig(Section):
    group_size: Positive = 16
    """Attempts per task (GRPO group)."""
    groups_per_step: Positive = 8
    """Groups in one optimizer step."""
    max_staleness: int = Field(default=2, ge=0)
    """Bound on a token's age in optimizer steps when trained, queueing included. 0 is synchronous."""
    min_group: Positive = 2
    """A group with fewer survivors (the others `infra`) is not trained."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature in training."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling in training; log-probs are those of the truncated distribution."""
    deadline_seconds: float = Field(default=120.0, gt=0)
    """A lease that has not been answered by then is given to another worker."""
    workers: Positive = 1
    """Rollout worker processes on this machine."""
    concurrency: Positive = 96
    """Rollouts in flight per worker."""


class TrainerConfig(Section):
    steps: Positive = 30
    """Optimizer steps; each makes one policy version."""
    lr: float = Field(default=6e-4, gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(default=2, ge=0)
    """Steps of linear warm-up."""
    decay_steps: int = Field(default=0, ge=0)
    """Last steps over which the learning rate falls linearly to a twentieth; 0 keeps it constant."""
    betas: tuple[Decay, Decay] = (0.9, 0.97)
    """AdamW moment decays."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW decoupled weight decay, on matrices only."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Global gradient norm is clipped to this."""
    microbatch_tokens: Positive = 4096
    """Tokens per forward-backward pass."""
    correction: Literal["tis", "icepop", "none"] = "tis"
    """Off-policy correction: token-level truncated importance sampling, two-sided token mask, or none."""
    correction_cap: float = Field(default=2.0, gt=1)
    """Upper bound of the importance weight (`tis`), and of both the ratio and its inverse (`icepop`)."""
    normalizer: Literal["token", "sequence", "constant"] = "constant"
    """Denominator of the loss: trained tokens, rollouts, or `rollouts x max_tokens` (Dr. GRPO); the last two count the
    rollouts of groups with equal rewards too."""
    replay: bool = True
    """Force the experts chosen at inference in the training forward."""
    mismatch_every: int = Field(default=4, ge=0)
    """Measure engine/trainer mismatch with and without replay each so many steps; 0 never."""
    checkpoint_every: Positive = 10
    """Steps between checkpoints (Hugging Face export and resume state)."""
    keep_checkpoints: Positive = 3
    """Older checkpoints are removed."""
    threads: Positive = 1
    """Compute threads of the trainer process."""


class EngineConfig(Section):
    slots: Positive = 96
    """Sequences with a KV cache slot at once, idle sessions included."""
    max_tokens: Positive = 768
    """Tokens per KV slot."""
    prefill_tokens: Positive = 2048
    """Prompt tokens processed in one forward pass, so that decoding is not held up."""
    threads: Positive = 1
    """Compute threads of each engine process."""


class WeightsConfig(Section):
    anchor_every: Positive = 20
    """Versions between full anchors."""
    poll_seconds: float = Field(default=0.05, gt=0)
    """How often a follower looks for a new version."""


class LaunchConfig(Section):
    clusters: Positive = 2
    """Inference clusters (a follower and its engine) on this machine."""
    late_join_version: int = Field(default=3, ge=0)
    """Clusters after the first join when the trainer has reached this version."""
    host: str = "127.0.0.1"
    """Address the services bind to."""
    start_seconds: float = Field(default=120.0, gt=0)
    """Each service must answer its health check within this time."""


class EvalConfig(Section):
    attempts: Positive = 4
    """Sampled attempts per held-out task (pass@k uses all)."""
    every: int = Field(default=10, ge=0)
    """Versions between short evaluations during training; 0 never."""
    during_tasks: int = Field(default=64, ge=0)
    """Held-out tasks in a short evaluation."""


class Config(Section):
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    tasks: TasksConfig = TasksConfig()
    harness: HarnessConfig = HarnessConfig()
    sandbox: SandboxConfig = SandboxConfig()
    grading: GradingConfig = GradingConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    trainer: TrainerConfig = TrainerConfig()
    engine: EngineConfig = EngineConfig()
    weights: WeightsConfig = WeightsConfig()
    launch: LaunchConfig = LaunchConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _possible(self) -> Config:
        if self.run.name in ("", ".", "..") or "/" in self.run.name:
            raise ValueError(
                f"run.name is {self.run.name!r}: it names one folder below run.root, so give a word without slashes"
            )
        if self.rollouts.min_group > self.rollouts.group_size:
            raise ValueError(
                f"rollouts.min_group is {self.rollouts.min_group}, more than rollouts.group_size "
                f"({self.rollouts.group_size}): no group could ever be trained"
            )
        if self.rollouts.group_size < 2:
            raise ValueError("rollouts.group_size is 1: a group of one has no baseline; use at least 2")
        if self.run.store.startswith("memory:"):
            raise ValueError(
                "run.store is in memory, which processes do not share; use a folder, s3://, gs:// or az://"
            )
        if self.harness.max_tokens > self.engine.max_tokens:
            raise ValueError(
                f"harness.max_tokens ({self.harness.max_tokens}) exceeds engine.max_tokens "
                f"({self.engine.max_tokens}): a rollout would not fit its KV slot"
            )
        return self

    @property
    def run_dir(self) -> Path:
        return self.run.root / self.run.name

    @property
    def store_url(self) -> str:
        """The object store that trainer, workers, orchestrator and followers of this run share."""
        return self.run.store or str(self.run_dir / "store")


def load(source: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a TOML file, or a shipped config by name (`quickstart`), and apply `a.b=c` overrides.

    Raises ConfigError with one sentence per problem.
    """
    path = Path(source)
    if path.suffix != ".toml":
        shipped = resources.files("stretto") / "configs" / f"{source}.toml"
        if not shipped.is_file():
            names = sorted(p.name.removesuffix(".toml") for p in (resources.files("stretto") / "configs").iterdir())
            raise ConfigError(f"no config named {str(source)!r}: give a .toml file or one of {', '.join(names)}")
        text = shipped.read_text()
    else:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from error
    for override in overrides or []:
        _apply(tree, override)
    return parse(tree)


def load_run(run: Path, overrides: list[str] | None = None) -> Config:
    """The configuration that a run folder holds, with the name and place the folder has now."""
    here = run if run.name not in ("", "..") else run.resolve()
    place = [f"run.name={_literal(here.name)}", f"run.root={_literal(str(here.parent))}"]
    return load(run / "config.toml", [*(overrides or []), *place])


def parse(tree: dict[str, Any]) -> Config:
    """Validate a plain tree; raises ConfigError naming each wrong key and the nearest right one."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(e) for e in error.errors())) from None


def dump(config: Config) -> str:
    """The resolved tree as TOML, in the order of this file."""
    lines = []
    for section, values in config.model_dump(mode="json").items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_literal(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _literal(value: Any) -> str:
    """The value as TOML; JSON's notation is the same for what a configuration holds."""
    return json.dumps(value, ensure_ascii=False)


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {override!r} is not of the form a.b=c")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, name = key.strip().split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {section} is a value, not a section")
    tree[name] = value


def _sentence(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        message = error["msg"].removeprefix("Value error, ")
        return f"{where}: {message}" if where else message
    known: dict[str, Any] = Config.model_fields
    for part in error["loc"][:-1]:
        known = known[part].annotation.model_fields
    near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0)
    prefix = ".".join(str(part) for part in error["loc"][:-1])
    return f"unknown key {where}; did you mean {f'{prefix}.' if prefix else ''}{near[0]}?"
