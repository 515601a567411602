"""A folder in place of the Hub: tiny random models, their tokenizers and data sets, under the names that TRL's tests use.

`from_pretrained` and `load_dataset` take a folder of the name they are given, if the working directory has one.
"""

import json
import re
from pathlib import Path
from typing import Any

OWNER = "trl-internal-testing"
SIZE = 4096
SPECIAL = {4091: "<|endoftext|>", 4092: "<|im_start|>", 4093: "<|im_end|>", 4094: "<tool_call>", 4095: "</tool_call>"}
TEMPLATES = {"Qwen2": "qwen2_5", "GptOss": "gptoss", "GPTNeoX": None}
"""The chat template of a family, of those that TRL's package has; the others have Qwen3's."""
BASE = {
    "vocab_size": SIZE, "hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": 4093, "pad_token_id": 4091,
}  # fmt: skip
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FIELDS: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 8}, "Gemma2": {"head_dim": 8}, "Cohere2": {"head_dim": 8},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, **ROUTED},
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0,
    }},
    "Glm4Moe": {"head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **ROUTED},
    "DeepseekV3": {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 8,
        "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, **ROUTED,
    },
    "NemotronH": {
        "head_dim": 8, "num_hidden_layers": None, "layers_block_type": ["mamba", "attention", "mlp", "moe"], "mamba_num_heads": 4,
        "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 16,
        **ROUTED,
    },
    "FalconMamba": {"state_size": 8, "time_step_rank": 4, "num_attention_heads": None, "num_key_value_heads": None},
    "Lfm2": {"full_attn_idxs": [1], "block_multiple_of": 8, "block_ff_dim": 32},
}  # fmt: skip
REMOTE = """
from transformers import Qwen2Config, Qwen2ForCausalLM


class RemoteConfig(Qwen2Config):
    model_type = "remote"


class RemoteForCausalLM(Qwen2ForCausalLM):
    config_class = RemoteConfig
"""
SENTENCES = [
    ("Small boats are safer than", "large ones."), ("A calm sea is better than", "a fast one."), ("Old ropes are", "weak."),
    ("Two anchors are better than", "one."), ("Charts are", "cheap."), ("The wind", "turns."), ("Every harbour has a", "shallow place."),
    ("A leak is found", "in the morning."), ("Those who sail at night", "need lamps."), ("Salt eats", "iron."),
    ("If the fog is thick,", "wait."), ("If the tide is low,", "wait too."), ("A good knot is", "easy to untie."),
    ("There is one way to hoist a sail", "and it is slow."), ("The map is not", "the sea."), ("Never trust", "a dry barrel."),
    ("Rest is better than", "haste."), ("Birds know", "the land."), ("A long voyage begins", "with bread."),
]  # fmt: skip
"""What the rows of the data sets say: 17 to train on and 2 to evaluate on, each of at most a dozen words."""
SPLITS = {"train": slice(17), "test": slice(17, None)}


def make(folder: Path, sources: list[Path]) -> None:
    """Writes what the sources name into the folder. A name whose class transformers does not have is left out."""
    text = "\n".join(path.read_text() for path in sources)
    names = set(re.findall(rf"(?:{OWNER}/|HUB \+ \")(tiny-[\w.-]*\w)", text))
    for name in sorted(names):
        _model(folder / OWNER / name, name)
    _tokenizer("qwen3").save_pretrained(folder / "Qwen" / "Qwen3-4B")
    _data_set(folder / OWNER / "zen", _zen())
    _data_set(folder / OWNER / "harmony", _conversations(thinking="Think of it."))
    _data_set(folder / OWNER / "toolcall", _tool_calls())


def _model(folder: Path, name: str) -> None:
    import torch
    import transformers

    found = re.match(r"tiny-((\w+?)For(?:CausalLM|SequenceClassification))", name)
    remote = found is not None and found[2] == "Remote"
    cls: Any = getattr(transformers, "Qwen2ForCausalLM" if remote else found[1], None) if found else None
    if found is None or cls is None:
        return
    fields = {**BASE, **FIELDS.get(found[2], {})}
    fields |= {"num_labels": 1} if "Classification" in found[1] else {}
    torch.manual_seed(0)
    model = cls(
        cls.config_class(
            **{field: value for field, value in fields.items() if field == "bos_token_id" or value is not None}
        )
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape) * 0.02)  # no bias is 0: TRL's tests look at what has changed
    model.to(torch.bfloat16).save_pretrained(folder)
    template = TEMPLATES.get(found[2], "qwen3")
    _tokenizer(template, pads=found[2] != "Mistral").save_pretrained(folder)
    if remote:
        (folder / "modeling_remote.py").write_text(REMOTE)
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "remote", "architectures": ["RemoteForCausalLM"], "auto_map": {
            "AutoConfig": "modeling_remote.RemoteConfig", "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
        }}  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))


def _tokenizer(template: str | None, pads: bool = True) -> Any:
    """Whole words of the sentences, bytes for what else is written, and fillers up to the size of the models."""
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator([" ".join(pair) for pair in SENTENCES], trainer)
    trained = json.loads(core.to_str())["model"]
    vocab = trained["vocab"] | {f"Ġfiller{index}": index for index in range(len(trained["vocab"]), min(SPECIAL))}
    vocab |= {token: index for index, token in SPECIAL.items()}
    core.model = models.BPE(vocab=vocab, merges=[tuple(pair) for pair in trained["merges"]])
    core.add_special_tokens([token for token in SPECIAL.values() if "tool" not in token])
    core.add_tokens([token for token in SPECIAL.values() if "tool" in token])
    folder = Path(trl.__file__).parent / "chat_templates"
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>" if pads else None,
        chat_template=template and (folder / f"{template}.jinja").read_text(),
    )  # fmt: skip


def _data_set(folder: Path, rows_of: dict[str, list[dict[str, Any]]]) -> None:
    card = ["---", "configs:"]
    for config, rows in rows_of.items():
        (folder / config).mkdir(parents=True)
        card += [f"- config_name: {config}", "  data_files:"]
        for split, part in SPLITS.items():
            lines = "".join(json.dumps(row) + "\n" for row in rows[part])
            (folder / config / f"{split}.jsonl").write_text(lines)
            card += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))


def _zen() -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for index, (prompt, end) in enumerate(SENTENCES):
        good, bad = f" {end}", f" {SENTENCES[index - 1][1]}"
        either: dict[str, Any] = {"completion": good if index % 3 else bad, "label": bool(index % 3)}
        of: dict[str, dict[str, Any]] = {
            "language_modeling": {"text": prompt + good}, "prompt_only": {"prompt": prompt},
            "prompt_completion": {"prompt": prompt, "completion": good},
            "preference": {"prompt": prompt, "chosen": good, "rejected": bad},
            "implicit_prompt_preference": {"chosen": prompt + good, "rejected": prompt + bad},
            "unpaired_preference": {"prompt": prompt, **either},
        }  # fmt: skip
        for config, row in of.items():
            rows.setdefault(f"standard_{config}", []).append(row)
    return rows | {f"conversational_{config}": part for config, part in _conversations().items()}


def _conversations(**of_assistant: str) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for index, (prompt, end) in enumerate(SENTENCES):
        asked = [{"role": "user", "content": prompt}]
        good, bad = (
            [{"role": "assistant", "content": text, **of_assistant}] for text in (end, SENTENCES[index - 1][1])
        )
        of: dict[str, dict[str, Any]] = {
            "language_modeling": {"messages": asked + good}, "prompt_only": {"prompt": asked},
            "prompt_completion": {"prompt": asked, "completion": good},
            "preference": {"prompt": asked, "chosen": good, "rejected": bad},
            "implicit_prompt_preference": {"chosen": asked + good, "rejected": asked + bad},
            "unpaired_preference": {"prompt": asked, "completion": good if index % 3 else bad, "label": bool(index % 3)},
        }  # fmt: skip
        for config, row in of.items():
            rows.setdefault(config, []).append(row)
    return rows


def _tool_calls() -> dict[str, list[dict[str, Any]]]:
    depth = {"name": "depth", "description": "The depth of the water.", "parameters": {
        "type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"],
    }}  # fmt: skip
    tools = json.dumps([{"type": "function", "function": depth}])
    rows: dict[str, list[dict[str, Any]]] = {}
    for prompt, end in SENTENCES:
        asked = [{"role": "user", "content": prompt}]
        call = {"type": "function", "function": {"name": "depth", "arguments": {"place": end}}}
        calls = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "depth", "content": "2 metres"},
        ]
        good, bad = ([{"role": "assistant", "content": text}] for text in (end, "No."))
        of: dict[str, dict[str, Any]] = {
            "language_modeling": {"messages": asked + calls + good}, "prompt_completion": {"prompt": asked, "completion": calls + good},
            "preference": {"prompt": asked, "chosen": calls + good, "rejected": calls + bad}, "prompt_only": {"prompt": asked},
        }  # fmt: skip
        for config, row in of.items():
            rows.setdefault(config, []).append({**row, "tools": tools})
    return rows
