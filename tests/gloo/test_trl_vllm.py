"""What a vLLM server, or colocated vLLM, gets of the weights: a stand-in checks every bit, and that no rank holds more than a layer."""

import copy
import time
import weakref
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hf_hotspa.engine import master
from hf_hotspa.switched.model_object import release
from tests.harness import run_ranks
from tests.trl_runs import RL, Case, made

pytestmark = pytest.mark.gloo

POOLS = (
    "dp2:20@64,tp2:128@128", "dp2+z3:20@64,pp2:128@128", "cp2+rc:20@64,dp2+z2:128@128",
    "dp4:20@64,cp2tp2:128@128", "dp2pp2:20@64,tp4+ck9:128@128", "dp2tp2+sp:20@64,tp2pp2:128@128",
)  # fmt: skip


class Server:
    """In the place of TRL's client, and of a colocated engine: keeps what it gets, and answers with made-up completions."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.syncs: list[dict[str, torch.Tensor]] = []
        model = SimpleNamespace(load_weights=self._load)
        runner = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)))
        self.llm_engine = SimpleNamespace(model_executor=runner)
        self._coming: dict[str, torch.Tensor] = {}

    def get_server_info(self) -> Any:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def init_communicator(self, *_: Any, **__: Any) -> None: ...

    close_communicator = init_communicator

    def _load(self, pairs: Any) -> None:
        self._coming |= {name: tensor.clone() for name, tensor in pairs}

    def update_named_params(self, metadata: Any, named: Any) -> None:
        for (name, dtype, shape), (given, tensor) in zip(metadata, named, strict=True):
            assert (name, dtype, shape) == (given, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            self._load([(given, tensor)])

    def reset_prefix_cache(self) -> None:
        self.syncs.append(self._coming)
        self._coming = {}

    def generate(self, prompts: Any, sampling_params: Any = None, n: int = 1, **_: Any) -> Any:
        made_up = [[5 + index % 7, 9 + len(ids) % 5, 256] for ids in prompts for index in range(n)]
        logprobs = [[[-5.0]] * 3 for _ in made_up]
        return {"prompt_ids": prompts, "completion_ids": made_up, "logprobs": logprobs}


class Held:
    """Counts the segments that a rank holds whole."""

    def __init__(self) -> None:
        self._refs, self.most = list[Any](), 0
        own, patched = master._whole, cast(Any, master)

        def counted(*args: Any) -> Any:
            deadline = time.monotonic() + 5
            # a thread of gloo may keep the message of before until the machine gives it a turn
            while any(ref() is not None for ref in self._refs) and time.monotonic() < deadline:
                time.sleep(1e-3)
            flat = own(*args)
            if flat is not None:
                self._refs = [ref for ref in self._refs if ref() is not None] + [weakref.ref(flat)]
                self.most = max(self.most, len(self._refs))
            return flat

        patched._whole = counted


def served(rank: int, world_size: int, pools: list[str], folder: str, dtype: torch.dtype) -> None:
    generation: Any = import_module("trl.generation.vllm_generation")
    held = Held()
    generation.is_vllm_available = lambda *_: True
    generation.VLLMClient = Server
    for pool in pools:
        for mode in ("server", "colocate"):
            for lora in (False, True):
                trainer = vllm_trainer(pool, mode, lora, f"{folder}/{pool}/{mode}{lora}", dtype, generation)
                checked = check_each_sync(trainer)
                trainer.train()
                assert len(checked) == (3 if rank == 0 or mode == "colocate" else 0), (pool, mode, checked)
                trainer.close_engine()
    assert held.most <= 1


def vllm_trainer(pool: str, mode: str, lora: bool, folder: str, dtype: torch.dtype, generation: Any) -> Any:
    fields = {**RL, "use_vllm": True, "vllm_mode": mode, "max_steps": 3, "per_device_train_batch_size": 4}
    if mode == "colocate":  # else the constructor makes an engine of vLLM's
        own = generation.VLLMGeneration._init_vllm
        generation.VLLMGeneration._init_vllm = lambda self: setattr(self, "llm", Server())
    try:
        return made(Case("GRPO", (pool, pool), "prompts", fields, lora=lora, dtype=dtype), folder, pool)
    finally:
        if mode == "colocate":
            generation.VLLMGeneration._init_vllm = own


def check_each_sync(trainer: Any) -> list[int]:
    """Where the trainer would generate: the weights are sent, and must be those of the model object, which are written anew."""
    checked: list[int] = []
    stand_in = trainer._generate_single_turn
    backend = trainer.vllm_generation
    server = getattr(backend, "vllm_client", None) or getattr(backend, "llm", None)

    def generated(prompt_ids: Any, *args: Any) -> Any:
        backend.sync_weights()
        trainer.switched.refresh()
        if server is not None and server.syncs:
            model, got = trainer.model, server.syncs[-1]
            expected = dict(expected_of(model))
            assert got.keys() == expected.keys()
            for name, tensor in expected.items():
                assert tensor.dtype == got[name].dtype, name
                assert torch.equal(tensor, got[name]), name
            checked.append(trainer.state.global_step)
        completions = stand_in(prompt_ids, *args)[0]
        return completions, [[-5.0] * len(ids) for ids in completions]

    trainer._generate_single_turn = generated
    return checked


def expected_of(model: Any) -> Any:
    """Of a model, its parameters; of one with an adapter, those of PEFT's own merged copy."""
    release(model)
    if not hasattr(model, "peft_config"):
        return model.named_parameters()
    forward = vars(model.get_base_model()).pop("forward")  # which refers to the switched model
    try:
        return copy.deepcopy(model).merge_and_unload().named_parameters()
    finally:
        vars(model.get_base_model())["forward"] = forward


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "pools"), [(2, POOLS[:3]), (4, POOLS[3:])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_server_gets_the_weights_bit_for_bit(world_size, pools, dtype, tmp_path):
    run_ranks(world_size, served, list(pools), str(tmp_path), dtype, timeout=900)
