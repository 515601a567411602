"""Dropout: every strategy drops what the plain model drops with the same keys; a mini-batch done again, the same."""

import copy
from functools import partial

import pytest
import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.features.dropout.dropout import DropoutMasks, feature_keys, kept, use_keyed_dropout
from hf_hotspa.model.specs import describe_model
from hf_hotspa.parallel.attention import PackedSequences, calls_attention
from hf_hotspa.parallel.wrapped_model import bare_model
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.lora import tiny_lora
from tests.oracle import exact_in_double, random_rows, relative_error
from tests.tiny_families import tiny_model_of
from tests.worlds import make_engine, make_mini_batch

pytestmark = pytest.mark.gloo

SEED, STEP = 11, 5
PLAIN = "plain_with_masks"


def plain_attention(module, query, key, value, mask, dropout=0.0, scaling=None, **kwargs):
    """Attention of one sequence written down as it is defined, by autograd; `module.keeps(p, heads, length)`: what is not dropped."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if kwargs.get("softcap") is not None:
        scores = kwargs["softcap"] * torch.tanh(scores / kwargs["softcap"])
    distance = torch.arange(length)[:, None] - torch.arange(length)
    window = kwargs.get("sliding_window") or length
    scores = scores.masked_fill((distance < 0) | (distance >= window), float("-inf"))
    if kwargs.get("s_aux") is not None:
        scores = torch.cat([scores, kwargs["s_aux"].reshape(1, -1, 1, 1).expand(1, -1, length, 1)], -1)
    weights = scores.softmax(-1)[..., :length]
    if dropout and module.training:
        weights = weights * module.keeps(dropout, query.shape[1], length) / (1 - dropout)
    return (weights @ value).transpose(1, 2), None


AttentionInterface.register(PLAIN, plain_attention)
AttentionMaskInterface.register(PLAIN, lambda *args, **kwargs: None)


def pairs_kept(name, masks, p, num_heads, length):
    """bool [H, length, length], as an attention of this name drops pairs of tokens of a sequence alone in its pack."""
    pairs = torch.stack([torch.arange(length) + (head << 32) for head in range(num_heads)]).flatten()
    keep = kept(masks.pack.token_keys, feature_keys(f"{name} probabilities 0", pairs), p)
    return keep.view(length, num_heads, length).transpose(0, 1)


def keyed_reference(model, rows, step=STEP):
    """Loss and trained gradients of the plain model on unpacked rows, its dropout drawing from the keys of the rows."""
    description, plain = describe_model(model), copy.deepcopy(model)
    bare, _ = bare_model(plain)
    masks = DropoutMasks(SEED, None, False)
    masks.step = step
    specs = {description.local_name(spec.name): spec for spec in description.vector.specs}
    use_keyed_dropout(bare, masks, specs, lambda _: [], description.shape.hidden_size, None)
    bare.set_attn_implementation(PLAIN)
    for name, module in bare.named_modules():
        if calls_attention(module):
            module.keeps = partial(pairs_kept, name, masks)
    num_labels = sum(label != -100 for row in rows for label in row["labels"][1:])
    total = 0.0
    with exact_in_double(torch.float64):
        for index, row in enumerate(rows):
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
            count = ids.shape[1]
            ends, positions = torch.tensor([0, count], dtype=torch.int32), torch.arange(count)[None]
            pack = MicroBatch(ids, positions, labels[None], ends, (count,), 0, ((index, 0),))
            masks.begin(PackedSequences((count,), ends), pack, whole=None)
            logits = plain(input_ids=ids, use_cache=False).logits[0]
            loss = functional.cross_entropy(logits[:-1], labels[1:], reduction="sum", ignore_index=-100) / num_labels
            loss.backward()
            total += loss.item()
    return total, {n: p.grad for n, p in plain.named_parameters() if p.requires_grad}


def hybrid_lora():
    """Layers that run one sequence of a pack at a time, with adapters."""
    # PEFT takes no dropout beside fused experts, which all-linear adapts, too
    attention = ["q_proj", "v_proj", "o_proj", "qkv_proj", "out_proj", "output_gate"]
    return tiny_lora("minimax", torch.float64, r=2, target_modules=attention, lora_dropout=0.2)


def with_attention_dropout(family, p, **others):
    return tiny_model(family, torch.float64, attention_dropout=p, **others).train()


MODELS = {
    "lora": lambda: tiny_lora("llama_gqa_bias", torch.float64, lora_dropout=0.3),
    "lora fused": lambda: tiny_lora("phi3_fused", torch.float64, lora_dropout=0.1),
    "dora": lambda: tiny_lora("llama_gqa_bias", torch.float64, lora_dropout=0.3, use_dora=True),
    "hybrid lora": hybrid_lora,
    "gpt_neox": lambda: tiny_model_of("gpt_neox", hidden_dropout=0.2),
    "phi": lambda: tiny_model_of("phi", resid_pdrop=0.2, embd_pdrop=0.1, attention_dropout=0.3),
    "gpt2": lambda: tiny_model_of("gpt2", attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1),
    "attention": lambda: with_attention_dropout("llama_gqa_bias", 0.3),
    "uneven heads": lambda: with_attention_dropout("llama_uneven", 0.1),
    "soft caps": lambda: with_attention_dropout("gemma2_soft_caps", 0.2),
    "sinks": lambda: tiny_model_of("gpt_oss", attention_dropout=0.2),
    "latent": lambda: tiny_model_of("deepseek_v3", attention_dropout=0.2),
    "attention and lora": lambda: tiny_lora(
        "llama_gqa_bias", torch.float64, lora_dropout=0.3, model={"attention_dropout": 0.2}
    ),
}
CASES = {
    "lora": ("lora", "dp4:5@24,dp2tp2:10@20,tp2pp2:16,pp4:45@48,tp4:60", {}),
    "lora, saving memory": ("lora", "dp4+rc:12@32,dp2tp2+sp:30@32,tp2pp2+sp+rc:60@66", {}),
    "lora, padded": ("lora", "dp2pp2:30@32,pp4:60", {"pipeline_schedule": "1f1b"}),
    "lora fused": ("lora fused", "dp2tp2+sp:16@32,tp4+rc:60", {}),
    "dora": ("dora", "dp4+rc:8@24,dp2tp2:16@32,tp2pp2+sp:60@66", {}),
    "hybrid lora": ("hybrid lora", "dp4:8@24,dp2tp2+rc:16@32,tp2pp2:60@66", {}),
    "gpt_neox": ("gpt_neox", "dp4:8@24,dp2tp2:16@32,tp2pp2+rc:60@66", {}),
    "gpt_neox, sequence parallel": ("gpt_neox", "dp2tp2+sp:30@32,tp4+sp+rc:60@64", {}),
    "phi": ("phi", "dp4:8@24,pp4:16@32,tp4:60@66", {}),
    "gpt2": ("gpt2", "dp4:60@64", {}),
    "attention": ("attention", "dp4:8@24,dp2tp2+sp:16@20,tp2pp2+rc:60", {}),
    "attention, padded": ("attention", "dp2pp2:30@32,pp4:60", {"pipeline_schedule": "1f1b"}),
    "soft caps": ("soft caps", "dp4:8@24,dp2tp2:16@32,tp2pp2+rc:60@66", {}),
    "uneven heads": ("uneven heads", "dp4:8@24,dp2tp2+sp:16@32,tp4+rc:60@66", {}),
    "sinks": ("sinks", "dp4:8@24,dp2pp2:60@66", {}),
    "latent": ("latent", "dp4:8@24,dp2tp2+rc:16@32,tp4:60@66", {}),
    "attention and lora": ("attention and lora", "dp4:8@24,tp2pp2+sp:60@66", {}),
}


def errors(rank, world_size, cases):
    """For each case: the worst error, whether dropout changed anything, and whether the same step gives the same bits."""
    found = {}
    for name in cases:
        make, buckets, options = CASES[name]
        model = MODELS[make]()
        rows = random_rows(15, bare_model(model)[0].config.vocab_size, longest=60)
        engine = make_engine(model, buckets, seed=SEED, **options)
        mini_batch = make_mini_batch(engine, rows)
        with exact_in_double(torch.float64):
            first = engine.forward_backward(mini_batch, step=STEP)
            got = engine.full_gradients()
            other = engine.forward_backward(mini_batch, step=STEP + 1).loss
            again = engine.forward_backward(mini_batch, step=STEP)
            same = all(torch.equal(g, got[n]) for n, g in engine.full_gradients().items())
            with engine.evaluation() as evaluation:
                quiet = evaluation.run(mini_batch)
            model.eval()
        worst = 0.0
        if rank == 0:
            loss, gradients = keyed_reference(model.train(), rows)
            assert got.keys() >= gradients.keys()  # tied weights have two names
            worst = max(abs(first.loss - loss) / loss, *(relative_error(got[n], g) for n, g in gradients.items()))
        mean = quiet.loss_sum / quiet.num_labels
        found[name] = worst, abs(other - first.loss), abs(mean - first.loss), same and again.loss == first.loss
        engine.close()
    return found


def check(results):
    for found in results:
        for name, (worst, other, evaluated, same) in found.items():
            assert worst <= 1e-11, name
            assert other > 1e-6, f"{name}: each mini-batch drops anew"
            assert evaluated > 1e-6, f"{name}: evaluation drops nothing"
            assert same, f"{name}: a mini-batch that is done again drops the same"


QUICK = ("lora, saving memory", "attention")


def test_every_strategy_drops_the_same_elements():
    check(run_ranks(4, errors, QUICK))


@pytest.mark.slow
def test_dropout_in_and_between_layers_padding_and_fused_projections():
    check(run_ranks(4, errors, [name for name in CASES if name not in QUICK], timeout=300))
