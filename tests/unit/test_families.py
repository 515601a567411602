"""The sweep's page and table, and how a model's layers, plan and stages are read."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama import LlamaModel

from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.errors import ModelError, StrategyError, UnsupportedError
from hf_hotspa.features.isolation.isolation import run_alone
from hf_hotspa.model.model_kind import LayerKind
from hf_hotspa.model.pass_through import stage_unsupported_reason
from hf_hotspa.model.specs import describe_model
from hf_hotspa.parallel.attention import PackedSequences, packed_attention
from hf_hotspa.parallel.rope import counting_from, with_counted_positions
from hf_hotspa.strategy import Bucket, Strategy, check_buckets, strategies_with_options
from tests import family_page
from tests.families import tiny_model
from tests.family_page import PAGE, cell, outcome, render_csv, render_page
from tests.family_sweep import RESULTS
from tests.tiny_families import UNPLANNED, planned_families, swept_families, tiny_config_of, tiny_model_of

TABLE = json.loads(RESULTS.read_text())


# ------------------------------------------------------------------------------------------------------------ the page


def test_the_table_has_every_planned_family_of_the_installed_transformers() -> None:
    assert list(TABLE["families"]) == list(swept_families()), "run: python -m tests.family_sweep"
    assert not planned_families().keys() & set(UNPLANNED)
    assert TABLE["transformers"] == transformers.__version__
    plans = {name: (row["tp_plan"], row["pp_plan"]) for name, row in TABLE["families"].items()}
    assert plans == swept_families()


def test_the_page_is_made_from_the_table() -> None:
    assert PAGE.read_text() == render_page(TABLE), "run: python -m tests.family_sweep --page-only"
    assert family_page.TABLE.read_text() == render_csv(TABLE)


def test_nothing_is_wrong_and_every_refusal_has_a_reason() -> None:
    for name, row in TABLE["families"].items():
        assert "failed" not in row, name
        for strategy, result in row["strategies"].items():
            assert outcome(result) != "wrong", f"{name} {strategy}"
            assert outcome(result) == "exact" or len(result["refused"]) > 20


def test_a_crash_a_hang_and_a_large_error_count_as_wrong() -> None:
    assert outcome({"failed": "timeout"}) == outcome({}) == outcome({"loss": 1e-3, "gradient": 0.0}) == "wrong"
    assert outcome({"loss": 0.0, "gradient": 1e-10}) == outcome({"loss": float("nan"), "gradient": 0.0}) == "wrong"
    good, bad = {"loss": 0.0, "gradient": 0.0}, {"failed": "x"}
    assert cell({"strategies": {"tp4": good, "dp2tp2": bad}}, "tp") == "wrong"
    assert cell({"strategies": {"tp4": good, "dp2tp2": {"refused": "why"}}}, "tp") == "unsupported"
    assert cell({"strategies": {}, "refused": "why"}, "dp") == "unsupported"


# ----------------------------------------------------------------------------------------------------- what is refused


def test_random_routers_and_jitter_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="draws random numbers"):
        describe_model(tiny_model_of("phimoe"))
    model = tiny_model_of("mixtral")
    model.config.router_jitter_noise = 0.1
    with pytest.raises(UnsupportedError, match="router_jitter_noise"):
        describe_model(model)


def test_positions_of_a_pack_are_those_that_a_family_counts_from_ids() -> None:
    """RoBERTa's own method, on each sequence alone: padding inside a sequence, at its begin, and nothing else."""
    embedding = tiny_model_of("roberta").roberta.embeddings
    assert counting_from(embedding, "roberta") == embedding.padding_idx == 0
    rows = [[5, 0, 7, 9], [0, 3], [4], [0, 0, 0], [6, 8, 2]]
    ids, lengths = torch.tensor([[i for row in rows for i in row]]), tuple(map(len, rows))
    pack = MicroBatch(ids, ids, ids, torch.tensor([0, 4, 6, 7, 10, 13], dtype=torch.int32), lengths, 0)
    alone = [embedding.create_position_ids_from_input_ids(torch.tensor([row]), 0) for row in rows]
    assert with_counted_positions(pack, 0).position_ids.tolist() == torch.cat(alone, 1).tolist()
    assert describe_model(tiny_model_of("roberta")).shape.max_position_embeddings == 255
    assert counting_from(tiny_model_of("llama").model, "llama") is None
    embedding.create_position_ids_from_input_ids = lambda ids, padding: ids
    with pytest.raises(UnsupportedError, match="RobertaEmbeddings of roberta computes the positions of tokens"):
        counting_from(embedding, "roberta")


def test_a_bias_of_the_head_may_be_named_by_the_modules_around_it_and_no_other_weights_be_tied() -> None:
    model = tiny_model_of("bert")
    spec = next(s for s in describe_model(model).vector.specs if s.name.endswith("decoder.bias"))
    assert spec.tied_names == ("cls.predictions.bias",)
    layers = model.bert.encoder.layer
    layers[1].output.dense.bias = layers[0].output.dense.bias
    with pytest.raises(ModelError, match=r"layer.0.output.dense.bias.*layer.1.output.dense.bias.*are tied"):
        describe_model(model)


def test_layers_that_do_not_hand_the_pack_on_are_told_apart_from_those_whose_attention_would_not_take_it() -> None:
    kinds = {family: describe_model(tiny_model_of(family)).layer_kinds[0] for family in ("llama", "stablelm", "doge")}
    assert {family: (kind.hands_on, kind.alone) for family, kind in kinds.items()} == {
        "llama": (False, False),
        "stablelm": (True, False),
        "doge": (False, True),
    }


REFUSALS = {
    family: {name: found["refused"] for name, found in row["strategies"].items() if "refused" in found}
    for family, row in TABLE["families"].items()
}


@pytest.mark.parametrize("family", [family for family, row in REFUSALS.items() if row])
def test_every_refusal_of_the_table_is_raised_with_its_reason(family: str) -> None:
    row, model = REFUSALS[family], tiny_model_of(family)
    if "refused" in TABLE["families"][family]:  # under every strategy
        with pytest.raises(UnsupportedError) as caught:
            describe_model(model)
        assert set(row.values()) == {str(caught.value)}
        return
    shape = describe_model(model).shape
    assert {name: Strategy.parse(name).unsupported_reason(shape) for name in row} == row
    legal = TABLE["families"][family]["strategies"].keys() - row.keys() - {"mix"}
    assert all(Strategy.parse(name).unsupported_reason(shape) is None for name in legal)


def test_dropout_behind_the_layers_is_no_dropout_of_embeddings() -> None:
    model = tiny_model("llama_uneven")
    plan = model.config.base_model_pp_plan
    for place, reason in (("before", None), ("behind", "the dropout late of llama comes after its layers")):
        late = {"late": (["hidden_states"], ["hidden_states"])}
        model.config.base_model_pp_plan = {**plan, **late} if place == "behind" else {**late, **plan}
        model.model.late = nn.Dropout(0.1)
        found = describe_model(model).shape.pp_unsupported_reason
        assert (found is None) if reason is None else (reason in str(found))


def _with_input(change: Callable[[Any, torch.Tensor], torch.Tensor]) -> type[LlamaModel]:
    """A base model that changes the input of later stages."""

    class Changed(LlamaModel):
        def forward(self, *args: Any, inputs_embeds: torch.Tensor | None = None, **kwargs: Any) -> Any:
            changed = None if inputs_embeds is None else change(self, inputs_embeds)
            return super().forward(*args, inputs_embeds=changed, **kwargs)

    return Changed


def _fails(*_: Any) -> torch.Tensor:
    raise RuntimeError("needs the ids")


@pytest.mark.parametrize(
    ("base_class", "reason"),
    [
        (LlamaModel, None),
        (_with_input(lambda base, hidden: hidden * 2), "changes the input of every pipeline stage"),
        (_with_input(lambda base, hidden: base.norm(hidden)), "uses norm in another place"),
        (_with_input(_fails), "RuntimeError: needs the ids"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_stage_that_would_change_its_input_is_found(
    base_class: type[LlamaModel], reason: str | None, device: str
) -> None:
    with torch.device(device):
        base = base_class(tiny_model("llama_uneven").config)  # type: ignore[arg-type]
    before = {name: id(child) for name, child in base.named_modules()}
    found = stage_unsupported_reason(base, ("layers",), ("embed_tokens",), ("norm",))
    assert (found is None) if reason is None else (reason in str(found))
    assert {name: id(child) for name, child in base.named_modules()} == before


class _NormBefore(LlamaModel):
    def forward(self, *args: Any, input_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs | {"inputs_embeds": self.norm(self.embed_tokens(input_ids))})


class _Data(LlamaModel):
    def forward(self, *args: Any, input_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, input_ids=input_ids[:, : 1 + int(input_ids.max())], **kwargs)


@pytest.mark.parametrize(
    ("family", "base_class", "reason"),
    [
        ("llama", None, None),
        ("llama", _NormBefore, "in the forward of llama the head comes where layer 0 is to come"),
        ("llama", _Data, None),  # only a forward with data can tell
        ("qwen3_next", None, None),
        ("gemma3n_text", None, "in the forward of gemma3n_text the head comes where layer 0 is to come"),
        ("hrm_text", None, "the layers of hrm_text run in cycles"),
    ],
)
def test_units_out_of_order_are_found_before_training(family: str, base_class: Any, reason: str | None) -> None:
    model = tiny_model_of(family)
    if base_class is not None:
        model.model.__class__ = base_class
    before = {name: id(child) for name, child in model.named_modules()}
    shape = describe_model(model).shape
    assert {name: id(child) for name, child in model.named_modules()} == before
    assert not any(child._forward_pre_hooks for child in model.modules())
    assert describe_model(model.to("meta")).shape == shape
    assert any(s.z for s in strategies_with_options(4, shape)) == (reason is None)
    for z in (2, 3):
        found = Strategy(dp=4, z=z).unsupported_reason(shape)
        assert (found is None) if reason is None else (reason in str(found))
    if reason is not None:
        with pytest.raises(StrategyError, match=f"dp4\\+z3 cannot run.*{reason}.*Fix: legal with 4 processes"):
            check_buckets((Bucket(Strategy(dp=4, z=3), 16, 16),), 4, shape)


OFTEN_USED = ["llama", "qwen3", "gemma3_text", "phi3", "granite", "mixtral", "olmo2", "qwen3_5_text", "deepseek_v3"]


@pytest.mark.parametrize(
    "families",
    [pytest.param(OFTEN_USED, id="some"), pytest.param([*planned_families()], id="all", marks=pytest.mark.slow)],
)
def test_a_model_on_meta_is_described_as_one_with_weights(families: list[str]) -> None:
    """Programs that plan describe models without data: the same answer, stages included, in and out of the context."""
    for family in families:
        model = tiny_model_of(family)
        with torch.device("meta"):
            empty = type(model)(model.config).to(torch.float64)

        def described(model: nn.Module) -> tuple[str, Any]:
            try:
                found = describe_model(model)
            except UnsupportedError as error:
                return str(error), None
            return found.digest(), found.shape

        expected = described(model)
        assert described(empty) == expected, family
        with torch.device("meta"):
            assert described(empty) == expected, family
        assert all(tensor.is_meta for tensor in [*empty.parameters(), *empty.buffers()])


# ------------------------------------------------------------------------------------------------ plans, layer by layer


def test_an_activation_with_a_weight_has_a_partial_gradient() -> None:
    specs = describe_model(tiny_model_of("apertus")).vector.specs
    assert {s.partial_gradient for s in specs if ".act_fn." in s.name} == {True}


def test_what_the_plan_does_not_explain_is_held_whole() -> None:
    model = tiny_model_of("llama")
    for layer in model.model.layers:
        layer.self_attn.extra = nn.Linear(3, 3)
    found = describe_model(model)
    assert found.whole == {"model.layers.*.self_attn": "the plan says nothing of extra.weight"}
    assert not found.attention_heads
    cut = {s.name for s in found.vector.specs if s.shard_dim is not None}
    assert "model.layers.0.mlp.up_proj.weight" in cut
    assert not any("self_attn" in name for name in cut)
    assert not any("self_attn" in name for name in found.styles)


@pytest.mark.parametrize(("family", "carries"), [("lfm2", "conv"), ("qwen3_5_text", "linear_attention")])
def test_layers_that_carry_a_state_run_alone_or_as_linear_attention(family: str, carries: str) -> None:
    kinds = describe_model(tiny_model_of(family)).layer_kinds
    expected = [kind == carries for kind in tiny_config_of(family).layer_types]
    assert {True, False} == set(expected)
    assert [kind.alone for kind in kinds] == [carries == "conv" and own for own in expected]
    assert [kind.is_linear for kind in kinds] == [carries != "conv" and own for own in expected]


class _RunningSum(nn.Module):
    """Carries everything from one token to the next; hands a count on."""

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor, previous: Any = None, **kwargs: Any) -> Any:
        return hidden.cumsum(1) * scale, (previous or 0) + hidden.shape[1]


def test_a_layer_that_runs_alone_sees_one_sequence_and_its_own_arguments() -> None:
    layer, kind = _RunningSum(), LayerKind(0, alone=True)
    run_alone(layer, kind)
    lengths = (3, 1, 2)
    pack = PackedSequences(lengths, torch.tensor([0, 3, 4, 6], dtype=torch.int32))
    hidden, scale = torch.randn(1, 6, 5), torch.randn(1, 6, 1)
    out, counts = layer(hidden, scale, hotspa_pack=pack)
    again, sums = layer(hidden, scale, previous=counts, hotspa_pack=pack)
    expected = torch.cat([h.cumsum(1) for h in hidden.split(lengths, 1)], 1) * scale
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(again, expected)
    assert tuple(counts) == lengths
    assert tuple(sums) == (6, 2, 4)


def test_masks_of_layers_that_run_alone() -> None:
    see = LayerKind(1, True, window=3, chunk=4).mask(6, torch.zeros(1, dtype=torch.float64))[0, 0]
    assert see.dtype == torch.float64
    for i in range(6):
        expected = [j for j in range(6) if i - 3 < j <= i and i // 4 == j // 4]
        assert (see[i] == 0).nonzero().flatten().tolist() == expected
        assert see[i].min() == torch.finfo(torch.float64).min or len(expected) == 6


# ----------------------------------------------------------------------------------------------------------- attention


def _attend(lengths: tuple[int, ...], **kwargs: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, sum(lengths), 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )
    pack = PackedSequences(lengths, torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]))
    return packed_attention(nn.Identity(), query, key, value, None, hotspa_pack=pack, **kwargs)[0]


def test_a_sink_takes_its_share_of_the_attention() -> None:
    plain = _attend((5, 3))
    assert torch.allclose(_attend((5, 3), s_aux=torch.full((4,), -60.0)), plain)
    some = _attend((5, 3), s_aux=torch.tensor([-60.0, -60.0, 1.0, 60.0]))
    assert torch.allclose(some[..., :2, :], plain[..., :2, :])
    assert torch.allclose(some[..., 3, :], torch.zeros(8, 4, dtype=torch.float64), atol=1e-20)
    # the first position sees itself alone: softmax([score, sink])
    assert not torch.allclose(some[0, 0, 2], plain[0, 0, 2])


def test_an_unknown_tensor_is_refused() -> None:
    with pytest.raises(ModelError, match="alibi"):
        _attend((3, 2), alibi=torch.zeros(4))
