"""The typed configuration tree: one TOML file, one tree, `a.b=c` overrides.

Each option has one home, beside the component it sets, and one sentence under it. Unknown keys are errors that
name the nearest key that exists. This module imports nothing of ours.
"""

from __future__ import annotations

import difflib
import functools
import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

Positive = Annotated[int, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Shape = TypeVar("Shape", bound=BaseModel)


Counted = Literal[
    "read", "tested", "retried", "repeated_edit", "submitted", "submitted_untested", "solved_after_retry", "ran",
    "gave_up", "questions", "abandoned_todos", "bad_calls", "calls",
]  # fmt: skip
"""What `harness/behaviour.py` counts in a rollout."""


class ConfigError(ValueError):
    """A sentence for the user: which key is wrong, and what to write instead."""

    final = True  # no restart heals it


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError(f"{str(value).lower()} is not a value for this key")
        return value


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
    numerics: Literal["fast", "ordered", "exact"] = "ordered"
    """How exactly trainer and engine agree: `fast` computes as each side likes, `ordered` rounds at the same places on
    both, `exact` makes log-probs equal to the bit on one type of device, at some cost."""

    @property
    def folder(self) -> Path:
        """Where the checkpoint lies on this machine."""
        return Path(str(resources.files("stretto") / "assets" / "nano")) if self.path == "nano" else Path(self.path)


class TasksConfig(Section):
    source: str = "repair"
    """`repair` generates small Python bug-repair tasks; else a folder of Harbor task folders, or a mixture's TOML."""
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
    compact_tokens: int = Field(default=0, ge=0)
    """A conversation that holds so many tokens is summed up by the policy, which goes on with its summary in a new one;
    `max_tokens` then bounds each of them. 0 never."""
    system_prompt: str = ""
    """Text of the system message; empty sends none (a mid-trained model knows its product)."""
    show_tools: bool = False
    """Put the tools' JSON schemas into the system message, for models that were not trained on them."""
    tools: str = ""
    """Tool set for tasks whose task.toml names none: `nano`, `code`, or a TOML file; empty is `nano` for small tasks
    that an oracle grades, and `code` for others."""
    client: str = ""
    """A TOML file that declares your product's own agent, which then plays in place of Stretto's loop, with its own
    prompt and tools; `max_tokens` bounds each of its conversations."""

    @property
    def most_sampled(self) -> int:
        """Tokens that a rollout may sample, over all its segments."""
        several = self.client or self.compact_tokens
        return self.max_turns * self.max_turn_tokens if several else self.max_tokens

    @model_validator(mode="after")
    def _one_of_two_loops(self) -> HarnessConfig:
        given = [name for name in ("system_prompt", "show_tools", "tools", "compact_tokens") if getattr(self, name)]
        if self.client and given:
            raise ValueError(f"client is set, and a client has its own prompt, tools and context: leave {given[0]} out")
        return self

    @model_validator(mode="after")
    def _summaries_have_room(self) -> HarnessConfig:
        if self.compact_tokens and self.compact_tokens + 2 * self.max_turn_tokens > self.max_tokens:
            raise ValueError(
                f"compact_tokens is {self.compact_tokens}: with the turn that reaches it and the summary, of "
                f"max_turn_tokens ({self.max_turn_tokens}) each, a conversation would hold more than max_tokens "
                f"({self.max_tokens})"
            )
        return self


class SandboxConfig(Section):
    seconds: float = Field(default=2.0, gt=0)
    """Wall-clock limit of one command in the box."""
    memory_mib: Positive = 128
    """Memory limit of one box."""
    workspace_mib: Positive = 8
    """Size of the box's tmpfs workspace, and of the one that holds home, /tmp and /dev/shm."""
    inodes: Positive = 8192
    """Files and folders that each of the two can hold."""
    processes: Positive = 32
    """Processes and threads of one box."""
    cpus: float = Field(default=1.0, gt=0)
    """CPU time that one box gets per second, in cores."""
    warm: int = Field(default=4, ge=0)
    """Boxes kept started ahead of need; each is used once."""
    latency_p50: float = Field(default=0.0, ge=0)
    """For experiments: before each tool call its box sleeps, half of the times for longer than this; 0 is never."""
    latency_p99: float = Field(default=0.0, ge=0)
    """One sleep of a hundred takes longer than this (lognormal)."""

    backend: Literal["bubblewrap", "gvisor", "docker", "podman", "swerex"] = "bubblewrap"
    """What carries the boxes; `stretto/sandbox/backends.py` says what each can do."""
    image: str = ""
    """For docker and podman: the image of the boxes. It needs a python3 of 3.9 or newer."""
    server: str = ""
    """For swerex: http://HOST:PORT of its server. The key is taken from the environment variable SWEREX_TOKEN."""

    @model_validator(mode="after")
    def _backend_has_what_it_needs(self) -> SandboxConfig:
        for name, wanted_by in (("image", ("docker", "podman")), ("server", ("swerex",))):
            if self.backend in wanted_by and not getattr(self, name):
                raise ValueError(f"backend {self.backend} needs sandbox.{name}")
            if self.backend not in wanted_by and getattr(self, name):
                raise ValueError(f"{name} is set, but backend is {self.backend}; it goes with {' or '.join(wanted_by)}")
        return self

    @model_validator(mode="after")
    def _quantiles_in_order(self) -> SandboxConfig:
        if self.latency_p99 < self.latency_p50 or (self.latency_p99 > 0) != (self.latency_p50 > 0):
            raise ValueError(
                f"latency_p50 is {self.latency_p50:g} and latency_p99 {self.latency_p99:g}: set both, the second to no "
                "less than the first, or neither"
            )
        return self


class GradingConfig(Section):
    hidden_calls: Positive = 24
    """Fresh random inputs on which a submission must equal the oracle."""
    seconds: float = Field(default=1.0, gt=0)
    """Wall-clock limit for one submission's hidden calls."""
    bad_call_penalty: float = Field(default=0.02, ge=0)
    """Subtracted per tool call that could not be carried out, at most five times."""
    control: Literal["none", "shuffle"] = "none"
    """`shuffle` permutes rewards within each group: the control run that must not learn."""


class ShapingConfig(Section):
    """Small terms beside correctness: how much a rollout took, and how the agent behaved. None of them can pay."""

    effort_weight: float = Field(default=0.0, ge=0)
    """Taken off a solved rollout: this times C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)), x being the sum below."""
    effort_k: float = Field(default=0.1, gt=0)
    """How soon the charge bends: at an x far below 1 / k it is proportional to x."""
    effort_q: float = Field(default=0.5, ge=0)
    """How much it bends: 0 is a straight line, 1 a logarithm."""
    effort_thinking: float = Field(default=0.001, ge=0)
    """What a token of thinking adds to x."""
    effort_calling: float = Field(default=0.001, ge=0)
    """What a token of a tool call adds."""
    effort_saying: float = Field(default=0.001, ge=0)
    """What any other sampled token adds."""
    effort_reading: float = Field(default=0.0005, ge=0)
    """What a token of a tool's result adds."""
    effort_calls: float = Field(default=0.02, ge=0)
    """What a tool call adds."""
    effort_turns: float = Field(default=0.05, ge=0)
    """What a turn adds; calls made together in one turn save it."""
    effort_most: float = Field(default=0.2, ge=0, lt=1)
    """The largest charge for effort."""
    behaviour: dict[Counted, float] = {"questions": -0.02}
    """Added per count of a behaviour (a key of `harness/behaviour.py`), whatever the outcome; none may be positive."""
    behaviour_most: float = Field(default=0.2, ge=0, lt=1)
    """The largest charge for all behaviour together."""

    @field_validator("behaviour")
    @classmethod
    def _never_pays(cls, value: dict[Counted, float]) -> dict[Counted, float]:
        for name, weight in value.items():
            if weight > 0:
                raise ValueError(f"{name} = {weight:g} would pay for behaviour, which gets farmed: use 0 or less")
        return value


class RolloutsConfig(Section):
    group_size: Positive = 16
    """Attempts per task (GRPO group)."""
    groups_per_step: Positive = 8
    """Groups in one optimizer step."""
    max_staleness: int = Field(default=2, ge=0)
    """Bound on a token's age in optimizer steps when trained, queueing included. 0 is synchronous."""
    lead: Annotated[int, Field(ge=0)] | Literal["bound"] = "bound"
    """Steps sampled ahead of the newest version; `bound` is as many as max_staleness allows. Fewer: fresher tokens."""
    min_group: Positive = 2
    """A group with fewer survivors (the others `infra`) is not trained."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature in training."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling in training; log-probs are those of the truncated distribution, on both sides."""
    top_k: int = Field(default=0, ge=0)
    """Sample among the so many most likely tokens in training; 0 among all."""
    turn_seconds: float = Field(default=60.0, gt=0)
    """A rollout whose engine has not answered a turn by then goes on at another engine."""
    deadline_seconds: float = Field(default=120.0, gt=0)
    """A lease that has not been answered by then is given to another worker."""
    group_seconds: float = Field(default=300.0, gt=0)
    """A group is cut with the members it has by then; until then members that end as `infra` are replaced."""
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
    guard: float = Field(default=0.05, ge=0)
    """A step is made smaller, and said to be, when the policy has moved further than this (KL per token) since the
    batch's rollouts were sampled; 0 never."""
    microbatch_tokens: Positive = 4096
    """Tokens per forward-backward pass."""
    preset: str = "dr-grpo"
    """A named objective: sets the keys from `advantage` to `ema_decay` as its table in `presets.toml` says; those given
    explicitly win."""
    advantage: Literal["centred", "standardised", "reinforce++"] = "centred"
    """What a reward is compared with: the group's mean (Dr. GRPO); that, over the group's standard deviation (GRPO); or
    the group's mean, over the standard deviation of the whole batch (REINFORCE++ with baseline)."""
    objective: Literal["reinforce", "ppo", "cispo", "gspo", "dppo"] = "reinforce"
    """What the ratio of the present policy to `proximal` does: nothing, clips (`ppo` per token, `gspo` per sequence,
    `dppo` by the change of probability), or weighs with a cap (`cispo`)."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """`ppo`, `gspo`, `dppo`: how far the ratio (`dppo`: the probability) may fall where the advantage is negative."""
    clip_high: float = Field(default=0.2, gt=0)
    """How far it may rise where the advantage is positive (DAPO: more than `clip_low`); `cispo` caps at 1 + this."""
    clip_dual: float = Field(default=3.0, gt=1)
    """`ppo`, `gspo`, `dppo`: a larger ratio has no gradient at all (dual clip)."""
    correction: Literal["none", "tis", "sequence-tis", "icepop", "sequence-mask", "geometric-mask"] = "tis"
    """What is left of a token that another policy sampled: `reinforce` weighs the present policy against it, the other
    objectives weigh `proximal`. `tis` truncates the ratio (of tokens, or of whole sequences), the others mask."""
    correction_floor: float = Field(default=0.5, gt=0, lt=1)
    """The masks' lower bound of the ratio (`geometric-mask`: of its geometric mean)."""
    correction_cap: float = Field(default=2.0, gt=1)
    """The largest ratio: truncated to it by `tis` and `sequence-tis`, masked above it by the others."""
    off_policy_mask: float = Field(default=0.0, ge=0)
    """Leave out sequences with a negative advantage whose mean log-prob has fallen by more than this; 0 never."""
    proximal: Literal["behaviour", "ema"] = "behaviour"
    """The centre of the clip: the policy that sampled, or a moving average of the weights (decoupled PPO)."""
    kl: float = Field(default=0.0, ge=0)
    """Penalty on k1, log(present / reference) of each token, taken off its advantage; 0 keeps no reference."""
    reference: Literal["start", "ema"] = "start"
    """What `kl` holds the policy to: the checkpoint the run began from, or the moving average."""
    ema_decay: float = Field(default=0.9, gt=0, lt=1)
    """Decay per version of the moving average of the weights."""
    normalizer: Literal["token", "sequence", "constant"] = "constant"
    """Denominator of the loss: sampled tokens, rollouts (each by its own tokens), or `rollouts x max_tokens` (Dr.
    GRPO); the last two count the rollouts of groups with equal rewards too."""
    replay: bool = True
    """Force the experts chosen at inference in the training forward."""
    replay_ratio: float = Field(default=0.8, ge=0, le=1)
    """A recorded expert is replaced when its score is below this share of the own expert's in its place; 0: never."""
    recompute: bool = False
    """Compute each block's activations again in the backward pass instead of keeping them: less memory, more time."""
    mismatch_every: int = Field(default=4, ge=0)
    """Measure engine/trainer mismatch with and without replay each so many steps; 0 never."""
    checkpoint_every: Positive = 10
    """Steps between checkpoints (Hugging Face export and resume state)."""
    keep_checkpoints: Positive = 3
    """Older checkpoints are removed."""
    threads: Positive = 1
    """Compute threads of the trainer process."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        name, known = str(given.get("preset", "dr-grpo")), presets()
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
            raise ValueError(f"no preset is named {name!r}; did you mean {near}? There are {', '.join(known)}")
        return {**known[name], **given}

    @model_validator(mode="after")
    def _every_option_acts(self) -> TrainerConfig:
        if self.proximal == "ema" and self.objective == "reinforce":
            raise ValueError(
                "proximal is ema, but objective reinforce has no clip that it could be the centre of: use ppo, gspo, "
                "dppo or cispo, or leave proximal at behaviour"
            )
        if self.proximal == "behaviour" and self.objective != "reinforce" and self.correction != "none":
            raise ValueError(
                f"correction {self.correction} weighs the proximal policy against the one that sampled, and with "
                f"proximal = behaviour they are the same: use correction = none, or proximal = ema"
            )
        if self.reference == "ema" and not self.kl:
            raise ValueError("reference is ema, but kl is 0, so that nothing is held to it: set kl, or leave reference")
        return self


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """What each `trainer.preset` sets, by name: `presets.toml`."""
    return tomllib.loads((resources.files("stretto") / "presets.toml").read_text())


class EngineConfig(Section):
    backend: Literal["native", "vllm"] = "native"
    """Who samples: the engine of this package, or vLLM (`pip install 'stretto[vllm]'`)."""
    routes: Literal["required", "unknown"] = "required"
    """With `vllm` on hardware where it can't return the experts it chose, `unknown` samples without them; they can't be
    replayed then."""
    tensor_parallel: Positive = 1
    """Devices that one engine of `vllm` is spread over."""
    slots: Positive = 96
    """Sequences with a KV cache slot at once, idle sessions included."""
    max_tokens: Positive = 768
    """Tokens per KV slot."""
    prefill_tokens: Positive = 2048
    """Prompt tokens processed in one forward pass, so that decoding is not held up."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What activations and KV cache are rounded to; weights hold bf16 values either way."""
    threads: Positive = 1
    """Compute threads of each engine process."""
    speculate: int = Field(default=0, ge=0, le=16)
    """Tokens guessed ahead and verified in one pass while few sequences are sampled: by the checkpoint's heads for
    multi-token prediction or, without any, by what its text repeats. The distribution stays the same. 0: none."""


class WeightsConfig(Section):
    anchor_every: Positive = 20
    """Versions between full anchors."""
    poll_seconds: float = Field(default=0.05, gt=0)
    """How often a follower looks for a new version."""
    serve_dtype: Literal["bf16", "fp8"] = "bf16"
    """What weights are published and trained in: bf16, or fp8 e4m3 with a power-of-two scale per 128 x 128 block."""
    kv: Literal["keep", "recompute", "drain"] = "keep"
    """At new weights, generations under way go on with their keys and values, have them made again before the next
    token, or end first while new ones wait."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """`drain`: after so long, generations that have not ended go on as with `keep`."""


class LaunchConfig(Section):
    clusters: Positive = 2
    """Inference clusters (a follower and its engine) on this machine."""
    late_join_version: int = Field(default=3, ge=0)
    """Clusters after the first join when the trainer has reached this version."""
    host: str = "127.0.0.1"
    """Address the services bind to."""
    start_seconds: float = Field(default=120.0, gt=0)
    """Each service must answer its health check within this time."""
    silent_seconds: float = Field(default=30.0, gt=0)
    """A process that lives, but gives no sign of it for so long, is killed and started again (a trainer after four
    times as long)."""
    restarts: int = Field(default=4, ge=0)
    """Times a process that dies is started again within `restart_seconds`; one death more ends the run."""
    restart_seconds: float = Field(default=120.0, gt=0)
    """Deaths longer ago than this are forgotten."""


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
    shaping: ShapingConfig = ShapingConfig()
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
        if self.rollouts.min_group < 2:
            raise ValueError("rollouts.min_group is 1: a group of one has no baseline; use at least 2")
        if isinstance(self.rollouts.lead, int) and self.rollouts.lead > self.rollouts.max_staleness:
            raise ValueError(
                f"rollouts.lead is {self.rollouts.lead}, more than rollouts.max_staleness "
                f"({self.rollouts.max_staleness}): what is sampled so far ahead could not be trained; use at most "
                f"{self.rollouts.max_staleness}, or 'bound'"
            )
        if self.run.store.startswith("memory:"):
            raise ValueError(
                "run.store is in memory, which processes do not share; use a folder, s3://, gs:// or az://"
            )
        if self.harness.max_tokens > self.engine.max_tokens:
            raise ValueError(
                f"harness.max_tokens ({self.harness.max_tokens}) exceeds engine.max_tokens "
                f"({self.engine.max_tokens}): a rollout would not fit its KV slot"
            )
        if self.harness.client and self.sandbox.latency_p99:
            raise ValueError(
                "sandbox.latency_p50 and latency_p99 slow down tools of Stretto, not a client's: leave them 0"
            )
        charges = self.shaping.effort_most + self.shaping.behaviour_most + 5 * self.grading.bad_call_penalty
        if charges >= 1:
            raise ValueError(
                f"shaping.effort_most, shaping.behaviour_most and five times grading.bad_call_penalty are {charges:g} "
                "together: below 1 a solved task always earns more than an unsolved one"
            )
        self._engine_can()
        return self

    def _engine_can(self) -> None:
        """What only one of the two engines honours."""
        engine = self.engine
        if engine.backend == "native":
            if engine.routes == "unknown":
                raise ValueError("engine.routes is unknown, but the native engine knows them: leave it at required")
            if engine.tensor_parallel != 1:
                raise ValueError(
                    f"engine.tensor_parallel is {engine.tensor_parallel}, but the native engine runs in one process: "
                    "leave it at 1, or use engine.backend = vllm"
                )
            return
        if engine.speculate:
            raise ValueError(
                f"engine.speculate is {engine.speculate}, but only the native engine guesses ahead: leave it at 0, or "
                "use engine.backend = native"
            )
        if self.model.numerics == "exact":
            raise ValueError(
                "model.numerics is exact, which vLLM does not hold: use ordered, or engine.backend = native"
            )
        if self.rollouts.top_p < 1:
            raise ValueError(
                "rollouts.top_p is below 1, but vLLM does not tell which tokens it kept, so that the trainer can't "
                "normalise over them: use rollouts.top_p = 1, or the native engine"
            )
        if self.weights.kv != "keep":
            raise ValueError(
                f"weights.kv is {self.weights.kv}, but with vLLM a generation can only keep its keys and values: "
                "use keep, or engine.backend = native"
            )
        if self.weights.serve_dtype != "bf16":
            raise ValueError(
                f"weights.serve_dtype is {self.weights.serve_dtype}, which the vLLM adapter does not load: use bf16, "
                "or engine.backend = native"
            )
        if engine.routes == "unknown" and self.trainer.replay:
            raise ValueError(
                "engine.routes is unknown, so there is nothing to replay: set trainer.replay = false as well"
            )

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
        tree = tomllib.loads(shipped.read_text())
    else:
        tree = _toml(path)
    asked = any(override.partition("=")[0].strip() == "trainer.preset" for override in overrides or [])
    if asked and isinstance(tree.get("trainer"), dict):
        for key in set().union(*presets().values()):  # the preset asked for replaces what the file says of these
            tree["trainer"].pop(key, None)
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
    return validated(Config, tree)


def read_toml(shape: type[Shape], path: Path) -> Shape:
    """A TOML file as a tree of sections; raises ConfigError with a sentence."""
    return validated(shape, _toml(path))


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def validated(shape: type[Shape], tree: dict[str, Any]) -> Shape:
    """`parse` for any tree of sections."""
    try:
        return shape.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(e, shape) for e in error.errors())) from None


def dump(config: Config) -> str:
    """The resolved tree as TOML, in the order of this file."""
    lines = []
    for section, values in config.model_dump(mode="json").items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_literal(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _literal(value: Any) -> str:
    """The value as TOML; JSON's notation is the same for what a configuration holds, tables aside."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)} = {_literal(inner)}' for key, inner in value.items())}}}"
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


def _sentence(error: Any, shape: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        message = error["msg"].removeprefix("Value error, ")
        return f"{where}: {message}" if where else message
    known: dict[str, Any] = shape.model_fields
    for part in error["loc"][:-1]:
        if isinstance(part, str):  # a number stands for one section of a list
            inner = known[part].annotation
            known = next(iter(get_args(inner)), inner).model_fields
    near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0)
    prefix = ".".join(str(part) for part in error["loc"][:-1])
    return f"unknown key {where}; did you mean {f'{prefix}.' if prefix else ''}{near[0]}?"
