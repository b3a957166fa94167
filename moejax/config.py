"""The configuration of a run: frozen dataclasses, one field per line, each with its meaning.

`load` (see `moejax.config_load`) builds a `Config` from a preset, a YAML file and dotted overrides, and refuses what
it does not know. Everything that changes numbers lives here; behaviour follows from these fields, never from a
model's name.
"""

import dataclasses
from typing import Any, Literal

MAX_SEED = 2**32 - 1  # JAX keeps 32 bits of a seed and drops the rest in silence
MAX_BPE_VOCABULARY = 2**20  # the tokenizers library allocates it at once, and aborts the process where it can't


def _field(
    default: Any,
    meaning: str,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    numerics: bool = True,
) -> Any:
    """A field: its meaning, its bounds (`low` and `high` are allowed values, `above` and `below` are not), and whether it
    changes any number a run computes; a resumed run must agree with its checkpoint in those that do."""
    bounds = {"low": low, "above": above, "high": high, "below": below}
    return dataclasses.field(default=default, metadata={"help": meaning, "numerics": numerics, **bounds})


def _section(factory: type, *, numerics: bool = True) -> Any:
    doc = (factory.__doc__ or "").strip().splitlines()[0]
    return dataclasses.field(default_factory=factory, metadata={"help": doc, "numerics": numerics})


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How a token chooses its experts. All of it runs in FP32."""

    top_k: int = _field(2, "experts per token (K)", low=1)
    score_fn: Literal["softmax", "sigmoid", "sqrtsoftplus", "identity"] = _field(
        "softmax", "score of an expert from its logit; sqrtsoftplus is sqrt(log(1 + e^x))"
    )
    score_before_topk: bool = _field(
        True, "gather weights from the scores of all experts; false: softmax over the K chosen logits"
    )
    norm_topk: bool = _field(True, "divide the K weights of a token by their sum")
    route_scale: float = _field(1.0, "factor on the weights, applied once, after norm_topk")
    router_bias: bool = _field(False, "learned bias added to the logits (has a gradient)")
    select_bias: bool = _field(False, "correction bias that moves the choice only, never a weight or a gradient")
    n_group: int = _field(1, "number of expert groups; 1 turns group-limited routing off", low=1)
    topk_group: int = _field(1, "groups kept per token", low=1)
    group_top: int = _field(2, "a group is ranked by the sum of its group_top best selection scores", low=1)
    hash_layers: int = _field(0, "the first n MoE layers choose experts by a frozen table of token ids", low=0)
    forced_balance: bool = _field(False, "benchmarks only: ignore the scores' order and spread tokens evenly")


@dataclasses.dataclass(frozen=True)
class BalanceConfig:
    """Load-balance losses and the bias rule. 1.0 is perfect balance."""

    aux_coef: float = _field(0.0, "coefficient of the load-balance loss sum_e f_e P_e", low=0)
    aux_scope: Literal["sequence", "micro_batch", "global"] = _field(
        "sequence", "what f and P are averaged over; micro_batch depends on the split, global needs a counting pass"
    )
    z_coef: float = _field(0.0, "coefficient of the router z-loss, mean of squared log-sum-exp", low=0)
    bias_rate: float = _field(0.0, "step of select_bias once per optimizer step (DeepSeek-V3: 0.001)", low=0)
    bias_recentre: bool = _field(False, "subtract the mean from select_bias updates")


@dataclasses.dataclass(frozen=True)
class ActivationConfig:
    """The gated activation of an expert, of gate g and up u."""

    name: Literal["swiglu", "swiglu_clamped", "swiglu_oai", "geglu"] = _field(
        "swiglu",
        "swiglu silu(g)u; swiglu_clamped the same with g <= limit, |u| <= limit; "
        "swiglu_oai same clamp, g sigmoid(alpha g)(u + 1); geglu gelu_tanh(g)u",
    )
    limit: float | None = _field(None, "clamp of the clamped variants, applied before the activation", above=0)
    alpha: float = _field(1.702, "slope inside swiglu_oai's sigmoid", above=0)


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """The expert layers."""

    num_experts: int = _field(8, "experts per MoE layer (E)", low=1)
    expert_width: int = _field(256, "width of an expert (F)", low=1)
    router: RouterConfig = _section(RouterConfig)
    balance: BalanceConfig = _section(BalanceConfig)
    act: ActivationConfig = _section(ActivationConfig)
    expert_bias: bool = _field(False, "biases in both expert matrices")
    shared_experts: int = _field(0, "always-on experts beside the routed ones", low=0)
    shared_width: int | None = _field(None, "width of one shared expert; none: expert_width", low=1)
    shared_gate: bool = _field(False, "multiply the shared experts' output by a sigmoid gate of width 1")
    capacity_factor: str | None = _field(
        None,
        "none: dropless. A decimal string such as '1.25': rows per expert are cut at ceil(T K cf / E), and counted",
    )
    drop_policy: Literal["position"] = _field("position", "which rows go over capacity: the last in token order")
    wgrad: Literal["recipe", "bf16"] = _field("recipe", "weight-gradient GEMMs: as the recipe says, or in bf16")
    mx_mode: Literal["exact", "aligned"] = _field(
        "exact",
        "how MXFP8 products run. exact: by the format's definition, on Hopper at BF16's rate or below; aligned: on Hopper's FP8 "
        "tensor cores, fast, with one scale for 128 elements. The native kernels of CPUs and of Blackwell are exact",
    )
    bf16_layers: tuple[int, ...] = _field(
        (), "MoE layers (by MoE index, negative from the end) kept in bf16 under mxfp8"
    )
    backend: Literal["dense", "xla", "native", "megakernel"] | None = _field(
        None, "none: the fastest that can run the shape here; the run prints which, and why no faster one"
    )
    transport: Literal["all_gather", "all_to_all", "ragged_all_to_all"] | None = _field(
        None,
        "how rows travel over the expert axis; none: the one that moves fewer bytes, which the run prints. "
        "ragged_all_to_all needs GPUs",
        numerics=False,
    )
    minibatch_rows: int | None = _field(
        None,
        "rows a rank computes at a time with all_to_all, a multiple of 128; none: 1.25 times the balanced share",
        low=128,
        numerics=False,
    )
    save: Literal["auto", "recompute", "gate_up", "gate_up_mx"] = _field(
        "auto",
        "what the expert layer keeps for its backward; auto: recompute under remat or expert parallelism; gate_up_mx (MXFP8 "
        "on Hopper): gate and up in MXFP8, half the memory of gate_up, and the backward sees the rounded values",
        numerics=False,
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The decoder around the experts."""

    module: str = _field("models.decoder:Decoder", "the model, as module:Class; your own works too")
    vocab_size: int | None = _field(
        None, "vocabulary (V); none: that of the run's tokenizer, filled in before the model is built", low=1
    )
    d_model: int = _field(256, "residual width (D)", low=1)
    num_layers: int = _field(4, "decoder layers", low=1)
    dense_layers: int = _field(0, "leading layers with a dense MLP instead of experts", low=0)
    dense_width: int | None = _field(None, "width of the dense MLP; needed if dense_layers > 0", low=1)
    num_heads: int = _field(4, "query heads (N)", low=1)
    num_kv_heads: int = _field(2, "key/value heads; divides num_heads", low=1)
    head_dim: int = _field(64, "width of a head (H); num_heads * head_dim may differ from d_model", low=1)
    qk_norm: Literal["none", "head", "full"] = _field("none", "RMS norm of queries and keys: per head or full width")
    attention: Literal["xla", "cudnn"] = _field(
        "xla",
        "xla: blocked, every platform, bitwise repeatable; cudnn: NVIDIA's fused kernel for bf16, faster, not repeatable",
    )
    attention_bias: bool = _field(False, "biases on the q, k and v projections")
    rope_theta: float = _field(1.0e4, "base of the rotary frequencies", above=0)
    rope_fraction: float = _field(1.0, "share of each head that is rotated, from its start", above=0, high=1)
    norm_eps: float = _field(1.0e-6, "epsilon inside the RMS norms", above=0)
    tie_embeddings: bool = _field(False, "use the embedding as output head")
    init_std: float = _field(0.02, "standard deviation of the initial embeddings; matrices use fan-in", above=0)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes tokens."""

    source: str = _field(
        "stdlib", "'stdlib' (Python's own sources), or a folder or file of text, .jsonl or prepared tokens"
    )
    text_key: str = _field("text", "the field that holds the text in JSONL records")
    tokenizer: str = _field(
        "byte",
        "'byte', 'bpe' (trained on the source), or the path of a tokenizer.json; prepared tokens bring their own",
    )
    vocab_size: int = _field(
        4096, "vocabulary to train when tokenizer is 'bpe'; ignored otherwise", low=259, high=MAX_BPE_VOCABULARY
    )
    cache_dir: str = _field(".cache/data", "folder for tokenised, memory-mapped data, keyed by content", numerics=False)
    seed: int = _field(0, "seed of the epoch permutations", low=0, high=MAX_SEED)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "sgd"] = _field("adamw", "optimizer; sgd is plain, for checks")
    learning_rate: float = _field(1.0e-3, "peak learning rate", above=0)
    schedule: Literal["cosine", "wsd", "constant"] = _field(
        "cosine", "after warm-up: cosine decay, warm-up-stable-decay, or none"
    )
    warmup_steps: int = _field(20, "linear warm-up", low=0)
    decay_fraction: float = _field(0.2, "wsd: the last share of steps that decays", low=0, high=1)
    final_fraction: float = _field(0.1, "learning rate at the end, as a share of the peak", low=0, high=1)
    b1: float = _field(0.9, "AdamW first-moment decay", low=0, below=1)
    b2: float = _field(0.95, "AdamW second-moment decay", low=0, below=1)
    eps: float = _field(1.0e-8, "AdamW epsilon", above=0)
    weight_decay: float = _field(0.1, "decoupled decay, on matrices only (chosen by name)", low=0)
    clip_norm: float | None = _field(1.0, "clip to this global gradient norm; none: no clipping", above=0)


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Length, batch and memory of the run."""

    steps: int = _field(300, "optimizer steps", low=1)
    global_batch: int = _field(16, "sequences per optimizer step, over all devices and micro-batches (B)", low=1)
    micro_batches: int = _field(1, "gradient-accumulation steps; divides global_batch", low=1)
    sequence_length: int = _field(256, "tokens per sequence (L)", low=1)
    seed: int = _field(0, "seed of the initial weights", low=0, high=MAX_SEED)
    remat: Literal["none", "layer", "minimal"] = _field(
        "none",
        "none: keep all; minimal: recompute layers but keep the named tensors; layer: recompute all but the schedule",
    )
    scan_layers: bool = _field(True, "compile one layer and scan over the stack")
    loss_chunk: int = _field(
        1024, "tokens per chunk of the cross-entropy, so that logits of the whole batch never exist", low=1
    )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and how many stay."""

    every_steps: int = _field(
        100, "steps between checkpoints; the last step is always written; 0: only the last", low=0
    )
    keep: int = _field(2, "newest checkpoints kept", low=1)
    asynchronous: bool = _field(True, "write in the background")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis. At most one axis may be -1: what is left."""

    data: int = _field(-1, "replicas of everything, experts too")
    fsdp: int = _field(1, "shards of masters, moments and dense weights")
    expert: int = _field(1, "expert-parallel ranks (R); divides num_experts")
    context: int = _field(1, "shards of the sequence")
    tensor: int = _field(1, "shards of heads, head and embedding")
    spares: int = _field(0, "GPUs left idle at the end of every NVL72 rack (72 devices)", low=0, high=71)


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """Several processes. With nothing set: what Slurm, Open MPI or Kubernetes say, or one process."""

    coordinator: str | None = _field(None, "host:port of process 0, where no scheduler says it")
    processes: int | None = _field(None, "number of processes, where no scheduler says it", low=1)
    process: int | None = _field(None, "number of this process, from 0, where no scheduler says it", low=0)
    devices: str = _field("auto", "GPUs of this process. auto: one; all: every visible one; or their numbers, '0,1'")
    cluster: Literal["auto", "none", "mpi4py"] = _field(
        "auto", "who says it. auto: Slurm, Open MPI or Kubernetes; none: nobody; mpi4py: any MPI that mpi4py works with"
    )
    start_seconds: int = _field(300, "how long processes wait for each other at the start", low=1)
    stall_seconds: int = _field(
        300, "the run ends if a process is silent, or no step finishes, for so long; 0: never", low=0
    )


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """What the run prints and writes down."""

    every_steps: int = _field(10, "steps between log lines and metric records", low=1)
    tensorboard: bool = _field(True, "also write TensorBoard event files")
    sample_tokens: int = _field(200, "length of the sample generated at the end; 0: none", low=0)
    sample_prompt: str = _field("import ", "its prompt")


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    recipe: Literal["fp32", "bf16", "mxfp8"] = _field("fp32", "precision of the products; masters stay FP32 in all")
    preset: str | None = _field(None, "named model and moe values to start from (see models/presets)", numerics=False)
    run_dir: str | None = _field(None, "where the run lives; none: runs/<name of the config file>", numerics=False)
    model: ModelConfig = _section(ModelConfig)
    moe: MoEConfig = _section(MoEConfig)
    data: DataConfig = _section(DataConfig)
    optimizer: OptimizerConfig = _section(OptimizerConfig)
    training: TrainingConfig = _section(TrainingConfig)
    checkpoint: CheckpointConfig = _section(CheckpointConfig, numerics=False)
    mesh: MeshConfig = _section(MeshConfig, numerics=False)
    distributed: DistributedConfig = _section(DistributedConfig, numerics=False)
    log: LogConfig = _section(LogConfig, numerics=False)
