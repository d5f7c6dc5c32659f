"""Compute the resources of a run on a node: GPUs, CPUs, shared memory, KV cache. All callers use this arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from hpc_grpo.config.schema import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.types import DTYPE_BYTES, GIB

_CPU_KV_CACHE_GIB = 0.25
"""KV cache of an engine on CPU if engine.kv_cache_gib is null: vLLM cannot measure free memory there."""

_GPU_BATCHED_TOKENS = 8192
"""Tokens of an engine's step on GPU without engine.vllm.max_num_batched_tokens.

About 2,000 tokens keep a GPU busy. More tokens let a long prefill finish in fewer slow steps, so other requests
decode sooner. 8,192 tokens need 1.1 GiB of activations for 7B parameters, taken from the KV cache.
"""
_CPU_BATCHED_TOKENS = 2048
"""Tokens of an engine's step on CPU: more than enough to keep it busy, few enough for its caches."""

_OBJECT_STORE_SHARE = 0.4
"""Largest share of the free shared memory for Ray's object store: the weight store needs the rest."""
_MIN_OBJECT_STORE_BYTES = 80 * 2**20
"""Ray refuses less than 75 MiB."""

MOST_BESIDE_A_LEARNER = 0.7
"""The largest share of a GPU's memory for an engine beside a learner's states."""

_CPUS = 0.5
"""CPUs that Ray counts for a learner or an engine; they may use more."""

_SHARE = 0.5
"""Share of a GPU that Ray counts for each of two actors on it. Ray does not track their memory."""

Bundle = dict[str, float]
"""One actor's reservation in Ray, such as {"CPU": 0.5, "GPU": 1}."""


@dataclass(frozen=True)
class NodeDemand:
    """The Ray reservations of one node's learners and engines. SFT has no engines.

    With `shares`, each learner's bundle includes an engine, which uses the same GPU in turns.
    """

    learners: tuple[Bundle, ...]
    engines: tuple[Bundle, ...]
    shares: bool = False

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """Return the bundles to reserve: learners first, then the engines that share with no learner."""
        if not self.shares:
            return (*self.learners, *self.engines)
        pairs = zip_longest(self.learners, self.engines, fillvalue={"CPU": 0.0})
        bundles = [{**engine, "CPU": learner["CPU"] + engine["CPU"]} for learner, engine in pairs]
        # Reserve a whole GPU in each bundle: Ray would put two bundles of half a GPU on one GPU.
        return tuple({**bundle, "GPU": 1} if "GPU" in bundle else bundle for bundle in bundles)

    @property
    def num_cpus(self) -> float:
        return sum(bundle["CPU"] for bundle in self.bundles)

    @property
    def num_gpus(self) -> int:
        return int(sum(bundle.get("GPU", 0) for bundle in self.bundles))


def node_demand(config: Config, *, with_gpus: bool) -> NodeDemand:
    placement = config.placement
    learner, engine = Bundle(CPU=_CPUS), Bundle(CPU=_CPUS)
    if with_gpus:
        learner["GPU"] = _SHARE if placement.colocate else 1
        engine["GPU"] = _SHARE if placement.colocate else config.engine.tensor_parallel
    learners, engines = (learner,) * placement.learners_per_node, (engine,) * engines_per_node(config)
    return NodeDemand(learners, engines, shares=placement.colocate)


def engines_per_node(config: Config) -> int:
    """Return the number of engines on each node: 0 if the task samples nothing."""
    return config.engine.engines_per_node if config.needs.rollouts else 0


def expects_gpus(config: Config) -> bool:
    """Return whether `model.device` allows GPUs. Does not look at this machine, which may be a login node."""
    return config.model.device != "cpu"


LOGPROB_CHUNK_TOKENS = 1024
"""Number of tokens for which a learner computes logits at once."""
REDUCE_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's `reduce_bucket_size`: allocated in full, however small the model is."""

KEYS_OF_A_TOKEN = 4
"""Keys that attention may read for each token of the budget: each completion reads a shared prompt's keys."""


@dataclass(frozen=True)
class Budget:
    """The token budget of a microbatch. With `shares_prompts`, all completions of a prompt count its tokens once."""

    max_tokens: int
    shares_prompts: bool = False


def budget_of(config: Config) -> Budget:
    """Return the budget of `train`. If `share_prompts` is null, prompts are shared with kernel `sdpa` on CPU."""
    train = config.train
    is_measured = train.attention == "sdpa" and not expects_gpus(config)
    return Budget(train.max_tokens_per_microbatch, is_measured if train.share_prompts is None else train.share_prompts)


def schedules_ahead(config: Config, *, on_gpu: bool) -> bool:
    """Return whether vLLM schedules a step while another runs. Default: on GPU without ngram speculation."""
    asked = config.engine.vllm.get("async_scheduling")
    return on_gpu and config.engine.ngram_tokens is None if asked is None else asked


def gpus_per_node(config: Config) -> int:
    return node_demand(config, with_gpus=expects_gpus(config)).num_gpus


def check_fits(config: Config, place: str, demand: NodeDemand, *, num_gpus: float, num_cpus: float) -> None:
    """Raise ConfigError with the numbers if `demand` exceeds the resources of the node `place`."""
    shares = ", or let learners and engines share GPUs: placement.colocate=true, with as many engines as learners."
    for kind, needed, available in (("GPU", demand.num_gpus, num_gpus), ("CPU", demand.num_cpus, num_cpus)):
        if needed > available:
            may_share = kind == "GPU" and not (config.placement.colocate or config.rollout.max_policy_lag)
            raise ConfigError(
                f"{place} has {available:g} {kind}s, but placement.learners_per_node = "
                f"{config.placement.learners_per_node} and engine.engines_per_node = {config.engine.engines_per_node} "
                f"(engine.tensor_parallel = {config.engine.tensor_parallel}) need {needed:g}. Use fewer engines, or "
                f"larger nodes{shares if may_share else '.'}"
            )


def check_sequence_parallel(config: Config, num_learners: int) -> None:
    """Raise ConfigError unless `train.sequence_parallel` divides the learners of the run."""
    degree = config.train.sequence_parallel
    if num_learners % degree:
        choices = [each for each in range(1, num_learners + 1) if num_learners % each == 0]
        raise ConfigError(
            f"train.sequence_parallel = {degree} must divide the learners of the run. launch.num_nodes = "
            f"{config.launch.num_nodes} and placement.learners_per_node = {config.placement.learners_per_node} give "
            f"{num_learners}. Set it to {', '.join(map(str, choices))}, or change the number of learners."
        )


def trained_parameters(config: Config, num_parameters: int) -> int:
    """Return the number of trained parameters: the model's, or twice as many with a critic."""
    return num_parameters * (2 if config.needs.critic else 1)


def weight_bytes(config: Config, num_parameters: int) -> int:
    """Return the bytes of one copy of the weights, in the precision they are exported in."""
    return DTYPE_BYTES[config.model.dtype] * num_parameters


def weight_store_bytes(config: Config, num_parameters: int) -> int:
    """Return the size of a node's weight store in /dev/shm; 0 without engines, its only readers."""
    return DTYPE_BYTES[config.engine_dtype] * num_parameters if engines_per_node(config) else 0


def object_store_bytes(wanted_gib: float, free_bytes: float) -> int:
    """Return the bytes of Ray's object store on a node with `free_bytes` of free shared memory."""
    return max(_MIN_OBJECT_STORE_BYTES, int(min(wanted_gib * GIB, free_bytes * _OBJECT_STORE_SHARE)))


def kv_cache_gib(config: Config, *, on_gpu: bool) -> float | None:
    """Return the GiB of KV cache of one engine. None: engine.vllm.gpu_memory_utilization decides."""
    return config.engine.kv_cache_gib or (None if on_gpu else _CPU_KV_CACHE_GIB)


def max_batched_tokens(config: Config, *, on_gpu: bool) -> int:
    """Return the token limit of an engine's step. Default: room for all decoding requests and their guessed tokens."""
    engine, given = config.engine, config.engine.vllm.get("max_num_batched_tokens")
    decoded = engine.max_num_seqs * (1 + (engine.ngram_tokens or 0))
    if on_gpu:
        most = engine.max_num_seqs * config.max_model_len
        return given or min(max(_GPU_BATCHED_TOKENS, decoded), most)
    # On CPU a prompt is never split (engine/sampler.py), so the longest sequence must fit into one step.
    return max(given or _CPU_BATCHED_TOKENS, config.max_model_len, decoded)
