"""What a training run is, as plain frozen data: the same configuration and machine give the same
bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeAlias

from halfulp.training.adjusted import Adjusted
from halfulp.training.attention import AttentionPlan
from halfulp.training.operations import OperationPlan

Autocast: TypeAlias = Literal["none", "bf16", "fp16"]
Schedule: TypeAlias = Literal["constant", "cosine"]


@dataclass(frozen=True)
class LayerTask:
    """One causal attention layer (W_Q, W_K, W_V, W_O; one head) learns a random teacher on one
    fixed batch.
    """

    batch: int = 16
    tokens: int = 32
    width: int = 32
    constant: int = 8  # input coordinates that are 1 for every token

    def __post_init__(self) -> None:
        if min(self.batch, self.tokens, self.width) < 1 or not 0 <= self.constant <= self.width:
            raise ValueError(
                f"workload={self}: accepted are positive sizes and 0 to width constant coordinates"
            )


@dataclass(frozen=True)
class Language:
    """A GPT (nanoGPT's architecture: pre-norm, no bias, tied embeddings) on a stream of tokens."""

    layers: int = 12
    heads: int = 12
    key_heads: int | None = None  # GQA: heads of key and value; None: as many as heads
    width: int = 768
    context: int = 1024  # tokens
    vocabulary: int = 256  # 50304 for GPT-2's BPE, as nanoGPT pads it
    positions: Literal["learned", "rope"] = "learned"
    query_key_norm: bool = False  # RMS norm of query and key in every head
    # "synthetic", "english", or the path of a token file (`halfulp.training.tokens`)
    data: str = "synthetic"

    def __post_init__(self) -> None:
        if min(self.layers, self.heads, self.width, self.context, self.vocabulary) < 1:
            raise ValueError(f"workload={self}: accepted are sizes of at least 1")
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads}: accepted is a divisor of width={self.width}")
        if self.key_heads is not None and (self.key_heads < 1 or self.heads % self.key_heads):
            raise ValueError(
                f"key_heads={self.key_heads}: accepted is a divisor of heads={self.heads}"
            )
        if self.positions == "rope" and self.width // self.heads % 2:
            raise ValueError(
                "positions='rope': accepted is an even head dimension, not"
                f" {self.width // self.heads}"
            )


@dataclass(frozen=True)
class Pictures:
    """A small diffusion transformer that draws named pictures: self-attention and cross-attention
    to the name.
    """

    layers: int = 4
    heads: int = 4
    width: int = 128
    size: int = 32  # pixels a side
    patch: int = 4  # pixels a side of one token
    # auto: the first of the others that is installed
    data: Literal["auto", "emoji", "digits", "shapes"] = "auto"
    count: int | None = None  # pictures, spread evenly over the data; None: all
    name_length: int = 32  # bytes of a name that are read

    def __post_init__(self) -> None:
        if (
            min(
                self.layers,
                self.heads,
                self.width,
                self.size,
                self.patch,
                self.name_length,
                self.count or 1,
            )
            < 1
        ):
            raise ValueError(f"workload={self}: accepted are sizes of at least 1")
        if self.width % self.heads or self.size % self.patch:
            raise ValueError(
                f"workload={self}: accepted are heads that divide width and a patch that divides"
                " size"
            )


@dataclass(frozen=True)
class UserModel:
    """The user's own model, optimizer and batches, made by a function that is named and not stored
    (`halfulp.training.user_model`).
    """

    # "file.py:function" or "module:function"; where a file lies now is no part of what a run is
    make: str = field(compare=False)  # but for the function's name
    sha256: str  # of the file that the function is in
    rows: int  # of every batch that it makes

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows={self.rows}: accepted is an integer of at least 1")

    @property
    def function(self) -> str:
        """The function's name, without its file or module."""
        return self.make.rpartition(":")[2]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UserModel):
            return NotImplemented
        mine, its = ((x.function, x.sha256, x.rows) for x in (self, other))
        return mine == its


WorkloadConfig: TypeAlias = LayerTask | Language | Pictures | UserModel


@dataclass(frozen=True)
class Optimizer:
    """AdamW, its schedule, and the clipping of the global gradient norm."""

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warm_up: int = 0  # steps of linear warm-up
    schedule: Schedule = "constant"
    cosine_steps: int | None = None  # where the cosine ends; None: at the last step of the run
    least_rate: float = 0.0  # at the end of the cosine
    clip: float | None = None  # global norm; None: no clipping

    def __post_init__(self) -> None:
        if (
            not self.learning_rate > 0
            or self.warm_up < 0
            or not 0 <= self.least_rate <= self.learning_rate
        ):
            raise ValueError(
                f"optimizer={self}: accepted are learning_rate > 0, warm_up ≥ 0, least_rate up"
                " to it"
            )
        if self.cosine_steps is not None and self.cosine_steps <= self.warm_up:
            raise ValueError(
                f"cosine_steps={self.cosine_steps}: accepted are more than warm_up={self.warm_up}"
            )
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip={self.clip}: accepted is a number above 0, or None")


@dataclass(frozen=True)
class RunConfig:
    """One training run. Two runs that differ in one field are twin runs: same data order, same
    initial weights.
    """

    workload: WorkloadConfig
    attention: AttentionPlan = field(default_factory=AttentionPlan)
    optimizer: Optimizer = field(default_factory=Optimizer)
    steps: int = 1000
    # sequences, pictures or, for LayerTask, copies of its fixed batch; a step, over all processes
    batch: int = 1
    accumulation: int = 1  # micro-batches a step
    autocast: Autocast = "none"
    seed: int = 0  # of the weights
    data_seed: int | None = None  # of the data and their order; None: the same as seed
    metrics_every: int = 10  # steps between two lines of metrics
    measure_every: int = 0  # steps between two measurements of attention; 0: never
    checkpoint_every: int = 0  # steps between two checkpoints; 0: at the end alone
    keep: int | None = 2  # checkpoints kept besides the last; None: all
    device: str = "cpu"
    preset: str = ""  # what it was made from, for the reader
    operations: OperationPlan = field(default_factory=OperationPlan)  # of the user's own model
    adjusted: Adjusted = field(default_factory=Adjusted)  # what is otherwise from a step on

    @property
    def seed_of_data(self) -> int:
        """Of the data and their order."""
        return self.seed if self.data_seed is None else self.data_seed

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulation", "metrics_every"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}={getattr(self, name)}: accepted is an integer of at least 1"
                )
        for name in ("measure_every", "checkpoint_every"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name}={getattr(self, name)}: accepted is an integer of at least 0 (0: never)"
                )
        if self.batch % self.accumulation:
            raise ValueError(
                f"accumulation={self.accumulation}: accepted is a divisor of batch={self.batch}"
            )
        if isinstance(self.workload, UserModel):
            _check_user(self, self.workload)
        elif self.operations.assignments:
            raise ValueError(
                f"operations={str(self.operations)!r}: accepted with a model of your own;"
                " halfulp's have a plan of attention"
            )


def _check_user(run: RunConfig, made: UserModel) -> None:
    """Raise ValueError for a field that the user's own code decides."""
    theirs = replace(run.optimizer, clip=None)
    for f in fields(Optimizer):
        if getattr(theirs, f.name) != f.default:
            raise ValueError(
                f"optimizer.{f.name}={getattr(theirs, f.name)}: accepted with a model of your own"
                " is what its optimizer has, which your function makes; clip alone is set here"
            )
    if run.data_seed is not None:
        raise ValueError(
            f"data_seed={run.data_seed}: accepted with a model of your own is none; its function is"
            " given one seed"
        )
    if run.batch != made.rows:
        raise ValueError(
            f"batch={run.batch}: accepted with a model of your own is the {made.rows} rows that its"
            " batches have"
        )
