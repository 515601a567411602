"""What was changed on a model object beside its config: refused by name, but for what no forward reads."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM

from hf_hotspa.engine.loss_check import check_model_loss
from hf_hotspa.errors import HotspaError
from hf_hotspa.model.model_check import changed_facts, check_model, module_facts
from hf_hotspa.model.replica import build_skeleton
from hf_hotspa.model.specs import describe_model
from tests.families import tiny_model
from tests.multimodal import multimodal_model
from tests.switched import batch_of, rows_of, switched
from tests.tiny_families import tiny_model_of

LAYER = "model.layers.1."


def swapped(model):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def scaled_adapter(model):
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    next(m for m in model.modules() if hasattr(m, "set_scale")).set_scale("default", 7.0)
    return model


def named_padding(model):
    model.resize_token_embeddings(model.config.vocab_size + 1)
    model.config.pad_token_id = model.config.vocab_size - 1


REFUSED = {
    "activation": ("llama", f"{LAYER}mlp", "act_fn", nn.ReLU(), r"layers\.1\.mlp\.act_fn' is a ReLU, and a SiLU"),
    "norm": ("qwen3", f"{LAYER}self_attn.q_norm", "variance_epsilon", 0.3, "variance_epsilon=0.3, and 1e-06"),
    "scaling": ("phi3", f"{LAYER}self_attn", "scaling", torch.tensor(3.0), r"layers\.1\.self_attn' has scaling="),
    "rotary": ("llama", "model.rotary_emb", "attention_scaling", 1.5, "attention_scaling=1.5, and 1.0"),
    "softcap": ("gemma2", f"{LAYER}self_attn", "attn_logit_softcapping", None, "attn_logit_softcapping=None"),
    "window": ("gemma2", "model.layers.0.self_attn", "sliding_window", 3, "sliding_window=3"),
    "router": ("mixtral", f"{LAYER}mlp.gate", "top_k", 1, "top_k=1, and 2"),
    "jitter": ("mixtral", f"{LAYER}mlp", "jitter_noise", 0.2, "jitter_noise=0.2"),
    "dropout": ("gpt2", "transformer.drop", "p", 0.3, "'transformer.drop' has p=0.3"),
    "function": ("gpt2", "transformer.h.0.mlp", "act", nn.functional.gelu, "act=gelu|act' is missing"),
    "added": ("llama", f"{LAYER}mlp", "extra", nn.Identity(), "mlp.extra' is a Identity, and not there"),
    "callable object": ("llama", f"{LAYER}self_attn", "scaling", slice(3), "another kind of scaling, and 0."),
    "of the class": ("llama", f"{LAYER}mlp", "get_extra_state", print, "get_extra_state=print"),
}
ACCEPTED = {
    "note": lambda model: setattr(model.model, "note", 3),
    "name": lambda model: setattr(model, "name_or_path", "elsewhere"),
    "devices": lambda model: setattr(model, "hf_device_map", {"": "cpu"}),
    "noise": lambda model: setattr(model.get_input_embeddings(), "neftune_noise_alpha", 5.0),
    "attention": lambda model: model.set_attn_implementation("eager"),
    "evaluation": lambda model: model.eval() and None,
    "checkpointing": lambda model: setattr(model.model.layers[0], "gradient_checkpointing", True),
    "generation": lambda model: model.generate(torch.tensor([[3, 4]]), max_new_tokens=2, pad_token_id=0)[:0],
    "dtype": lambda model: model.bfloat16(),
    "padding": named_padding,
    "adapter": lambda model: get_peft_model(model, LoraConfig(target_modules="all-linear", lora_dropout=0.1)),
}


def checked(model):
    check_model(model, describe_model(model))


@pytest.mark.parametrize("change", REFUSED)
def test_an_attribute_that_a_forward_reads_is_refused(change):
    family, module, attribute, value, words = REFUSED[change]
    model = tiny_model_of(family)
    own = model.get_submodule(module)
    own._modules.pop(attribute, None)  # else torch takes modules only
    setattr(own, attribute, value)
    with pytest.raises(HotspaError, match=words):
        checked(model)


@pytest.mark.parametrize(("change", "words"), [(swapped, "layer_idx=1, and 0"), (scaled_adapter, "scales by 7.0")])
def test_modules_in_other_places_are_refused(change, words):
    model = tiny_model_of("llama")
    model = change(model) or model
    with pytest.raises(HotspaError, match=words):
        checked(model)


@pytest.mark.parametrize("change", ACCEPTED)
def test_what_no_forward_reads_is_accepted(change):
    model = tiny_model_of("llama")
    made = ACCEPTED[change](model)
    checked(made if isinstance(made, nn.Module) else model)


def test_what_generation_keeps_on_a_model_that_reads_images_is_no_change():
    """Neither before a run, nor between its steps, which train as they would without."""
    losses = []
    for generates in (False, True):
        model = multimodal_model("qwen3_vl", torch.float32)
        if generates:
            model.generate(torch.tensor([[8, 9]]), max_new_tokens=2, do_sample=False)
        run = switched(model, "dp1:64@96")
        optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2)
        for _ in range(3):
            if generates:
                model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
                assert model.model.rope_deltas is not None
            loss = run(**batch_of(rows_of(0, model))).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        run.close()
    assert losses[:3] == losses[3:]
    assert losses[2] < losses[0]


def test_attention_dropout_that_is_off_for_a_run_is_no_change():
    model = tiny_model("llama_gqa_bias", attention_dropout=0.5)
    check_model(model, describe_model(model, attention_dropout=False))


def test_replicas_have_the_padding_row_of_the_object():
    model = tiny_model("llama_gqa_bias")
    before = model.get_input_embeddings().padding_idx
    model.config.pad_token_id = 7
    assert build_skeleton(describe_model(model)).get_input_embeddings().padding_idx == before


def test_a_change_while_training_is_found():
    model = tiny_model("llama_gqa_bias")
    facts = module_facts(model)
    model.eval()
    assert not changed_facts(module_facts(model), facts, model)
    model.model.layers[0].mlp.act_fn = nn.ReLU()
    model.model.norm.variance_epsilon = 0.5
    model.model.layers[0].mlp.more = nn.Dropout()
    del model.model.layers[0].input_layernorm
    gone, first, added, second = changed_facts(module_facts(model), facts, model)
    assert "input_layernorm' is missing" in gone
    assert "act_fn' is a ReLU" in first
    assert "mlp.more' is a Dropout, and not there" in added
    assert "variance_epsilon=0.5" in second


class ScaledForCausalLM(LlamaForCausalLM):
    """Reads an attribute that is none of what is compared."""

    _temperature = 1.0

    def forward(self, *args, labels=None, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits / self._temperature
        out.loss = None if labels is None else self.loss_function(out.logits, labels, self.config.vocab_size)
        return out


@pytest.mark.parametrize("changes", [False, True])
def test_logits_are_those_of_a_model_that_is_built_anew(changes):
    model = ScaledForCausalLM(tiny_model("llama_gqa_bias").config)
    if not changes:
        check_model_loss(model, describe_model(model))
        return
    model._temperature = 2.0
    with pytest.raises(HotspaError, match="ScaledForCausalLM computes other logits than a model that its class builds"):
        check_model_loss(model, describe_model(model))
