"""What accelerate, transformers and TRL as installed see of a switched model in the place of DDP's wrapper.

A stock Trainer over it needs the few overrides of `_Over`; the losses, metrics and data are its own.
"""

import tempfile

import numpy as np
import pytest
import torch
from accelerate.utils import extract_model_from_parallel
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.switched.model import SwitchedModel
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.lora import tiny_lora
from tests.oracle import exact_in_double, random_rows, relative_error
from tests.switched import batch_of, reference, rows_of, step, switched, worst

pytestmark = pytest.mark.gloo

FAMILY, BUCKETS = "llama_gqa_bias", "dp2:14@64,tp2:64@96"


class _Over(Trainer):
    """The stock Trainer, which calls a switched model."""

    buckets = BUCKETS

    @property
    def switched(self):
        if self.__dict__.get("_switched") is None:
            self._switched = switched(self.model, self.buckets)
        return self._switched

    def _wrap_model(self, model, training=True, dataloader=None):
        return self.switched

    def create_optimizer(self, model=None):
        return super().create_optimizer(self.switched)

    def get_decay_parameter_names(self, model):
        return super().get_decay_parameter_names(self.model)

    def _clip_grad_norm(self, model):
        return self.switched.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model, grad_norm=None):
        return self.switched.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm


class _Margin(_Over):
    """An override that mixes the model's own loss with one of its logits that is no sum over tokens."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**{**inputs, "num_items_in_batch": num_items_in_batch})
        log_p = outputs.logits[:, :-1].log_softmax(-1)
        mask = inputs["labels"][:, 1:] != -100
        nll = -log_p.gather(-1, inputs["labels"][:, 1:].clamp(min=0)[..., None])[..., 0] * mask
        of_row = nll.sum(1) / mask.sum(1).clamp(min=1)
        loss = outputs.loss * self.accelerator.num_processes + 0.3 * of_row.square().mean()
        return (loss, outputs) if return_outputs else loss


def _metrics(prediction):
    best = np.argmax(prediction.predictions[:, :-1], -1)
    mask = prediction.label_ids[:, 1:] != -100
    return {"hits": int((best == prediction.label_ids[:, 1:])[mask].sum()), "labels": int(mask.sum())}


def _trained(base, rank, world_size, **arguments):
    """Losses, gradient norms, metrics, predictions and weights of three steps."""
    model = tiny_model(FAMILY, torch.float64)
    rows = random_rows(24, model.config.vocab_size, longest=40, seed=3)
    folder = tempfile.mkdtemp()
    args = TrainingArguments(
        folder, per_device_train_batch_size=4, per_device_eval_batch_size=4, learning_rate=5e-3, weight_decay=0.1,
        max_grad_norm=0.5, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, seed=3, disable_tqdm=True,
        max_steps=3, eval_strategy="steps", eval_steps=2, **arguments,
    )  # fmt: skip
    trainer = base(
        model=model,
        args=args,
        train_dataset=rows,
        eval_dataset=rows[:8],
        data_collator=batch_of,
        compute_metrics=_metrics,
    )
    with exact_in_double(torch.float64):
        trainer.train()
        predicted = trainer.predict(rows[:8])
    if hasattr(trainer, "_switched"):
        trainer.switched.write_back()
        trainer.switched.close()
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    keys = ("loss", "grad_norm", "eval_loss", "eval_hits", "eval_labels")
    log = [entry[key] for entry in trainer.state.log_history[:-1] for key in keys if key in entry]
    return log, predicted.predictions[predicted.label_ids != -100], {name: w.clone() for name, w in weights.items()}


def fetched_in_double():
    """Within an operation on lazy logits the patch for fp64 is off, so it is put on again while they are computed."""
    fetch = SwitchedModel._logits

    def fetched(self, *args):
        with exact_in_double(torch.float64):
            return fetch(self, *args)

    SwitchedModel._logits = fetched


def stock_against_switched(rank, world_size, case):
    fetched_in_double()
    bases, arguments = {
        "label smoothing": ((Trainer, _Over), {"label_smoothing_factor": 0.1}),
        "a margin on logits": ((type("Plain", (_Margin,), _STOCK), _Margin), {}),
        "accumulation": ((Trainer, _Over), {"gradient_accumulation_steps": 2}),
    }[case]
    (log, predictions, weights), (ours, our_predictions, our_weights) = (
        _trained(base, rank, world_size, **arguments) for base in bases
    )
    log_error = max(abs(a - b) / max(abs(a), 1e-9) for a, b in zip(log, ours, strict=True))
    predicted = float(np.abs(predictions - our_predictions).max())
    return len(log), log_error, predicted, max(relative_error(our_weights[name], weights[name]) for name in weights)


_STOCK = {
    name: getattr(Trainer, name)
    for name in ("_wrap_model", "create_optimizer", "get_decay_parameter_names", "_clip_grad_norm", "_get_grad_norm")
}


@pytest.mark.parametrize("case", ["label smoothing", "a margin on logits", "accumulation"])
def test_the_stock_trainer_over_it_is_the_stock_trainer_under_ddp(case):
    """Trap 1: the label smoother shifts by the name of the unwrapped model. 2: the loss is multiplied in place. 3: evaluation
    reads all outputs."""
    for count, log_error, predictions, weights in run_ranks(2, stock_against_switched, case):
        assert count >= 9
        assert log_error <= 1e-9
        assert predictions <= 1e-6  # gathered in fp32
        assert weights <= 1e-9


def unwrapped(rank, world_size):
    plain = tiny_model(FAMILY)
    model = switched(plain, BUCKETS)
    looks = []
    score = model._passes.score
    model._passes.score = lambda *args, **kwargs: (looks.append(kwargs["with_logits"]), score(*args, **kwargs))[1]
    model.eval()
    with torch.no_grad():
        outputs = model(**batch_of(rows_of(rank, plain)))
        items = dict(outputs.items())  # as prediction_step does, with prediction_loss_only
        before = list(looks)
        shape = items["logits"].shape
    loss = model.train()(**batch_of(rows_of(rank, plain))).loss
    loss *= 2.0
    loss.backward()
    model.flush()
    unwrapped = extract_model_from_parallel(model)
    name = unwrapped._get_name()
    refused = ""
    try:
        model.join()
    except UnsupportedError as error:
        refused = str(error)
    return isinstance(model, DistributedDataParallel), unwrapped is plain, name, before, looks, tuple(shape), refused


def test_what_accelerate_and_the_trainer_look_at():
    for is_ddp, is_same, name, before, looks, shape, refused in run_ranks(2, unwrapped):
        assert is_ddp
        assert is_same
        assert name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        assert before == [False]  # the loss alone
        assert looks == [False, True]
        assert len(shape) == 3
        assert "model.batches(loader)" in refused


def _plain_head(*outputs):
    """TRL's fused head in plain operations: its own keeps sums in fp32."""

    class PlainHead:
        @staticmethod
        def apply(hidden, weight, bias, target, temperature, chunk, softcap, scale, fields):
            z = torch.nn.functional.linear(hidden, weight, bias) * scale / temperature
            log_p = z.log_softmax(-1)
            p = log_p.exp()
            others = {
                "entropy": -(p * log_p).sum(-1),
                "log_sum_sq_probs": (2 * log_p).logsumexp(-1).detach(),
                "mean_logits": z.mean(-1).detach(),
                "is_top1": log_p.argmax(-1) == target,
            }
            own = log_p.gather(-1, target[:, None])[:, 0]
            return own, *(value if name in fields else None for name, value in others.items())

    return PlainHead


def fused_head_of_trl(rank, world_size):
    """Every number of TRL's fused output, the gradients of a loss of them, and what the model object itself gives."""
    import trl.trainer.utils as utils

    utils._ChunkedLogProbFunction = _plain_head()
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
    return errors, type(through_model).__name__


def worst_of(loss, plain, model, rank):
    expected = reference(plain, [(loss, batch_of(rows_of(r, plain))) for r in range(2)])
    step(model, loss, batch_of(rows_of(rank, plain)))
    return worst(model.engine.full_gradients(), expected)


def test_the_fused_head_of_trl():
    for errors, name in run_ranks(2, fused_head_of_trl):
        assert max(errors) <= 1e-11
        assert name == "FusedCausalLMOutput"


def the_object(rank, world_size):
    """After a step the model object gives what the trained weights give, in a forward and in generation."""
    found = []
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
                made = own.generate(
                    input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
                )
        model.write_back()
        state = {name: w.clone() for name, w in own.state_dict().items()}
        model.close()
        trained = make()
        trained.load_state_dict(state)
        with torch.no_grad(), exact_in_double(torch.float64):
            alone = float(trained(**batch, use_cache=False).loss)
            again = trained.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
            )
            closed = float(own(**batch, use_cache=False).loss)
            start = float(make()(**batch, use_cache=False).loss)
        found.append((through_object, alone, closed, start, torch.equal(made, again)))
    return found


def test_calls_of_the_model_object_see_the_current_weights():
    for found in run_ranks(2, the_object):
        for through_object, alone, closed, start, same_tokens in found:
            assert through_object == pytest.approx(alone, rel=1e-11)
            assert closed == pytest.approx(alone, rel=1e-11)
            assert start != pytest.approx(alone, rel=1e-3)
            assert same_tokens


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}])
def test_options_of_a_loss_are_refused(options):
    from hf_hotspa.strategy import parse_buckets

    with pytest.raises(UnsupportedError, match="label_smoothing in a switched model"):
        SwitchedModel(tiny_model(FAMILY), parse_buckets("dp1:64@96"), EngineOptions(**options))


def test_states_are_those_of_the_model():
    model = SwitchedModel(tiny_model(FAMILY), _one(), EngineOptions()).eval()
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


def _one():
    from hf_hotspa.strategy import parse_buckets

    return parse_buckets("dp1:64@96")
