"""The balance loss of routers is the same sum under every strategy, and what its definition says."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.model.specs import describe_model
from tests.harness import run_ranks
from tests.oracle import exact_in_double, random_rows
from tests.tiny_families import tiny_model_of
from tests.worlds import from_rank_0, make_engine, make_mini_batch, shared_reference, worst_error

pytestmark = pytest.mark.gloo

COEFFICIENT = 0.7  # large, so that leaving it out shows


def _model(family="mixtral"):
    model = tiny_model_of(family)
    model.config.output_router_logits = True
    model.router_aux_loss_coef = model.config.router_aux_loss_coef = COEFFICIENT
    return model


def _reference(model, rows) -> tuple[float, dict[str, Tensor]]:
    """From the definition: the family's function of each sequence and layer, weighted by label tokens."""
    num_labels = sum(label != -100 for row in rows for label in row["labels"][1:])
    total = 0.0
    with exact_in_double(torch.float64):
        for row in rows:
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
            out = model(input_ids=ids, use_cache=False, output_router_logits=True)
            loss = functional.cross_entropy(out.logits[0, :-1], labels[1:], reduction="sum", ignore_index=-100)
            own = [
                load_balancing_loss_func((g,), model.num_experts, model.num_experts_per_tok) for g in out.router_logits
            ]
            loss = (loss + int((labels[1:] != -100).sum()) * COEFFICIENT * sum(own) / len(own)) / num_labels
            loss.backward()
            total += loss.item()
    return total, {n: p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False)}


def _errors(rank, world_size, bucket_lists, options):
    model = _model()
    rows = random_rows(9, 163, longest=24)
    loss, gradients = from_rank_0(lambda: _reference(model, rows))
    model.zero_grad(set_to_none=True)
    model.config.output_router_logits = False
    plain, _ = shared_reference(model, rows)
    model.config.output_router_logits = True
    model.zero_grad(set_to_none=True)
    assert abs(plain - loss) > 0.1 * COEFFICIENT
    found = []
    for buckets in bucket_lists:
        engine = make_engine(model, buckets, **options)
        mini_batch = make_mini_batch(engine, rows)
        with exact_in_double(torch.float64), engine.evaluation() as evaluation:
            evaluated = evaluation.run(mini_batch)
        found.append(abs(evaluated.loss_sum / evaluated.num_labels - loss) / loss)
        found.append(worst_error(engine, mini_batch, loss, gradients)[0])
        engine.close()
    return found


QUICK = [
    "dp2pp2:4@8,tp4:24@30",
    "tp2pp2+ck7:9@16,dp2tp2+rc+ck11+kh:24@32",  # a sequence in chunks has one balance loss
    "cp2pp2+ck8:24@32",
    "tp2pp2+sp+ck7:9@16,tp2pp2+v2+sp:24@32",  # every stage of a rank has routers
    "dp2pp2ep2:4@8,tp4ep4+sp:24@30",  # each rank has the routers of its own tokens, and of padding
]
MORE = [
    "dp4:24@32",
    "tp2pp2:24@32",
    "dp4+ck7+kg2:24@32",
    "tp2pp2+v2:4@8,dp2pp2+v2+ck13:24@32",
    "tp4+sp:24@31",
    "dp2pp2+v2:4@8,cp2tp2+sp:24@32",
    "dp4ep4:24@32",
]


RECOMPUTED = ["dp2tp2+rc:24@32", "pp4+rc:24@32", "dp4+rc:4@8,tp2pp2+rc:24@30"]
OVERLAP = {"overlap_load": True, "overlap_return": True}


@pytest.mark.parametrize(
    ("buckets", "options"),
    [(QUICK, {}), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((MORE, {}), (RECOMPUTED, OVERLAP)))],
    ids=["quick", "others", "recomputed"],
)
def test_the_loss_of_routers_is_equal_under_every_strategy(buckets, options):
    for errors in run_ranks(4, _errors, buckets, options):
        assert max(errors) <= 1e-11, errors


def test_which_families_have_such_a_loss():
    assert describe_model(_model()).auxiliary_layers == 4
    without = tiny_model_of("dots1")
    without.config.output_router_logits = True
    assert describe_model(without).auxiliary_layers == 0
    with pytest.raises(UnsupportedError, match="output_router_logits"):
        describe_model(_model("doge"))
