"""Our models beside witnesses that are not ours: torch's own tracker (`torch.distributed._tools.mem_tracker`) and what autograd
saves for memory, torch's model of NCCL (`torch._inductor.comm_analysis`) for links.

    python benchmarks/paper.py memory links [--quick]

A stage of one rank is made of the layers that Transformers has, in plain torch: heads, MLP and vocabulary divided by tp, tokens
by cp, layers by pp; what other ranks send is an empty tensor of the right size. It runs forward and backward as the schedule has it, with
gradients that accumulate in fp32, beside a share of the master store and torch's AdamW. Tensors are fake: they have sizes and no data, so
that 70B needs no memory. `MemTracker` counts. The fullest of the first and of the last stage is what a rank needs.

No GPU, no network, no clock.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._inductor import comm_analysis
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from hf_hotspa.costs.data_sheet import all_reduce_latency, all_reduce_seconds
from hf_hotspa.costs.hardware import PRESETS, Hardware
from hf_hotspa.costs.memory import MemoryBreakdown, MemoryModel, MemoryOptions, activation_bytes
from hf_hotspa.costs.model_config import load_model, read_config
from hf_hotspa.costs.sizes import ModelSizes, loss_chunk_tokens
from hf_hotspa.features.lora.terms import Adapter
from hf_hotspa.model.specs import describe_model
from hf_hotspa.strategy import Strategy

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
GIB = 1 << 30
Rows = list[list[object]]


# -- memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A rank whose memory is asked for.

    Args:
        model: Of `load_model`.
        tokens: Of a pack.
        rank: Of a LoRA adapter on all seven products; 0 where the model is trained.
    """

    model: str
    strategy: str
    tokens: int
    rank: int = 0

    @property
    def of(self) -> Strategy:
        """The strategy."""
        return Strategy.parse(self.strategy)


CASES = (
    Case("llama2-7b", "tp8pp8", 4096),
    Case("llama2-7b", "dp8", 8192),
    Case("llama2-7b", "dp4tp2", 8192),
    Case("llama2-7b", "dp2cp4", 32768),
    Case("llama2-7b", "dp8", 8192, 16),
    Case("llama2-13b", "dp2tp2pp2", 4096),
    Case("llama2-13b", "dp8+z3", 4096),
    Case("llama2-13b", "dp4tp2+rc", 16384),
    Case("llama2-32b", "dp2tp8pp2+sp", 8192),
    Case("llama2-32b", "dp2tp8cp2", 16384),
    Case("llama2-70b", "dp2tp8pp4+sp", 8192),
    Case("llama2-70b", "dp4tp8+sp+rc", 8192),
)
"""The first ones are small enough for every run of the tests."""
QUICK = 2
HEAD = ("model", "strategy", "tokens", "torch, GiB", "ours, GiB", "error")
FILES = {"llama2-70b": DATA / "llama2_70b.json"}


class _Sent(torch.autograd.Function):
    """What a collective makes of a tensor, in size alone: `there` forward, `back` backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: tuple[int, ...]) -> Tensor:
        ctx.back = x.shape
        return x.new_empty(there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_empty(ctx.back), None


def sent(x: Tensor, *there: int) -> Tensor:
    """See `_Sent`."""
    return _Sent.apply(x, there)  # type: ignore[no-any-return,no-untyped-call]


class LoRA(nn.Module):
    """A frozen product with an adapter, as peft has it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * 2.0


class Tracker(MemTracker):
    """Counts bytes, and does not say which module has them: it would reject one that runs for several packs."""

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None: ...
    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None: ...
    def _pre_bw_hook(self, module: nn.Module, args: Any) -> None: ...
    def _post_bw_hook(self, module: nn.Module, args: Any) -> None: ...


def attend(q: Tensor, k: Tensor, v: Tensor, cp: int) -> Tensor:
    """Causal attention, by Ulysses where tokens are divided: all tokens of a part of the heads."""
    if cp > 1:
        q, k, v = (sent(x, 1, x.shape[1] // cp, x.shape[2] * cp, x.shape[3]) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return sent(out, 1, out.shape[1] * cp, out.shape[2] // cp, out.shape[3]) if cp > 1 else out


class Stage:
    """One rank of a pipeline stage.

    Args:
        last: Whether it is the last stage; else the first.
    """

    def __init__(self, case: Case, sizes: ModelSizes, config: LlamaConfig, last: bool) -> None:
        strategy = case.of
        self.case, self.strategy, self.config, self.last = case, strategy, config, last
        own = LlamaConfig(**config.to_dict())
        own.num_attention_heads //= strategy.tp
        own.num_key_value_heads = max(1, config.num_key_value_heads // strategy.tp)
        own.head_dim, own.intermediate_size = (
            config.hidden_size // config.num_attention_heads,
            config.intermediate_size // strategy.tp,
        )
        own._attn_implementation = "witness"
        self.tokens = case.tokens // strategy.cp
        self.hidden_tokens = self.tokens // (strategy.tp if strategy.sp else 1)
        count = len(sizes.layers_of_stages(strategy.pp)[strategy.pp - 1 if last else 0])
        self.layers = nn.ModuleList(LlamaDecoderLayer(own, i) for i in range(count))
        self.rotary = LlamaRotaryEmbedding(config)
        rows = config.vocab_size // strategy.tp
        first, self.ends = not last or strategy.pp == 1, nn.ModuleDict()
        if first:
            self.ends["embedding"] = nn.Embedding(rows, config.hidden_size)
        if last:
            self.ends["norm"] = LlamaRMSNorm(config.hidden_size)
            self.ends["head"] = nn.Linear(config.hidden_size, rows, bias=False)
        self.modules = nn.ModuleList([self.layers, self.ends])
        self._prepare()

    def _prepare(self) -> None:
        if self.case.rank:
            self.modules.requires_grad_(False)
            for layer in self.layers:
                for block in (layer.self_attn, layer.mlp):
                    for name, linear in list(block.named_children()):
                        if isinstance(linear, nn.Linear):
                            setattr(block, name, LoRA(linear, self.case.rank))
        for parameter in self.modules.parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]
        if self.strategy.z != 3:
            self._make_gradients(self.modules)
        else:
            self._make_gradients(self.ends)
            for i, layer in enumerate(self.layers):
                self._stream(i, layer)
        for layer in self.layers if self.strategy.sp else ():
            for block in (layer.self_attn, layer.mlp):
                block.register_forward_pre_hook(self._gather, with_kwargs=True)
                block.register_forward_hook(self._scatter)

    def _make_gradients(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros(parameter.shape, dtype=torch.float32)

    def _gather(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        shape = 1, self.tokens, self.config.hidden_size
        if args:
            return (sent(args[0], *shape), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": sent(kwargs["hidden_states"], *shape)}

    def _scatter(self, block: nn.Module, args: Any, out: Any) -> Any:
        shape = 1, self.hidden_tokens, self.config.hidden_size
        return (sent(out[0], *shape), *out[1:]) if isinstance(out, tuple) else sent(out, *shape)

    def _stream(self, index: int, layer: nn.Module) -> None:
        """Weights are there for the layer that runs and for the next one; gradients leave when a layer is through."""
        sizes = [(p, p.numel() * 2) for p in layer.parameters()]

        def there(needed: bool) -> None:
            for parameter, size in sizes:
                parameter.untyped_storage().resize_(size if needed else 0)

        layer.there = there  # type: ignore[assignment]
        there(False)

        def come(step: int, at: int) -> None:
            for i in (at, at + step):
                if 0 <= i < len(self.layers):
                    self.layers[i].there(True)

        def forward_begins(*_: object) -> None:
            come(1, index)

        def backward_begins(*_: object) -> None:
            come(-1, index)
            self._make_gradients(layer)

        def over(*_: object) -> None:
            there(False)

        def backward_over(*_: object) -> None:
            there(False)
            for parameter, _size in sizes:
                parameter.grad = None

        layer.register_forward_pre_hook(forward_begins)
        layer.register_forward_hook(over)
        layer.register_full_backward_pre_hook(backward_begins)
        layer.register_full_backward_hook(backward_over)

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """What it sends, or the loss of a last stage; and its input."""
        entered, shape = None, (1, self.hidden_tokens, self.config.hidden_size)
        if "embedding" in self.ends:
            hidden = self.ends["embedding"](torch.zeros(1, self.tokens, dtype=torch.long))
            hidden = sent(hidden, *shape) if self.strategy.sp else hidden
            if self.case.rank:
                hidden.requires_grad_()
        else:
            hidden = entered = torch.empty(shape).requires_grad_()
        positions = self.rotary(hidden, torch.arange(self.tokens)[None])
        for layer in self.layers:
            run = partial(layer, attention_mask=None, position_embeddings=positions)
            hidden = checkpoint(run, hidden, use_reentrant=False) if self.strategy.rc else run(hidden)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return (self._loss(hidden) if self.last else hidden), entered

    def _loss(self, hidden: Tensor) -> Tensor:
        """The gradient of the hidden states, chunk by chunk: logits of all tokens are never there."""
        hidden = self.ends["norm"](hidden)
        hidden = sent(hidden, 1, self.tokens, hidden.shape[2]) if self.strategy.sp else hidden
        whole = hidden.detach()
        gradient, head = torch.empty_like(whole), self.ends["head"]
        for begin in range(0, self.tokens, size := loss_chunk_tokens(head.weight.shape[0])):
            part = whole[:, begin : begin + size].detach().requires_grad_()
            logits = head(part)[0].float()
            functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long), reduction="sum").backward()
            gradient[:, begin : begin + size] = part.grad
            del logits, part
        self.gradient = gradient
        return hidden

    def run(self, in_flight: int) -> None:
        """So many forwards, and a backward."""
        kept = [self.forward() for _ in range(in_flight)]
        out, _ = kept.pop(0)
        out.backward(self.gradient if self.last else torch.empty_like(out))


def sizes_of(case: Case) -> tuple[ModelSizes, LlamaConfig]:
    """The model, for us and for Transformers."""
    where = FILES.get(case.model, case.model)
    found, config = load_model(where), LlamaConfig(**read_config(where), use_cache=False)
    adapter = Adapter.read(str(case.rank), found.linears) if case.rank else None
    return ModelSizes(found.shape, tied=found.tied, added=adapter), config


def modelled_bytes(case: Case) -> MemoryBreakdown:
    """What our memory model says, without the buffers of switches."""
    sizes, _ = sizes_of(case)
    options = MemoryOptions(context_parallel="ulysses", switch_bytes=0)
    return MemoryModel(sizes, case.of.world_size, options).breakdown(case.of, case.tokens)


@contextlib.contextmanager
def _in_bf16() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def tracked_bytes(case: Case) -> int:
    """The peak that torch's tracker finds, of the first and of the last stage."""
    sizes, config = sizes_of(case)
    strategy, found = case.of, []

    def attention(block: Any, q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        return attend(q, k, v, strategy.cp).transpose(1, 2), None

    for last in (False, True) if strategy.pp > 1 else (True,):
        with (
            _in_bf16(),
            FakeTensorMode(),
            patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping, {"witness": attention}),
            Tracker() as tracker,
        ):
            master = torch.zeros(sizes.num_trained // strategy.world_size, dtype=torch.float32)
            master.grad = torch.zeros_like(master)
            optimizer = torch.optim.AdamW([master], foreach=False)  # is kept: it has the moments
            optimizer.step()
            stage = Stage(case, sizes, config, last)
            stage.run(1 if last else strategy.pp)
            (peak,) = (of["Total"] for of in tracker.get_tracker_snapshot("peak").values())
            found.append(peak)
            del stage, master, optimizer
    return max(found)


@dataclass(frozen=True)
class Layer:
    """A decoder layer whose saved tensors are counted.

    Args:
        family: A `model_type` of transformers.
        rank: Of a LoRA adapter on all of its products; 0 where it is trained.
        more: Fields of its config beside `WIDTHS`.
    """

    name: str
    family: str
    dtype: torch.dtype = torch.bfloat16
    rank: int = 0
    more: Mapping[str, int] = field(default_factory=dict)


WIDTHS = {
    "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 64,
    "max_position_embeddings": 512, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LAYERS = (
    Layer("Llama", "llama"),
    Layer("Llama", "llama", torch.float32),
    Layer("Llama, 2 key/value heads", "llama", more={"num_key_value_heads": 2}),
    Layer("Llama, LoRA 16", "llama", rank=16),
    Layer("Mixtral, 2 of 4 experts", "mixtral", more={"num_local_experts": 4, "num_experts_per_tok": 2}),
    Layer("GPT-NeoX, no gate", "gpt_neox", more={"intermediate_size": 2048}),
    Layer("Phi-3, fused projections", "phi3"),
    Layer("Qwen3, norms of heads", "qwen3", more={"head_dim": 64}),
)
KEPT_HEAD = ("layer", "dtype", "kept by autograd, bytes a token", "formula", "error")


def kept_bytes(layer: Layer, tokens: int = 256) -> tuple[float, float]:
    """Bytes of a token that one decoder layer keeps in a real forward and backward on this machine, and by the formula.

    Counted are the storages that autograd saves tensors in, without the parameters' own: with two layers less with one.
    """
    found = []
    for count in (1, 2):
        config = CONFIG_MAPPING[layer.family](**WIDTHS | dict(layer.more), num_hidden_layers=count)
        model = AutoModelForCausalLM.from_config(config, dtype=layer.dtype, attn_implementation="sdpa").train()
        shape = describe_model(model).shape
        if layer.rank:
            model = get_peft_model(model, LoraConfig(r=layer.rank, target_modules="all-linear")).to(layer.dtype)
            model.enable_input_require_grads()
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        storages: dict[int, torch.UntypedStorage] = {}  # keeps them alive, so that no other one has their address

        def save(x: Tensor, weights: set[int] = weights, storages: dict[int, Any] = storages) -> Tensor:
            if (storage := x.untyped_storage()).data_ptr() not in weights:
                storages[storage.data_ptr()] = storage
            return x

        ids = torch.arange(tokens)[None]
        with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            out = model(input_ids=ids % WIDTHS["vocab_size"], position_ids=ids, use_cache=False)
        out.logits.float().sum().backward()
        found.append(sum(storage.nbytes() for storage in storages.values()) / tokens)
    ours = activation_bytes(shape, 1, element_bytes=layer.dtype.itemsize, frozen=bool(layer.rank))
    return found[1] - found[0], ours


def kept(quick: bool) -> Rows:
    """A line a layer."""
    rows: Rows = []
    for layer in LAYERS[:QUICK] if quick else LAYERS:
        real, ours = kept_bytes(layer)
        dtype = str(layer.dtype).removeprefix("torch.")
        rows.append([layer.name, dtype, f"{real:,.0f}", f"{ours:,.0f}", f"{ours / real - 1:+.1%}"])
    return rows


def memory(quick: bool) -> Rows:
    """A line a case."""
    rows: Rows = []
    for case in CASES[:QUICK] if quick else CASES:
        ours, theirs = modelled_bytes(case).total, tracked_bytes(case)
        rows.append(
            [
                case.model, f"`{case.strategy}`" + (f", LoRA {case.rank}" if case.rank else ""), f"{case.tokens:,}",
                f"{theirs / GIB:.2f}", f"{ours / GIB:.2f}", f"{ours / theirs - 1:+.1%}",
            ]
        )  # fmt: skip
    return rows


# -- links ------------------------------------------------------------------------------------------------------------

LINKS_HEAD = (
    "card",
    "ranks",
    "MiB",
    "torch, ms",
    "ours, ms",
    "error",
    "ours with one network card a node, ms",
    "error",
)
BUS_HEAD = ("machines", "measured, GB/s", "ours, GB/s", "error", "torch, GB/s", "error")
CARDS = {"a100-80g": comm_analysis.NVIDIA_GPU_TYPE.AMPERE, "h100-80g": comm_analysis.NVIDIA_GPU_TYPE.HOPPER}
BUSES = (
    ("8 A100 in a node", 8, 4 << 30, 232.5),
    ("2 nodes of 8 A100, 4 cards of 200 Gb/s each", 16, 4 << 30, 86.0),
    ("3 nodes of 8 A100, 4 cards of 200 Gb/s each", 24, 128 << 20, 96.0),
)
"""Published results of nccl-tests, all-reduce: github.com/NVIDIA/nccl-tests, issues 175, 175 and 119 (there the peak)."""


def torch_all_reduce(card: str, ranks: int, num_bytes: int) -> float:
    """Seconds by torch's model of NCCL, in nodes of eight cards with NVLink."""
    with (
        patch.object(comm_analysis, "get_gpu_type", lambda: CARDS[card]),
        patch.object(comm_analysis, "_has_nvlink", lambda: True),
        patch.object(torch.cuda, "is_available", lambda: False),
    ):
        kind = comm_analysis.NCCL_COLL.ALL_REDUCE
        return comm_analysis.estimate_nccl_collective_runtime_impl(num_bytes, ranks, kind) * 1e-3


def our_all_reduce(hardware: Hardware, ranks: int, num_bytes: int) -> float:
    """Seconds by ours: those that a layer under tp has four of."""
    return all_reduce_seconds(ranks, num_bytes, hardware) + all_reduce_latency(ranks, hardware)


def links(quick: bool) -> Rows:
    """A line a card, number of ranks and size."""
    rows: Rows = []
    for card in CARDS:
        for ranks in (2, 8, 16, 32):
            for mib in (16, 256):
                theirs, hardware = torch_all_reduce(card, ranks, mib << 20), PRESETS[card]
                texts = []
                for nics in (None, 1):
                    own = our_all_reduce(replace(hardware, nics_per_node=nics), ranks, mib << 20)
                    texts += [f"{own * 1e3:.3f}", f"{own / theirs - 1:+.0%}"]
                one_node = ranks <= hardware.devices_per_node
                rows.append(
                    [card, ranks, mib, f"{theirs * 1e3:.3f}", *texts[:2], *(["-", "-"] if one_node else texts[2:])]
                )
    return rows[:QUICK] if quick else rows


def buses() -> Rows:
    """Bus bandwidths of published runs of nccl-tests, beside both models."""
    rows: Rows = []
    for name, ranks, num_bytes, measured in BUSES:
        hardware, moved = replace(PRESETS["a100-80g"], nics_per_node=4), 2e-9 * (1 - 1 / ranks) * num_bytes
        both = (
            moved / our_all_reduce(hardware, ranks, num_bytes),
            moved / torch_all_reduce("a100-80g", ranks, num_bytes),
        )
        rows.append(
            [name, f"{measured:.1f}", *(text for bus in both for text in (f"{bus:.1f}", f"{bus / measured - 1:+.0%}"))]
        )
    return rows
