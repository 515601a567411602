"""A master store in host memory beside an accelerator: what a switch may touch where.

No accelerator is needed: torch's meta device stands for it. Its tensors have a device and no data, so that packing host
memory into a message, or copying out of the device where none is meant, raises as it would there; sums are checked here.
What is computed is the business of the other tests, in which both are the CPU.
"""

import random
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch

from hf_hotspa.cluster import Cluster
from hf_hotspa.engine.executor import BoundRound
from hf_hotspa.engine.master import MasterStore
from hf_hotspa.engine.switching import Switching
from hf_hotspa.errors import TransferError
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.model.specs import describe_model
from hf_hotspa.parallel.mesh import ProcessGroups
from hf_hotspa.strategy import parse_buckets
from tests.families import tiny_model
from tests.loopback import LoopbackHub
from tests.switch_cases import Buffers, drive, load_case, return_case

DEVICE, HOST = "meta", "cpu"
SEEDS = range(60)

_to, _post, _add = torch.Tensor.to, LoopbackHub.post, torch._foreach_add_


def on_device(world: list[Buffers]) -> list[Buffers]:
    return [[None if b is None else torch.empty_like(b, device=DEVICE) for b in buffers] for buffers in world]


def fetch(tensor, *args, **kwargs):
    """`Tensor.to`, which a meta tensor refuses: there is nothing to bring."""
    if tensor.device.type == DEVICE and args == (torch.device(HOST),):
        return torch.zeros_like(tensor, device=HOST)
    return _to(tensor, *args, **kwargs)


def post(hub, src, dst, tag, tensor):
    assert tensor.device.type == DEVICE, "NCCL sends what is on the device"
    _post(hub, src, dst, tag, tensor)


def add_on_one_device(targets, sources):
    assert all(a.device == b.device for a, b in zip(targets, sources, strict=True)), "a sum over two devices"
    _add(targets, sources)


@contextmanager
def two_devices():
    functions = {"equal": lambda a, b: True, "_foreach_add_": add_on_one_device}  # the hub compares what it sent
    with (
        patch.multiple(torch, **functions),
        patch.object(torch.Tensor, "to", fetch),
        patch.object(LoopbackHub, "post", post),
    ):
        yield


@pytest.mark.parametrize("kind", ["master", "pair", "return"])
def test_messages_are_of_the_device_and_sums_of_the_host(kind):
    sent = 0
    with two_devices():
        for seed in SEEDS:
            if kind == "return":
                case = return_case(seed)
                sources, targets = on_device(case.sources), case.targets
            else:
                case = load_case(seed, kind)
                sources, targets = case.sources, on_device(case.targets)
            moved = replace(case, sources=sources, seconds=on_device(case.seconds) if case.seconds else None)
            stats = drive(moved, targets, random.Random(seed), devices=(DEVICE, HOST))
            sent += sum(s.sent_bytes for s in stats)
    assert sent > 0


def bound(self, *args):
    """Adds as if everything were on one device."""
    _bind(self, *args)
    self.host_sums = False


def bound_send(self, message, buffers, staging):
    """Packs as if everything were on one device."""
    views = [buffers[s.store, s.segment].narrow(0, s.offset, s.length) for s in message.slices]
    self.outgoing.append(torch.cat(views))


_bind = BoundRound.__init__


@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    [("__init__", bound, "a sum over two devices"), ("_bind_send", bound_send, "NCCL sends what")],
)
def test_the_stand_in_finds_what_is_wrong(name, wrong, text):
    if name == "__init__":
        case = return_case(1, world_size=2)
        moved, targets = replace(case, sources=on_device(case.sources)), case.targets
    else:
        moved = load_case(0, "master", world_size=2)
        targets = on_device(moved.targets)
    with two_devices(), patch.object(BoundRound, name, wrong), pytest.raises(TransferError, match=text):
        drive(moved, targets, random.Random(0), devices=(DEVICE, HOST))


@pytest.mark.parametrize("z", ["", "+z2", "+z3"])
def test_the_store_is_on_the_host_and_the_strategies_on_the_device(z):
    device = torch.device(DEVICE)
    options = EngineOptions(offload_master=True, overlap_load=False, overlap_return=False)
    groups = ProcessGroups(0, 1, device, timedelta(seconds=10))
    vector = describe_model(tiny_model("llama_gqa_bias"), None).vector
    [bucket] = parse_buckets(f"dp1{z}:64")
    switching = Switching(vector, [bucket.strategy], Cluster(1, 1), groups, options, print)
    assert (switching.forecast.master_weights, switching.forecast.master_gradients) == (0, 0)  # of the device
    assert switching.forecast.weights > 0
    master = MasterStore(vector, 0, 1, options.master_device(device), device)
    assert {p.device.type for p in master.parameters.values()} == {HOST}
    switching.prepare()
    pool, (of_weights, of_gradients) = switching.pool, switching.places(bucket.strategy)
    weights, _ = switching.arenas.take_weights(of_weights, None)
    gradients = switching.arenas.gradients.take(of_gradients)
    assert {b.device.type for b in (*weights, *gradients) if b is not None} == {DEVICE}
    run, units = switching.executor.run, pool.units
    loads = [pool.load(bucket.strategy, None)]
    returns = [pool.return_gradients(bucket.strategy)]
    loads += [pool.unit_plan(bucket.strategy, unit, True) for unit in units.segments] if z == "+z3" else []
    returns += [pool.unit_plan(bucket.strategy, unit, False) for unit in units.trained] if z else []
    with two_devices():
        loaded = [run(plan, master.weights, weights, switching.weight_dtypes, 1) for plan in loads]
        returned = [run(plan, gradients, master.gradients, switching.gradient_dtypes, epoch=2) for plan in returns]
    moved = {sum(stats.local_bytes for stats in each) for each in (loaded, returned)}
    assert moved == {sum(p.nbytes for p in master.parameters.values())}
    assert {g.device.type for g in master.gradients if g is not None} == {HOST}
