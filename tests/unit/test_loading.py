"""Weights from files: every range of every tensor, names that transformers changes, and what is refused by name."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import LlamaForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_hotspa.engine.loading import SavedModel, has_weights, load_weights, open_model
from hf_hotspa.engine.master import MasterStore
from hf_hotspa.errors import DamagedCheckpointError, HotspaConfigError, ModelError, UnsupportedError
from hf_hotspa.model.model_check import check_model
from hf_hotspa.model.replica import to_storage
from hf_hotspa.model.specs import describe_model
from hf_hotspa.model.weight_files import INDEX, WEIGHTS, WeightFiles
from hf_hotspa.parallel.agreement import Agreement, any_flag, packed_flags
from tests.families import FAMILIES, tiny_model


def same_bits(found, expected):
    return found.dtype == expected.dtype and found.shape == expected.shape and bool(torch.equal(found, expected))


def saved(tmp_path, family="llama_gqa_bias", change=None, **options):
    """The folder of a tiny model, its tensors changed by `change`."""
    folder = tmp_path / "model"
    tiny_model(family, **options).save_pretrained(folder)
    if change is not None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def masters(folder, world_size, model=None):
    """The stores of all ranks, filled from the files, one after the other; and the model."""
    model = open_model(folder) if model is None else model
    vector = describe_model(model).vector
    stores = [MasterStore(vector, rank, world_size, torch.device("cpu")) for rank in range(world_size)]
    for store in stores:
        load_weights(folder, model, store, Agreement(None, 0))
    return stores, model


def whole(stores):
    """Name -> the whole parameter of all ranks' shares, in storage order."""
    names = [spec.name for spec in stores[0].vector.specs]
    return {name: torch.cat([store.parameters[name].detach() for store in stores]) for name in names}


def assert_as_from_pretrained(folder, world_size=3):
    stores, model = masters(folder, world_size)
    expected = AutoModelForCausalLM.from_pretrained(folder)
    parameters = dict(expected.named_parameters(remove_duplicate=False))
    reference = describe_model(expected).vector
    assert stores[0].vector == reference
    for name, flat in whole(stores).items():
        spec = next(s for s in reference.specs if s.name == name)
        assert same_bits(flat, to_storage(parameters[name].detach(), spec.shard_dim).float()), name
    for (name, found), (other, buffer) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert name == other
        assert same_bits(found, buffer), name
    return model, expected


# -- ranges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7,), (5, 6), (1, 9), (4, 1), (3, 4, 5), (2, 0), ()], ids=str)
def test_every_range_in_every_order_of_dims(shape, tmp_path):
    tensor = torch.randn(shape).bfloat16()
    save_file({"x": tensor}, tmp_path / WEIGHTS)
    files = WeightFiles(tmp_path)
    for shard_dim in (None, *range(len(shape))):
        stored = to_storage(tensor, shard_dim)
        for start, stop in itertools.combinations(range(stored.numel() + 1), 2):
            assert same_bits(files.read("x", shard_dim, start, stop), stored[start:stop])
        assert same_bits(files.read("x", shard_dim), stored)
    assert same_bits(files.whole("x"), tensor)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_store_is_that_of_from_pretrained(family, dtype, tmp_path):
    tiny_model(family, dtype).save_pretrained(tmp_path, max_shard_size="20kB")
    assert (tmp_path / INDEX).exists()
    model, expected = assert_as_from_pretrained(tmp_path)
    assert not has_weights(model)
    assert type(model) is type(expected)
    assert model.dtype == expected.dtype == dtype
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()


def test_the_dtype_of_a_config_is_that_of_the_model(tmp_path):
    tiny_model("llama_uneven").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, dtype=torch.bfloat16)
    stores, model = masters(tmp_path, 2, open_model(tmp_path, config))
    assert model.dtype == torch.bfloat16
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    name = "model.layers.1.mlp.down_proj.weight"
    rounded = to_storage(expected.get_parameter(name).detach(), 1).float()
    assert same_bits(whole(stores)[name], rounded)
    assert not torch.equal(rounded, to_storage(load_file(tmp_path / WEIGHTS)[name], 1))


def test_without_a_dtype_in_the_config_that_of_the_files_counts(tmp_path):
    tiny_model("llama_uneven", torch.bfloat16).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["dtype"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, expected = assert_as_from_pretrained(tmp_path)
    assert expected.dtype == torch.bfloat16


def test_what_a_class_keeps_in_fp32_stays_so(tmp_path, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"down_proj"})
    tiny_model("llama_uneven", torch.bfloat16).save_pretrained(tmp_path)
    model, expected = assert_as_from_pretrained(tmp_path)
    dtypes = {name: p.dtype for name, p in expected.named_parameters()}
    assert {name: p.dtype for name, p in model.named_parameters()} == dtypes
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}


# -- names that transformers changes ----------------------------------------------------------------------------------


def test_experts_that_transformers_fuses(tmp_path):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=65, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    assert any(".experts.3.up_proj." in name for name in WeightFiles(tmp_path).tensors)
    model, _ = assert_as_from_pretrained(tmp_path)
    assert any(name.endswith("experts.gate_up_proj") for name, _ in model.named_parameters())


def test_a_base_model_where_the_head_is_tied(tmp_path):
    tiny_model("qwen3_qk_norm_tied").model.save_pretrained(tmp_path)
    assert "embed_tokens.weight" in WeightFiles(tmp_path).tensors
    assert_as_from_pretrained(tmp_path)


@pytest.mark.parametrize("keep", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_tied_weights_under_either_name(keep, tmp_path):
    def change(tensors):
        embedding = tensors.pop("model.embed_tokens.weight")
        names = ["model.embed_tokens.weight", "lm_head.weight"] if keep == "both" else [keep]
        tensors.update({name: embedding.clone() for name in names})

    assert_as_from_pretrained(saved(tmp_path, "qwen3_qk_norm_tied", change))


def test_tied_weights_that_differ_are_refused(tmp_path):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += 1.0

    with pytest.raises(
        ModelError, match=r"'lm_head\.weight' and 'model\.embed_tokens\.weight' are tied, but saved with"
    ):
        masters(saved(tmp_path, "qwen3_qk_norm_tied", change), 2)


def test_saved_buffers_are_read_and_leftovers_of_old_versions_ignored(tmp_path):
    class WithBuffer(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("scale", torch.ones(3))

    model = WithBuffer(tiny_model("llama_uneven").config)
    model.scale.copy_(torch.tensor([1.0, 2.0, 3.0]))
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, tmp_path / WEIGHTS)
    fresh = WithBuffer(model.config)
    assert same_bits(SavedModel(fresh, WeightFiles(tmp_path)).buffers()["scale"], model.scale)


# -- what is refused --------------------------------------------------------------------------------------------------

DOWN = "model.layers.2.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop(DOWN), f"no tensor for '{DOWN}' of LlamaForCausalLM"),
        (lambda t: t.pop("lm_head.weight"), r"no tensor for 'lm_head\.weight'"),
        (lambda t: t.update({DOWN: t[DOWN].T.contiguous()}), rf"'{DOWN}' is F32 \[48, 32\], and .* float32 \[32, 48\]"),
        (lambda t: t.update({DOWN: t[DOWN].to(torch.int8)}), rf"'{DOWN}' is I8 \[32, 48\]"),
        (lambda t: t.update({"model.extra": torch.ones(2)}), r"'model\.extra' has no place in LlamaForCausalLM"),
        (lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.ones(2)}), r"layers\.9\.mlp\.up_proj\.weight"),
    ],
    ids=["missing", "no head", "transposed", "integers", "unexpected", "a layer more"],
)  # fmt: skip
def test_tensors_that_do_not_fit(change, text, tmp_path):
    folder = saved(tmp_path, "llama_gqa_bias", change)
    with pytest.raises(ModelError, match=text) as failure:
        masters(folder, 1)
    assert str(folder) in str(failure.value)


def test_folders_without_safetensors(tmp_path):
    with pytest.raises(HotspaConfigError, match="there is no folder .*hf download"):
        open_model(tmp_path / "Qwen" / "Qwen3-0.6B")
    with pytest.raises(HotspaConfigError, match=r"no 'model\.safetensors'"):
        open_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(UnsupportedError, match=r"in the pickle 'pytorch_model\.bin'.*save_pretrained"):
        open_model(tmp_path)


def test_damaged_files(tmp_path):
    folder = saved(tmp_path)
    data = (folder / WEIGHTS).read_bytes()
    for damaged in (b"", data[:-4], b"\xff" * 100):
        (folder / WEIGHTS).write_bytes(damaged)
        with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors' cannot be loaded from"):
            open_model(folder)


@pytest.mark.parametrize(
    "index",
    ["{", "[]", "{}", '{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": "model.bin"}}',
     '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "gone.safetensors"}}'],
)  # fmt: skip
def test_damaged_indices(index, tmp_path):
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(DamagedCheckpointError):
        WeightFiles(tmp_path)


def test_a_tensor_in_two_files(tmp_path):
    for file in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.ones(2)}, tmp_path / file)
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(DamagedCheckpointError, match=r"'x' is also in 'a\.safetensors'"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"model_type": "nothing-like-this"}, ModelError, "no causal language model can be made"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, ModelError, "no causal language model can be made"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, UnsupportedError, "quantized.*open_qlora"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, UnsupportedError, "quantized.*dequantize=True"),
        ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedError, "quantized.*dequantize=True"),
    ],
    ids=["unknown", "no language model", "quantized", "mxfp4", "fp8"],
)
def test_configs_that_are_refused(change, error, text, tmp_path):
    folder = saved(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(error, match=text):
        open_model(folder)


def test_a_model_of_ones_own_buffers_on_meta_is_refused(tmp_path):
    folder = saved(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with pytest.raises(UnsupportedError, match=r"the buffers .*inv_freq.* are on the meta device"):
        check_model(model, describe_model(model), folder)
    with pytest.raises(UnsupportedError, match="has weights, and others are to be read"):
        check_model(tiny_model("llama_gqa_bias"), describe_model(tiny_model("llama_gqa_bias")), folder)


def test_flags_of_ranks_travel_as_few_numbers():
    of_ranks = [[place % 7 == rank for place in range(100)] for rank in range(3)]
    gathered = torch.tensor([packed_flags(flags) for flags in of_ranks], dtype=torch.float64)
    assert gathered.shape == (3, 3)
    assert any_flag(gathered, 100) == [place % 7 < 3 for place in range(100)]
