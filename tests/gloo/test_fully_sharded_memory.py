"""What `+z2` and `+z3` hold: measured, beside the formulas of ZeRO's stages; and a step of a model of a billion parameters."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from hf_hotspa.costs.formulas import model_state_bytes
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.engine.loading import open_model
from hf_hotspa.layout.placement import MASTER_ALIGNMENT
from hf_hotspa.model.specs import describe_model
from hf_hotspa.plan.units import Units
from hf_hotspa.strategy import Strategy
from tests.gloo.test_loading import random_files
from tests.harness import run_ranks
from tests.worlds import gradient_of, make_engine, make_mini_batch

pytestmark = pytest.mark.gloo

SIZES = {"0.9M": (128, 384, 4, 512), "7M": (256, 768, 8, 2048)}  # those of the benchmarks
BILLION = LlamaConfig(
    vocab_size=64000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=18, num_attention_heads=16,
    num_key_value_heads=8, tie_word_embeddings=False,
)  # fmt: skip


class Allocated(TorchDispatchMode):
    """Counts the bytes of the storages that are alive of all that operations of this thread have made.

    Attributes:
        peak: The most bytes at a time.
    """

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


def llama(size: str) -> LlamaForCausalLM:
    hidden, intermediate, layers, vocabulary = SIZES[size]
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
            num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=256,
        )
    )  # fmt: skip


def held_by_parameters(replica) -> int:
    """Bytes of the storages of all weights and gradients of a replica, each counted once."""
    tensors = [t for p, _ in replica.parameters for t in (p.data, gradient_of(p)) if t is not None]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@contextlib.contextmanager
def noting(replica, found: set[int]) -> Iterator[None]:
    """Notes what the parameters hold whenever a layer begins."""
    hooks = [
        layer.register_forward_pre_hook(lambda *_: found.add(held_by_parameters(replica))) for layer in replica.layers
    ]
    yield
    for hook in hooks:
        hook.remove()


def measured(rank, world_size, size, strategies):
    """By strategy: the peak of all that was allocated for two mini-batches, what weights and gradients held meanwhile,
    this rank's shares of both in the master store, and the staging buffers of switches."""
    found = {}
    for strategy in strategies:
        model = llama(size)
        rows = [{"input_ids": ids, "labels": ids} for n in range(2 * world_size) for ids in [[n + 1] * 24]]
        held: set[int] = set()
        with Allocated() as allocated:
            engine = make_engine(model, f"{strategy}:24@24")
            (phase,) = engine.phases.values()
            with noting(phase.replica, held):
                for _ in range(2):
                    engine.forward_backward(make_mini_batch(engine, rows))
        (parameters,) = held
        shares = [
            sum(t.nbytes for t in store if t is not None) for store in (engine.master.weights, engine.master.gradients)
        ]
        found[strategy] = allocated.peak, parameters, shares, engine._switching.executor.reserved_bytes
        engine.close()
    return found


@pytest.mark.parametrize("size", ["0.9M", pytest.param("7M", marks=pytest.mark.slow)])
def test_measured_peaks_are_those_of_the_formulas_within_one_layer(size):
    """Weights and gradients in fp32: what ZeRO's formulas say, the unit that computes, and no more than one layer, which
    comes (or leaves) meanwhile. The formulas have the shares alone; no scheme computes without the weights and the
    gradients of the unit that does.

    Two counts: by the storages of the parameters; and by a tracker of everything that is allocated, of which activations
    are taken out by what plain dp4, which has the same, takes beside its whole weights and gradients.
    """
    vector = describe_model(llama(size)).vector
    units, numel = Units(vector), sum(segment.numel for segment in vector.segments)
    layer = max(sum(vector.segments[s].numel for s in segments) for segments in units.segments.values())
    assert layer == sum(vector.segments[s].numel for s in units.segments[0])  # no unit is larger
    for found in run_ranks(4, measured, size, ["dp4", "dp4+z2", "dp4+z3"], timeout=280):
        plain, plain_held, _, plain_staging = found["dp4"]
        others = plain - plain_held - plain_staging
        assert 8 * numel <= plain_held <= 8.03 * numel
        for stage in (2, 3):
            peak, held, (weights, gradients), staging = found[f"dp4+z{stage}"]
            formula = model_state_bytes(numel, 4, stage, weight_bytes=4, gradient_bytes=4, optimizer_bytes=0)
            states = held + gradients + (weights if stage == 3 else 0)
            of_layer = layer * (8 if stage == 3 else 4)  # weights are streamed, too, or gradients alone
            over = states - formula - of_layer
            # shares of weights and of gradients are cut at multiples of so many elements
            cuts = 2 * 4 * MASTER_ALIGNMENT * len(vector.segments)
            assert 0 <= over <= of_layer + cuts, (size, stage, over, of_layer)
            by_tracker = peak - others - staging
            assert abs(by_tracker - held) <= 0.02 * plain_held


def counted(strategy: str) -> int:
    """Bytes of weights and gradients of a phase of the model of a billion parameters, computed in bf16."""
    with torch.device("meta"):
        description = describe_model(LlamaForCausalLM(BILLION).to(torch.bfloat16))
    sizes = ModelSizes(description.shape, "bfloat16", vector=description.vector)
    return sizes.stages(Strategy.parse(strategy))[0].arena_bytes


def test_a_billion_parameters_take_a_fifth_of_dp():
    assert counted("dp4+z3") <= 0.2 * counted("dp4")


def one_step(rank, world_size, folder):
    """Loss and squared norm of the gradient in this rank's share after a step, and the bytes of the phase's buffers."""
    model = open_model(Path(folder))
    engine = make_engine(model, "dp4+z3:8@8", Path(folder), compute_dtype=torch.bfloat16)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(8 * world_size).view(-1, 8).tolist()]
    report = engine.forward_backward(make_mini_batch(engine, rows))
    norm = sum(float(g.square().sum(dtype=torch.float64)) for g in engine.master.gradients if g is not None)
    found = report.loss, norm, engine._switching.arenas.num_bytes
    engine.close()
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_billion_parameters_make_a_step(tmp_path):
    """1.1 billion parameters on four ranks with 24 GB between them, of which dp4 would take 6.6 GB each beside its masters."""
    try:
        random_files(tmp_path / "large", BILLION)
        ranks = run_ranks(4, one_step, str(tmp_path / "large"), timeout=800)
    finally:
        shutil.rmtree(tmp_path / "large", ignore_errors=True)  # gigabytes, which pytest would keep
    assert len({loss for loss, _, _ in ranks}) == 1
    assert 8 < ranks[0][0] < 20  # ln 64000 is 11
    assert all(0 < norm < 1e6 for _, norm, _ in ranks)
    assert max(held for _, _, held in ranks) <= 0.2 * counted("dp4")
