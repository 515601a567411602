"""sentence-transformers' trainers over a `SwitchedModel`, against the same trainers in one process with the whole batch."""

import pickle
import shutil
from typing import Any

import pytest
import sentence_transformers as stock
import torch
from peft import LoraConfig
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.cross_encoder import losses as cross_losses
from sentence_transformers.sentence_transformer import losses as chain_losses
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.modules import Dense

from hf_hotspa.checkpoint.format.manifest import verify
from hf_hotspa.checkpoint.model_files import export
from hf_hotspa.errors import HotspaError
from hf_hotspa.strategy import parse_buckets
from hf_hotspa.switched.model import SwitchedModel
from hf_hotspa.trainer import sentence_transformers as ours
from tests.chains import embedder, ranker, saved, texts, trained
from tests.harness import run_ranks
from tests.oracle import exact_in_double

pytestmark = pytest.mark.gloo

FAST = (("llama_gqa_bias", "right", "", "ranks", ("dp2:16,tp2:64",)),)
FAST_4 = (("llama_gqa_bias", "left", "cls", "sizes", ("dp4:16,cp2tp2+sp:64",)),)
WIDE = (
    ("modernbert", "right", "mean", "pairs", ("dp2:16,tp2+sp:64",)),
    *(
    (family, side, pooling, loss, ("dp2:64", "tp2:64", "pp2+v2:64", "cp2:64", "dp2+z3:64", "cp2+ck9+rc:64", "dp2:16,tp2+sp:64"))
    for family, side, pooling, loss in (
        ("llama_gqa_bias", "right", "weightedmean", "pairs"),
        ("gemma2_soft_caps", "left", "mean", "cached"),
        ("qwen3_qk_norm_tied", "left", "max", "sizes"),
        ("qwen3_qk_norm_tied", "left", "lasttoken", "cached"),
        ("llama_gqa_bias", "right", "mean_sqrt_len_tokens", "pairs"),
        ("qwen3_qk_norm_tied", "right", "", "ranks"),
    )),
)  # fmt: skip
WIDE_4 = tuple(
    (family, side, pooling, loss, ("dp4:64", "dp2tp2+z3:64", "cp2tp2+sp:64", "tp2pp2+ck9:64", "dp2pp2+v2+rc:64", "dp4:8,dp2cp2:16,tp4:64"))
    for family, side, pooling, loss in (
        ("qwen3_qk_norm_tied", "left", "lasttoken", "pairs"),
        ("llama_gqa_bias", "right", "mean", "cached"),
        ("gemma2_soft_caps", "left", "weightedmean", "sizes"),
        ("llama_gqa_bias", "right", "", "ranks"),
    )
)  # fmt: skip
WIDTH = 32  # of the hidden states


def trainer_of(
    world: int,
    folder: str,
    model: Any,
    data: Any,
    loss: Any,
    strategies: str | None,
    evaluator: Any = None,
    **more: Any,
) -> Any:
    """A trainer of sentence-transformers, switched or not, with a batch of 8 rows in all."""
    home: Any = stock if strategies is None else ours
    kind = "CrossEncoder" if isinstance(model, CrossEncoder) else "SentenceTransformer"
    trainer, arguments = getattr(home, f"{kind}Trainer"), getattr(home, f"{kind}TrainingArguments")
    given: dict[str, Any] = {
        "per_device_train_batch_size": 8 // world, "max_steps": 3, "use_cpu": True, "report_to": "none", "logging_steps": 1,
        "save_strategy": "no", "disable_tqdm": True, "max_grad_norm": 0.5, "learning_rate": 1e-2,
        "ddp_find_unused_parameters": False, **more,
    }  # fmt: skip
    flags = {} if strategies is None else {"hotspa_strategies": strategies, "hotspa_report": False}
    args = arguments(folder, **flags, **given)
    return trainer(model, args, train_dataset=data, loss=loss, evaluator=evaluator)


def made(folder: str, pooling: str, kind: str) -> tuple[Any, Any, Any]:
    """A model, rows, and a loss."""
    if kind == "ranks":
        model = ranker(folder)
        return model, texts(20, ("query", "answer"), label=True), cross_losses.BinaryCrossEntropyLoss(model)
    model, data = embedder(folder, pooling), texts(20, ("anchor", "positive", "negative"))
    if kind == "cached":
        loss = chain_losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2, gather_across_devices=True)
        return model, data, loss
    loss = chain_losses.MultipleNegativesRankingLoss(model, gather_across_devices=True)
    return model, data, chain_losses.MatryoshkaLoss(model, loss, [32, 16, 8]) if kind == "sizes" else loss


def of_cases(rank: int, world: int, folder: str, cases: Any, plain: bool) -> Any:
    results = {}
    for number, (*_, pooling, kind, pools) in enumerate(cases):
        for pool in (None,) if plain else pools:
            place = f"{folder}/{number}"
            trainer = trainer_of(world, f"{place}/out{pool}", *made(place, pooling, kind), pool)
            with exact_in_double(torch.float64):
                weights, losses = trained(trainer)
            report = None if plain else trainer.last_report
            results[number, pool] = weights, losses, report and (report.numbers_bytes, report.seeds_bytes)
            assert plain or trainer.engine is not None
    return results


def most_bytes(pooling: str, kind: str, pool: str) -> tuple[float, float]:
    """Of the values of all rows of a step, and of their gradients: a value goes from the ranks that make parts of it to the
    one that has the row, with a cached loss twice; a gradient goes to all ranks of the last stage."""
    if pooling == "max" or kind == "ranks":  # values of all tokens go
        return float("inf"), float("inf")
    strategies, of_rows = [bucket.strategy for bucket in parse_buckets(pool)], 8 * 3 * WIDTH * 8
    parts = max(each.cp * (each.tp if each.sp else 1) for each in strategies)
    values = of_rows * parts * (2 if kind == "cached" else 1)
    return values, of_rows * max(each.cp * each.tp for each in strategies)


@pytest.mark.parametrize(
    ("world", "cases"),
    [(2, FAST), (4, FAST_4)]
    + [pytest.param(2, (case,), marks=pytest.mark.slow) for case in WIDE]
    + [pytest.param(4, (case,), marks=pytest.mark.slow) for case in WIDE_4],
)
def test_weights_are_those_of_one_process_with_the_whole_batch(world, cases, tmp_path):
    for number, (family, side, _, kind, _) in enumerate(cases):
        saved(f"{tmp_path}/{number}", family, side, labels=int(kind == "ranks"))
    (one,) = run_ranks(1, of_cases, str(tmp_path), cases, True, timeout=200)
    results, *_ = run_ranks(world, of_cases, str(tmp_path), cases, False, timeout=500)
    assert len(results) == sum(len(case[-1]) for case in cases)
    for (number, pool), (weights, losses, sent) in results.items():
        expected, expected_losses, _ = one[number, None]
        assert weights.keys() == expected.keys()
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        error = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
        assert error < 1e-11, (cases[number], pool, error)
        most = most_bytes(*cases[number][2:4], pool)
        assert all(0 < size <= limit for size, limit in zip(sent, most, strict=True)), (cases[number], pool, sent)


def of_a_rank(rank: int, world: int, folder: str, pool: str | None) -> Any:
    model = ranker(f"{folder}/0")
    loss = cross_losses.MultipleNegativesRankingLoss(model, num_negatives=2)
    trainer = trainer_of(world, f"{folder}/out{pool}", model, texts(20, ("query", "answer")), loss, pool)
    with exact_in_double(torch.float64):
        return trained(trainer)


@pytest.mark.slow
def test_negatives_that_a_rank_draws_are_those_of_ddp(tmp_path):
    saved(f"{tmp_path}/0", "llama_gqa_bias", labels=1)
    expected, *_ = run_ranks(4, of_a_rank, str(tmp_path), None, timeout=300)
    found, *_ = run_ranks(4, of_a_rank, str(tmp_path), "dp4:16,dp2tp2:64", timeout=300)
    assert found[1] == pytest.approx(expected[1], rel=1e-6)
    assert max(float((found[0][name] - value).abs().max()) for name, value in expected[0].items()) < 1e-11


def evaluated(rank: int, world: int, folder: str) -> Any:
    model, data, loss = made(f"{folder}/0", "mean", "pairs")
    score = EmbeddingSimilarityEvaluator(data["anchor"], data["positive"], [i / 20 for i in range(20)])
    pool, when = "dp2:16,tp2:64", {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    # of the best one here, the least similar
    best = {"load_best_model_at_end": True, "metric_for_best_model": "spearman_cosine", "greater_is_better": False}
    trainer = trainer_of(world, f"{folder}/out", model, data, loss, pool, score, **when, **best)
    weights, _ = trained(trainer)
    pickle.dumps(model)  # as for a pool of processes
    trainer.save_model(f"{folder}/saved")
    scores = [entry["eval_spearman_cosine"] for entry in trainer.state.log_history if "eval_runtime" in entry]
    return weights, scores, score(trainer.model)["spearman_cosine"], trainer.state.best_model_checkpoint


def test_an_evaluator_and_saved_folders_have_current_weights(tmp_path):
    saved(f"{tmp_path}/0", "llama_gqa_bias")
    weights, scores, at_the_end, best = run_ranks(2, evaluated, str(tmp_path), timeout=300)[0]
    assert min(scores) == pytest.approx(at_the_end, abs=1e-12)
    assert len(set(scores)) == 3
    assert best.endswith(f"checkpoint-{1 + scores.index(min(scores))}")
    for folder in (f"{tmp_path}/saved", best):
        loaded = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": torch.float64}).state_dict()
        assert loaded.keys() == weights.keys()
        assert all(torch.equal(value, loaded[name]) for name, value in weights.items())


def test_no_rank_has_a_table_of_all_tokens(tmp_path):
    folder = saved(f"{tmp_path}/0", "llama_gqa_bias")
    for pooling in ("mean", "max"):
        chain = embedder(folder, pooling)
        features = chain.preprocess(["w5 w6 w7 w8 w9 w10", "w11"])
        assert features["input_ids"].shape == (2, 6)
        with torch.no_grad(), exact_in_double(torch.float64):
            expected = chain.eval()(dict(features))["sentence_embedding"]
        switched = SwitchedModel(chain, parse_buckets("dp1:64"), logit_bytes=2 * WIDTH * 8).eval()
        with torch.no_grad(), exact_in_double(torch.float64):
            if pooling == "max":  # which needs one
                with pytest.raises(HotspaError, match="the limit is 512"):
                    switched(dict(features))
            else:
                out = switched(dict(features))
                assert float((out["sentence_embedding"] - expected).abs().max()) < 1e-11
                direct = chain(dict(features))
                assert torch.equal(direct["sentence_embedding"], out["sentence_embedding"])
                for of_tokens in (out, direct, chain[0](dict(features))):
                    with pytest.raises(HotspaError, match="token_embeddings of an embedder are read, and only pooled"):
                        of_tokens["token_embeddings"].sum()
        switched.close()
        again = chain(dict(features))  # by itself, with all tokens
        assert again["token_embeddings"].shape == (2, 6, WIDTH)
        assert "forward" not in vars(chain)


def resumed(rank: int, world: int, folder: str, kind: str, first: str, then: str) -> Any:
    """The weights of a run with checkpoints, and of runs that go on from its second step, the last one in another layout."""
    found = []
    for pool, resume in ((first, None), (first, True), (then, True)):
        model, data, loss = made(f"{folder}/0", "mean", kind)
        place = f"{folder}/out"
        if resume:
            shutil.rmtree(f"{place}/checkpoint-3") if rank == 0 else None
        more = {"save_strategy": "steps", "save_steps": 1, "hotspa_async_save": not resume}
        trainer = trainer_of(world, place, model, data, loss, pool, **more)
        with exact_in_double(torch.float64):
            found.append(trained(trainer, resume_from_checkpoint=resume)[0])
        torch.distributed.barrier()
    return found


@pytest.mark.parametrize("kind", ["pairs", pytest.param("ranks", marks=pytest.mark.slow)])
def test_a_run_goes_on_from_a_checkpoint_in_another_layout(kind, tmp_path):
    saved(f"{tmp_path}/0", "llama_gqa_bias", labels=int(kind == "ranks"))
    one, same, other = run_ranks(2, resumed, str(tmp_path), kind, "dp2:16,tp2+sp:64", "pp2:64", timeout=300)[0]
    assert one.keys() == same.keys() == other.keys()
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-11
    last = tmp_path / "out" / "checkpoint-3"
    verify(last)
    export(last, tmp_path / "exported")
    for folder in (last, tmp_path / "exported"):
        cls = CrossEncoder if kind == "ranks" else SentenceTransformer
        loaded = cls(str(folder), device="cpu", model_kwargs={"dtype": torch.float64})
        state = loaded.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in other.items())
        if kind == "pairs":
            assert [type(module).__name__ for module in loaded] == ["Transformer", "Pooling", "Normalize"]


def from_stock(rank: int, world: int, folder: str, kind: str, pool: str | None) -> Any:
    place, resume = f"{folder}/stock", None if pool is None else f"{folder}/stock/checkpoint-2"
    trainer = trainer_of(world, place, *made(f"{folder}/0", "mean", kind), pool, save_strategy="steps", save_steps=2)
    with exact_in_double(torch.float64):
        return trained(trainer, resume_from_checkpoint=resume)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pairs", "ranks"])
def test_a_run_goes_on_from_a_checkpoint_of_the_library(kind, tmp_path):
    saved(f"{tmp_path}/0", "llama_gqa_bias", labels=int(kind == "ranks"))
    (one,) = run_ranks(1, from_stock, str(tmp_path), kind, None, timeout=300)
    other, *_ = run_ranks(2, from_stock, str(tmp_path), kind, "dp2:16,tp2:64", timeout=300)
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-11


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("layer", "SentenceTransformer"),
        ("loss", "are not the model's"),
        ("adapter", "is an adapter inside a SentenceTransformer"),
    ],
)
def test_what_cannot_be_switched_is_refused(kind, message, tmp_path):
    saved(f"{tmp_path}/0", "llama_gqa_bias")
    model, data, loss = made(f"{tmp_path}/0", "mean", "pairs")
    if kind == "layer":
        model.append(Dense(32, 8).double())
    elif kind == "adapter":
        model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    else:
        data = texts(20, ("first", "second"), label=True)
        loss = chain_losses.SoftmaxLoss(model, 32, 2)
    with pytest.raises(HotspaError, match=message):
        trainer_of(1, f"{tmp_path}/out", model, data, loss, "dp1:64").train()
