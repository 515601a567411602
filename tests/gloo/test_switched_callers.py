"""What accelerate, transformers and TRL as installed see of a switched model in the place of DDP's wrapper.

What a Trainer makes of it: test_stock_equal.py.
"""

import pytest
import torch
from accelerate.utils import extract_model_from_parallel
from torch.nn.parallel import DistributedDataParallel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.strategy import parse_buckets
from hf_hotspa.switched.model import SwitchedModel
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.lora import tiny_lora
from tests.oracle import exact_in_double
from tests.switched import batch_of, loss_of_model, reference, rows_of, run_parts, step, switched, worst
from tests.trl_runs import patched_head

pytestmark = pytest.mark.gloo

FAMILY, BUCKETS = "llama_gqa_bias", "dp2:14@64,tp2:64@96"


def unwrapped(rank, world_size):
    """What accelerate and the Trainer look at."""
    plain = tiny_model(FAMILY)
    model = switched(plain, BUCKETS)
    looks = []
    score = model._passes.score
    model._passes.score = lambda *args, **kwargs: (looks.append(args[3].logits), score(*args, **kwargs))[1]
    model.eval()
    with torch.no_grad():
        outputs = model(**batch_of(rows_of(rank, plain)))
        items = dict(outputs.items())  # as prediction_step does, with prediction_loss_only
        assert looks == [False]  # the loss alone
        assert len(items["logits"].shape) == 3
    loss = model.train()(**batch_of(rows_of(rank, plain))).loss
    loss *= 2.0
    loss.backward()
    model.flush()
    assert looks == [False, True]
    assert isinstance(model, DistributedDataParallel)
    assert extract_model_from_parallel(model) is plain
    assert plain._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    with pytest.raises(UnsupportedError, match=r"model\.batches\(loader\)"):
        model.join()
    model.close()


def fused_head_of_trl(rank, world_size):
    """Every number of TRL's fused output, the gradients of a loss of them, and what the model object itself gives."""
    with patched_head(torch.float64):
        fused_outputs(rank)


def fused_outputs(rank):
    import trl.trainer.utils as utils

    plain, own = tiny_model(FAMILY, torch.float64), tiny_model(FAMILY, torch.float64)
    for model in (plain, own):
        utils.add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    model = switched(own, BUCKETS)
    model._head_fields = ("log_probs", "entropy", "mean_logits", "is_top1")

    def loss(m, batch):
        out = m(**batch, fused_lm_head=True)
        return out.log_probs.sum(1).square().mean() / 50 + 0.1 * out.entropy.sum() + out.loss

    def at_two_temperatures(m, batch):
        """The head's numbers are divided by it, and the model's own loss is not."""
        given = {} if isinstance(m, SwitchedModel) else {"use_cache": False}
        own_loss = m(**batch, **given).loss * (1 + int(batch["input_ids"].sum()) % 3)  # by rank: it is trained again
        return own_loss + m(**batch, fused_lm_head=True).log_probs.sum(1).square().mean() / 50

    errors = [worst_of(loss, plain, model, rank), worst_of(at_two_temperatures, plain, model, rank)]
    batch = batch_of(rows_of(rank, plain))
    with torch.no_grad(), exact_in_double(torch.float64):
        theirs, through_model = plain(**batch, fused_lm_head=True), own(**batch, fused_lm_head=True)
        assert theirs.keys() == through_model.keys()
        errors += [float((theirs[name].double() - through_model[name].double()).abs().max()) for name in theirs]
        errors.append(float((own(**batch).loss - plain(**batch).loss).abs()))
    assert max(errors) <= 1e-11, errors
    assert type(through_model).__name__ == "FusedCausalLMOutput"
    model.close()


def worst_of(loss, plain, model, rank):
    expected = reference(plain, [(loss, batch_of(rows_of(r, plain))) for r in range(2)])
    step(model, loss, batch_of(rows_of(rank, plain)))
    return worst(model.engine.full_gradients(), expected)


def the_object(rank, world_size):
    """After a step the model object gives what the trained weights give, in a forward and in generation."""
    for make in (lambda: tiny_model(FAMILY, torch.float64), lambda: tiny_lora(FAMILY, torch.float64)):
        own = make()
        own.enable_input_require_grads()  # hangs a hook on the embedding, as gradient checkpointing does
        model = switched(own, BUCKETS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        batch = batch_of(rows_of(rank, own))
        with exact_in_double(torch.float64):
            model(**batch).loss.backward()
            optimizer.step()
            with torch.no_grad():
                through_object = float(own(**batch).loss)
                prompt = torch.tensor([[5, 6, 7]])
                asked = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
                made = own.generate(input_ids=prompt, **asked)
        model.write_back()
        state = {name: w.clone() for name, w in own.state_dict().items()}
        model.close()
        trained = make()
        trained.load_state_dict(state)
        with torch.no_grad(), exact_in_double(torch.float64):
            alone = float(trained(**batch, use_cache=False).loss)
            again = trained.generate(input_ids=prompt, **asked)
            closed = float(own(**batch, use_cache=False).loss)
            start = float(make()(**batch, use_cache=False).loss)
        assert through_object == pytest.approx(alone, rel=1e-11)
        assert closed == pytest.approx(alone, rel=1e-11)
        assert start != pytest.approx(alone, rel=1e-3)
        assert torch.equal(made, again)


def test_options_of_a_loss_are_refused():
    with pytest.raises(UnsupportedError, match="label_smoothing in a switched model"):
        SwitchedModel(tiny_model(FAMILY), parse_buckets("dp1:64@96"), EngineOptions(label_smoothing=0.1))


def test_states_are_those_of_the_model():
    model = SwitchedModel(tiny_model(FAMILY), parse_buckets("dp1:64@96"), EngineOptions()).eval()
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert set(state) == set(model.module.state_dict())
    other = tiny_model(FAMILY, seed=4)
    batch = batch_of(rows_of(0, other))
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert float(model(**batch).loss) == pytest.approx(float(other(**batch, use_cache=False).loss), rel=1e-5)
        model.load_state_dict(state)
        assert float(model(**batch).loss) != pytest.approx(float(other(**batch, use_cache=False).loss), rel=1e-3)
    model.close()


# ---- what front ends read and give


def accuracies(rank, world_size, buckets):
    """Steps of a caller that reads the arg-max of logits: errors of it and of gradients, passes that scored, and whether logits
    travelled."""
    plain, model = tiny_model(FAMILY, torch.float64), switched(tiny_model(FAMILY, torch.float64), buckets)
    scored, predictions = [], []
    score = model._passes.score
    model._passes.score = lambda *args, **kwargs: (scored.append(args[3]), score(*args, **kwargs))[1]

    def reading(called, batch):
        outputs = called(**batch)
        predictions.append(outputs.logits.argmax(dim=-1))
        return outputs.loss

    batches = [[batch_of(rows_of(r, plain, 3, seed=seed)) for r in range(world_size)] for seed in range(3)]
    wrong, counts = [], []
    for index, of_ranks in enumerate(batches):
        training = index < 2
        model.train(training)
        with torch.set_grad_enabled(training):
            if training:
                step(model, reading, of_ranks[rank])
                expected = reference(plain, [(loss_of_model, batch) for batch in of_ranks])
                wrong.append(worst(model.engine.full_gradients(), expected))
            else:
                with exact_in_double(torch.float64):
                    wrong.append(
                        float(abs(reading(model, of_ranks[rank]) - loss_of_model(plain.eval(), of_ranks[rank])))
                    )
        own = of_ranks[rank]
        with torch.no_grad(), exact_in_double(torch.float64):
            logits = plain(input_ids=own["input_ids"], attention_mask=own["attention_mask"], use_cache=False).logits
        seen = own["attention_mask"].bool()
        wrong.append(int((logits.argmax(-1) != predictions[-1])[seen].sum()))
        counts.append(len(scored))
    return wrong, counts, any(wanted.logits for wanted in scored)


@pytest.mark.parametrize(
    ("world_size", "buckets"),
    [(2, "dp2:14@64,tp2:64@96"), pytest.param(4, "cp2tp2:14@64,pp2tp2:64@96", marks=pytest.mark.slow)],
)
def test_an_arg_max_of_logits_needs_no_table_of_them(world_size, buckets):
    for wrong, counts, tables in run_ranks(world_size, accuracies, buckets):
        assert max(wrong) < 1e-11
        assert counts[0] == counts[1] == 1  # the first step does not know that it will be read
        assert not tables


def kept_alone(rank, world_size):
    """Labels of the kept logits alone, as ms-swift gives them."""
    plain, model = tiny_model(FAMILY, torch.float64), switched(tiny_model(FAMILY, torch.float64), BUCKETS)
    batch = batch_of(rows_of(rank, plain, 1))
    batch["labels"][:, :4] = -100
    learned = batch["labels"][0] != -100
    mask = torch.nn.functional.pad(learned[1:], (0, 1), value=True)
    by_mask = batch | {
        "labels": torch.nn.functional.pad(batch["labels"][:, learned], (1, 0), value=-100),
        "logits_to_keep": mask,
    }
    count = int(batch["labels"].shape[1] - learned.int().argmax()) + 1
    by_count = batch | {"labels": batch["labels"][:, -count:], "logits_to_keep": count}
    with torch.no_grad(), exact_in_double(torch.float64):
        expected = loss_of_model(plain.eval(), batch)
        for given in (by_mask, by_count):
            outputs = model.eval()(**given)
            assert float(abs(outputs.loss - expected)) < 1e-12
            assert outputs.logits.argmax(-1).shape[1] == given["labels"].shape[1]
    model.close()


def test_callers_get_what_they_read():
    run_parts(2, unwrapped, fused_head_of_trl, the_object, kept_alone)
