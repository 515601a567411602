"""Runs of TRL's trainers for comparisons: a tokenizer without downloads, small data sets, one run of either side.

A case is a kind of trainer, fields of its config, rows and strategies. All cases of a world run one after the other, each with TRL's
own class under DDP and with ours.
"""

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed

from hf_hotspa.checkpoint.format.manifest import WEIGHT
from hf_hotspa.errors import HotspaError
from hf_hotspa.features.dropout.dropout import EmbeddingNoise
from hf_hotspa.trl import EXPERIMENTAL, OF_PADDING, ONLINE
from tests.families import MIXTURE, tiny_model
from tests.gloo.test_stock_equal import fetched_in_double
from tests.harness import run_ranks
from tests.oracle import exact_in_double, relative_error
from tests.qlora import WIDE, quantized
from tests.token_heads import headed
from tests.training_runs import newest, same_bits, whole_state
from tests.vision_models import VISION_FAMILIES, vision_model, vision_processor

DENSE = "llama_gqa_bias"
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COMMON = {
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 3, "learning_rate": 2e-3, "weight_decay": 0.1,
    "max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "warmup_steps": 1, "logging_steps": 1, "save_strategy": "no",
    "report_to": "none", "use_cpu": True, "seed": 3, "disable_tqdm": True, "max_steps": 5, "bf16": False,
    "gradient_checkpointing": False,
}  # fmt: skip
EVALUATES = {"eval_strategy": "steps", "eval_steps": 3}
NOT_COMPARED = ("runtime", "per_second", "total_flos", "preparation_time", "step_time", "hotspa/")
RL = {"num_generations": 4, "max_completion_length": 32, "per_device_eval_batch_size": 4}


def tokenizer() -> Any:
    """Every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*alphabet, "<eos>", "<pad>"])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", chat_template=CHAT)


class CallsTools(PreTrainedTokenizerFast):
    """A tokenizer that reads a call of a tool, `look`, in some completions."""

    response_schema = {"type": "object"}  # it has a parser: TRL adds none

    def parse_response(self, ids: Any, **_: Any) -> dict[str, Any]:
        if not ids or ids[0] % 3:
            return {"role": "assistant", "content": self.decode(ids)}
        call = {"type": "function", "function": {"name": "look", "arguments": {"times": len(ids) % 5}}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


def calling() -> Any:
    """`tokenizer`, with calls of tools."""
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    template = CHAT.replace("{{ m['content'] }}{{ eos_token }}", "{{ m['content'] }}" + calls + "{{ eos_token }}")
    core = tokenizer().backend_tokenizer
    return CallsTools(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", chat_template=template)


def look(times: int) -> str:
    """
    Looks.

    Args:
        times: How often.

    Returns:
        What is there.
    """
    return "+" * times


class Room:
    """An environment whose tool answers by what was looked at before."""

    def reset(self, **_: Any) -> None:
        self.seen = 0

    def look(self, times: int) -> str:
        """
        Looks around.

        Args:
            times: How often.

        Returns:
            What was seen.
        """
        self.seen += times
        return "." * (self.seen % 6)


def rollout(prompts: Any, trainer: Any) -> dict[str, Any]:
    """A rollout of several turns: the model's own tokens (greedy), and those of an environment; ranks call the model differently often."""
    from trl.models.utils import unwrap_model_for_generation

    found: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
    with torch.no_grad(), unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
        for place, prompt in enumerate(prompts):
            ids, completion, mask = trainer.processing_class(prompt)["input_ids"], list[int](), list[int]()
            for turn in range(1 + (place + trainer.accelerator.process_index) % 3):
                before = torch.tensor([ids + completion])
                made = model.generate(
                    input_ids=before, attention_mask=torch.ones_like(before), max_new_tokens=3, do_sample=False
                )
                new, told = made[0, before.shape[1] :].tolist(), [65 + place] * (turn + 1)
                completion += new + told
                mask += [1] * len(new) + [0] * len(told)
            for name, value in zip(found, (ids, completion, [0.0] * len(completion), mask), strict=True):
                found[name].append(value)
    return found


SMALL = {"vocab_size": 259, "eos_token_id": 256, "pad_token_id": 257}


def small(family: str = DENSE, dtype: torch.dtype = torch.float64, seed: int = 0, **sizes: int) -> Any:
    """A model with the vocabulary of `tokenizer`; a family that reads images has its own."""
    if family in VISION_FAMILIES:
        return vision_model(family, dtype)
    model = tiny_model(family, dtype, seed, **SMALL, **sizes)
    model.generation_config.eos_token_id = 256
    return model


def question(i: int) -> str:
    return f"q{i}" + "?" * (i % 4)


def answer(i: int) -> str:
    return f" a{i * 7 % 11}" + "!" * (i * 5 % 23)


def chat(i: int) -> list[dict[str, str]]:
    turn = [{"role": "user", "content": question(i)}, {"role": "assistant", "content": answer(i)}]
    return turn * (1 + i % 2)


ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "text": lambda i: {"text": question(i) + answer(i)},
    "completions": lambda i: {"prompt": question(i), "completion": answer(i)},
    "chats": lambda i: {"messages": chat(i)},
    "pairs": lambda i: {"prompt": question(i), "chosen": f"{answer(i)}.", "rejected": f"{answer(i + 5)},"},
    "prompts": lambda i: {"prompt": question(i)},
    "questions": lambda i: {"prompt": [{"role": "user", "content": question(i)}]},
    "margins": lambda i: {**ROWS["pairs"](i), "margin": i % 4 / 8},
    "triples": lambda i: {**ROWS["pairs"](i), "reference": f"{answer(i + 2)}!"},
    "judged": lambda i: {"prompt": question(i), "completion": answer(i), "label": i % 3 != 0},
}


@contextmanager
def rank_0_first() -> Iterator[None]:
    """As accelerate's `main_process_first`, which before the first config takes each rank for a world of its own."""
    several = dist.is_initialized()
    if several and dist.get_rank():
        dist.barrier()
    yield
    if several and not dist.get_rank():
        dist.barrier()


def rows(kind: str, folder: str, number: int = 40, first: int = 0) -> Dataset:
    """A data set of a kind of rows, with files of its own, as TRL's cache of reference log-probabilities needs."""
    path = Path(folder) / f"{kind}_{first}.jsonl"
    with rank_0_first():
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(ROWS[kind](i)) + "\n" for i in range(first, first + number)))
        return load_dataset("json", data_files=str(path), split="train", cache_dir=f"{folder}/cache")


def hits(predicted: Any) -> dict[str, float]:
    logits = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
    labels = predicted.label_ids[:, 1:]
    real = labels != -100
    return {"hits": float(((logits[:, :-1].argmax(-1) == labels) & real).sum() / real.sum())}


def plain_head() -> type:
    """TRL's fused head in plain operations: its own keeps sums in fp32."""

    class PlainHead:
        @staticmethod
        def apply(
            hidden: Any,
            weight: Any,
            bias: Any,
            target: Any,
            temperature: Any,
            chunk: Any,
            cap: Any,
            scale: Any,
            fields: Any,
        ) -> Any:
            z = torch.nn.functional.linear(hidden, weight, bias) * scale
            if cap is not None:
                z = torch.tanh(z / cap) * cap
            z = z / temperature
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


class PlainDivergence:
    """TRL's divergence of hidden states in plain operations: its own keeps sums in fp32."""

    @staticmethod
    def apply(
        hidden: Any, weight: Any, bias: Any, of_teacher: Any, teacher_weight: Any, teacher_bias: Any, beta: float,
        temperature: float, scale: float, cap: Any, teacher_scale: float, teacher_cap: Any,
    ) -> Any:  # fmt: skip
        def logits(hidden: Any, weight: Any, bias: Any, scale: float, cap: Any) -> Any:
            z = torch.nn.functional.linear(hidden, weight, bias) * scale
            return z if cap is None else torch.tanh(z / cap) * cap

        student = logits(hidden, weight, bias, scale, cap)
        teacher = logits(of_teacher, teacher_weight, teacher_bias, teacher_scale, teacher_cap).detach()
        divergence, entropy = plain_divergences(student, teacher, beta, temperature)
        return divergence, entropy.detach()


def plain_divergences(student: Any, teacher: Any, beta: float, temperature: float = 1.0) -> tuple[Any, Any]:
    """The generalised Jensen-Shannon divergence of each token, by torch's own operations, and the student's entropy."""
    log_p, log_q = ((z / temperature).log_softmax(-1) for z in (student, teacher))

    def divergence(target: Any, log_x: Any) -> Any:
        return torch.nn.functional.kl_div(log_x, target, reduction="none", log_target=True).sum(-1)

    if beta == 0:
        of_tokens = divergence(log_q, log_p)
    elif beta == 1:
        of_tokens = divergence(log_p, log_q)
    else:
        log_m = torch.stack([log_p + math.log(1 - beta), log_q + math.log(beta)]).logsumexp(0)
        of_tokens = beta * divergence(log_q, log_m) + (1 - beta) * divergence(log_p, log_m)
    return of_tokens, -(log_p.exp() * log_p).sum(-1)


@dataclass
class Case:
    """What a script of TRL does.

    Args:
        kind: SFT, DPO, KTO, Reward, GRPO, RLOO, Distillation, one of `EXPERIMENTAL`, or "": transformers' `Trainer`.
        pools: Strategies on 2 ranks, and on 4.
        data: Of `ROWS`.
        fields: Of the config.
        lora: Whether a peft_config is given; a name: the model has an adapter of this name.
        reference: Whether another model is given as `ref_model`.
        family: Of the model.
        given: What the constructor is given beside.
        dtype: Of the model.
        generates: Whether completions are generated, and not made up.
        wide: Whether it runs among the slow tests only.
        may_refuse: What a refusal names, where there may be one.
        four_bit: Whether the model is quantized to nf4.
        change: Makes a subclass of the trainer.
        begun: Steps that were trained before, in a run of TRL's; with `save_only_model` in a run of the same side.
        model: Instead of the tiny one of the family.
    """

    kind: str
    pools: tuple[str, str]
    data: str
    fields: dict[str, Any] = field(default_factory=dict)
    lora: bool | str = False
    reference: bool = False
    family: str = DENSE
    given: Callable[[], dict[str, Any]] = dict
    dtype: torch.dtype = torch.float64
    wide: bool = False
    generates: bool = False
    may_refuse: tuple[str, ...] = ()
    four_bit: bool = False
    change: Callable[[Any], Any] = lambda cls: cls
    begun: int = 0
    model: Any = None


def recorded(cls: Any, of_images: bool = False) -> Any:
    """A trainer whose completions hang on the prompt, the place in its group and the step, in the place of generation.
    `of_images`: of a family that reads images, whose vocabulary is smaller."""
    begin, words, end = (4, 150, 1) if of_images else (0, 250, 256)

    class Recorded(cls):  # type: ignore[misc]
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            completions, rank = [], self.accelerator.process_index
            for place, ids in enumerate(prompt_ids):
                of_group = (rank * len(prompt_ids) + place) % getattr(self, "num_generations", 1)
                key = hashlib.sha256(f"{list(ids)} {of_group} {self.state.global_step}".encode()).digest()
                made = [begin + b % words for b in key[: 2 + key[0] % 24]]
                completions.append([*made, *([end] if key[1] % 4 else [])])
            # every fourth one was cut at the limit
            return (completions, None) if self.__class__.__name__.startswith(("GRPO", "GMPO")) else completions

    Recorded.__name__ = cls.__name__
    return Recorded


def reward(completion_ids: Any = None, **_: Any) -> list[float]:
    """Of made-up completions: some groups have all the same."""
    return [float(sum(ids) % 5) / 4 if ids[0] % 3 else 0.5 for ids in completion_ids]


def brevity(completion_ids: Any = None, **_: Any) -> list[float | None]:
    """A second one, which does not judge everything."""
    return [None if len(ids) % 7 == 0 else -len(ids) / 16 for ids in completion_ids]


def classes(kind: str, own: bool) -> tuple[Any, Any]:
    """Trainer and config, ours or TRL's; of the kind "" transformers' own."""
    import trl

    import hf_hotspa.trl
    from hf_hotspa.trainer import HotSPaTrainer, HotSPaTrainingArguments

    if not kind:
        return (HotSPaTrainer, HotSPaTrainingArguments) if own else (Trainer, TrainingArguments)

    home: Any = hf_hotspa.trl if own else trl
    if kind in EXPERIMENTAL and not own:
        home = import_module(f"trl.experimental.{EXPERIMENTAL[kind]}")
    return getattr(home, f"{kind}Trainer"), getattr(home, f"{kind}Config")


def made(case: Case, folder: str, pool: str | None, **more: Any) -> Any:
    """The trainer of a case; TRL's where there is no pool."""
    trainer, config = classes(case.kind, pool is not None)
    trainer = case.change(trainer)
    set_seed(0)
    if case.model is not None:
        model = case.model
    elif case.kind == "Reward":
        model = headed(case.family, "regression", 1, case.dtype, **SMALL)
    elif case.four_bit:
        model = quantized(case.family, case.dtype, model=SMALL | WIDE)
    else:
        model = small(case.family, case.dtype)
    given = case.given()
    if "train_dataset" not in given:
        given["train_dataset"] = rows(case.data, folder)
    if case.lora:
        adapter = LoraConfig(
            r=4,
            target_modules=["q_proj", "v_proj", "down_proj"],
            init_lora_weights=False,
            task_type="SEQ_CLS" if case.kind == "Reward" else "CAUSAL_LM",
        )
        if isinstance(case.lora, str):
            model = get_peft_model(model, adapter, adapter_name=case.lora, autocast_adapter_dtype=False)
        else:
            given["peft_config"] = adapter
    if case.kind in ONLINE:
        given.setdefault("reward_funcs", [reward])
    if case.kind in (*ONLINE, "Distillation", "ServerDistillation") and not case.generates:
        trainer = recorded(trainer, case.family in VISION_FAMILIES)
    if case.reference:
        reference = small(case.family, case.dtype, seed=1)
        for mine, other in zip(reference.parameters(), model.parameters(), strict=True):
            mine.data = 0.99 * other.data if case.family in VISION_FAMILIES else 0.1 * mine.data + 0.9 * other.data
        if case.kind in ONLINE:  # they load theirs by name
            model.config._name_or_path = saved(reference, f"{folder}/reference")
        else:
            given["ref_model"] = reference
    fields = copy.deepcopy({**COMMON, **case.fields, **more, "output_dir": folder})
    if fields.get("eval_strategy") and "eval_dataset" not in given:
        given["eval_dataset"] = rows(case.data, folder, 11, first=50)
    if pool is not None:
        fields |= {"hotspa_strategies": pool, "hotspa_report": False}
    of_images = case.family in VISION_FAMILIES
    given.setdefault("processing_class", vision_processor(case.family) if of_images else tokenizer())
    built = trainer(model=model, args=config(**fields), **given)
    if case.reference and case.kind in ONLINE and built.ref_model is not None:
        built.ref_model.to(case.dtype)  # what is loaded has rotary frequencies in fp32, unlike the model
    if case.four_bit:  # TRL makes adapters bf16; it would step on them, and ours on fp32 masters
        for parameter in built.model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(case.dtype)
    return built


def saved(model: Any, folder: str) -> str:
    with rank_0_first():
        if not (dist.is_initialized() and dist.get_rank()):
            model.save_pretrained(folder)
    return folder


@contextmanager
def patched_head(dtype: torch.dtype) -> Iterator[None]:
    """In fp64, TRL's fused head in fp64; and what casts down does not."""
    utils: Any = import_module("trl.trainer.utils")
    distillation: Any = import_module("trl.trainer.distillation_trainer")

    own = utils._ChunkedLogProbFunction, distillation.ChunkedDivergenceFunction
    if dtype == torch.float64:
        utils._ChunkedLogProbFunction, distillation.ChunkedDivergenceFunction = plain_head(), PlainDivergence
    try:
        with exact_in_double(dtype):
            yield
    finally:
        utils._ChunkedLogProbFunction, distillation.ChunkedDivergenceFunction = own


@contextmanager
def same_noise() -> Iterator[None]:
    """NEFTune's noise on either side is a function of the embeddings in place of random numbers."""
    stock: Any = import_module("transformers.integrations.neftune")
    kept = stock.neftune_post_forward_hook, EmbeddingNoise.draw

    def noise(out: Any) -> Any:
        return (50 * out.detach()).sin() / 8

    stock.neftune_post_forward_hook = lambda module, args, out: out + noise(out) if module.training else out
    EmbeddingNoise.draw = lambda self, micro_batch, like: noise(like)  # type: ignore[method-assign]
    try:
        yield
    finally:
        stock.neftune_post_forward_hook, EmbeddingNoise.draw = kept  # type: ignore[method-assign]


def run(case: Case, folder: str, pool: str | None, resume: str | None = None, **more: Any) -> dict[str, Any]:
    """Logs and weights of a run."""
    with patched_head(case.dtype), same_noise():
        trainer = made(case, folder, pool, **more)
        trainer.train(resume_from_checkpoint=resume)
    # with padding, which ours leaves out
    skipped = (*NOT_COMPARED, "logits/") if case.kind in OF_PADDING and pool is None else NOT_COMPARED
    logs = [
        {name: value for name, value in log.items() if not any(part in name for part in skipped)}
        for log in trainer.state.log_history
    ]
    if pool is not None:
        trainer.close_engine()
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return {"logs": logs, "weights": weights}


def distance(found: float, expected: float, size: float = 1e-2) -> float:
    """Relative; of something smaller than this absolute."""
    return abs(found - expected) / max(abs(expected), size)


def compared(found: dict[str, Any], expected: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    """By name of what was logged, and of weights, the largest difference; infinity where one side has logged other things."""
    errors: dict[str, float] = {}
    if [sorted(log) for log in found["logs"]] != [sorted(log) for log in expected["logs"]]:
        return {"logs": float("inf")}
    for own, log in zip(found["logs"], expected["logs"], strict=True):
        for name, value in log.items():
            # rewards are differences of log-probabilities of whole rows, whose size matters
            size = 1.0 if dtype == torch.float32 and ("rewards/" in name or name.endswith("kl")) else 1e-2
            errors[name] = max(errors.get(name, 0.0), distance(own[name], value, size))
    assert found["weights"].keys() == expected["weights"].keys()
    errors["weights"] = max(relative_error(found["weights"][n], w) for n, w in expected["weights"].items())
    return errors


def resumed(case: Case, folder: str, pool: str | None, by: str | None = None) -> dict[str, Any]:
    """Logs and weights of a run, resumed if others have begun it under the pool `by`."""
    path = None
    if case.begun:
        saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": case.begun, "max_steps": case.begun}
        run(case, f"{folder}/begun", by, **saves)
        path = f"{folder}/begun/checkpoint-{case.begun}"
    return run(case, folder, pool, path)


EXACT, BALANCE, SINGLE = 1e-11, 1e-6, 1e-5
"""Balance losses are fp32 in transformers; in fp32 nothing is patched."""


def both_sides(cases: Mapping[str, Case], world_size: int, folder: str) -> dict[str, tuple[str, str, dict[str, float]]]:
    """Of each case how TRL fails, how ours is refused, and the differences; one of a world of ranks."""
    fetched_in_double()
    found = {}
    for name, case in cases.items():
        failed = refused = ""
        errors: dict[str, float] = {}
        try:
            expected = resumed(case, f"{folder}/{name}/stock", None)
        except Exception as error:  # of TRL
            failed = f"{type(error).__name__}: {error}"
        try:
            if not failed:
                pool = case.pools[0 if world_size == 2 else 1]
                own = resumed(case, f"{folder}/{name}/own", pool, pool if case.fields.get("save_only_model") else None)
                errors = compared(own, expected, case.dtype)
        except HotspaError as error:
            refused = str(error)
        found[name] = failed, refused, errors
    return found


def wrong_ones(found_of_ranks: Sequence[Any], cases: Mapping[str, Case]) -> list[str]:
    """What is neither equal nor, where a case may be, refused by name; a case with which TRL fails is wrong as well."""
    wrong = []
    for rank, found in enumerate(found_of_ranks):
        assert list(found) == list(cases)
        for name, (failed, refused, errors) in found.items():
            case = cases[name]
            balances = case.family == MIXTURE and case.fields.get("router_aux_loss_coef") != 0.0
            limit = BALANCE if balances else SINGLE if case.dtype == torch.float32 else EXACT
            too_far = {key: value for key, value in errors.items() if not value <= limit}
            is_named = refused and any(option in refused for option in case.may_refuse)
            if too_far or failed or (refused and not is_named):
                wrong.append(
                    f"{name}, rank {rank}: {case.kind} {case.fields}: TRL {failed!r}, ours {refused!r}, {too_far}"
                )
    return wrong


def chosen(module: str, table: str, some: Iterable[Any]) -> dict[str, Case]:
    """Some cases of a test module: of a table by their names, or of a function that draws them by numbers."""
    of: Any = getattr(import_module(module), table)
    return {str(each): of(each) if callable(of) else of[each] for each in some}


def both_chosen(
    rank: int, world_size: int, module: str, table: str, some: Iterable[Any], folder: str
) -> dict[str, tuple[str, str, dict[str, float]]]:
    return both_sides(chosen(module, table, some), world_size, folder)


def compare(module: str, folder: Path, some: Iterable[Any], table: str = "CASES", world_size: int = 2) -> None:
    """Runs some cases (`chosen`) on both sides and fails with `wrong_ones`."""
    found = run_ranks(world_size, both_chosen, module, table, some, str(folder), timeout=1500)
    wrong = wrong_ones(found, chosen(module, table, some))
    assert not wrong, "\n".join(wrong)


def worlds(cases: Mapping[str, Case], together: bool = False) -> list[Any]:
    """`(ranks, names)` for `compare`: on 2 ranks the cases that are not wide, each alone or `together`; slow, the wide ones
    on 2 ranks, and all on 4."""
    fast, wide = ([name for name, case in cases.items() if case.wide is is_wide] for is_wide in (False, True))
    slow = [pytest.param(ranks, names, marks=pytest.mark.slow) for ranks, names in ((2, wide), (4, list(cases)))]
    return [*((2, names) for names in ([fast] if together else [[name] for name in fast])), *slow]


# -- resuming ---------------------------------------------------------------------------------------------------------


def run_and_resume(rank: int, world_size: int, module: str, pool: str, other: str, folder: str) -> None:
    """A whole run; one that resumes in the middle; one that does in another layout, and saves at once; and goes on."""
    for name, case in import_module(module).RESUMED.items():

        def trained(
            run: str, pool: str, steps: int, resume: str | None, folder: str = f"{folder}/{name}", case: Case = case
        ) -> Any:
            trainer = made(case, f"{folder}/{run}", pool, save_strategy="steps", save_steps=2, max_steps=steps)
            trainer.train(resume_from_checkpoint=resume and f"{folder}/{resume}")
            return trainer

        trained("whole", pool, 4, None).close_engine()
        trained("again", pool, 4, "whole/checkpoint-2").close_engine()
        at_once = trained("other", other, 2, "whole/checkpoint-2")
        at_once._save_checkpoint(None, None)
        at_once._hotspa.checkpoints.close()
        at_once.close_engine()
        trained("on", other, 4, "whole/checkpoint-2").close_engine()


def check_resumed(module: str, folder: Path, pool: str, other: str) -> None:
    """The runs `RESUMED` of a test module: the same bits in the layout of before, and at the start in another one."""
    run_ranks(2, run_and_resume, module, pool, other, str(folder), timeout=900)
    for name in import_module(module).RESUMED:
        at = {run: whole_state(newest(folder / name / run)) for run in ("whole", "again", "other", "on")}
        assert same_bits(at["again"], at["whole"]), name
        assert same_bits(at["other"], whole_state(folder / name / "whole" / "checkpoint-2")), name
        weights = [key for key in at["whole"] if key.startswith(WEIGHT)]
        ends = [torch.cat([at[run][key].flatten() for key in weights]) for run in ("on", "whole")]
        assert 0 < relative_error(*ends) <= SINGLE, name
