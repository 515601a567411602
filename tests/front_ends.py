"""axolotl and ms-swift as published, with and without `hf-hotspa run`: `python -m tests.front_ends` (`make test-front-ends`).

Makes an environment for each in `.cache`, with the program's own pins (torch's CPU build), installs this package beside it and
checks that no version changed. Then runs the same commands with and without `hf-hotspa run --`, over gloo: losses and norms
must agree to 1e-5, and the saved weights must load. Of axolotl, example configs of its source distribution follow, and of
ms-swift the flags of its example scripts, with small models and data: each trains, or is refused by an error of this package.

CPU processes join only with `use_cpu`, and axolotl draws an adapter's weights without a seed: a `sitecustomize` of the test
sets both, on either side. No GPU, so no kernels of Liger, flash attention or cut cross entropy run on the reference side.

    python -m tests.front_ends axolotl sft            # some cases
    python -m tests.front_ends --environments FOLDER  # somewhere else than .cache; kept
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = {"axolotl": "0.19.0", "ms-swift": "4.6.0"}
MORE = ("deepspeed", "ninja", "bitsandbytes")  # what some examples of ms-swift ask for
SMALL = ("xformers", "torch")  # of axolotl's requirements: a GPU library that asks for CUDA's torch, and what is there
TOLERANCE = 1e-5

SITE = """
import json, os, sys
from hf_hotspa.commands.front.hooks import HookFinder
def arguments(module):
    post = module.TrainingArguments.__post_init__
    def __post_init__(self):
        self.use_cpu = True
        post(self)
    module.TrainingArguments.__post_init__ = __post_init__
def models(module):
    load = module.PreTrainedModel.from_pretrained.__func__
    def from_pretrained(cls, *args, **kwargs):
        if isinstance(kwargs.get("device_map"), dict) and "quantization_config" not in kwargs:
            kwargs["device_map"] = None
        model = load(cls, *args, **kwargs)
        import torch
        torch.manual_seed(0)
        return model
    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)
def trainer(module):
    log = module.Trainer.log
    def logged(self, logs, *args, **kwargs):
        if os.environ.get("RANK", "0") == "0":
            kept = {k: float(v) for k, v in logs.items() if k in ("loss", "grad_norm", "eval_loss", "rewards/margins")}
            if kept:
                print("LOGGED", json.dumps([self.state.global_step, kept]), flush=True)
        return log(self, logs, *args, **kwargs)
    module.Trainer.log = logged
HOOKS = {"transformers.training_args": arguments, "transformers.modeling_utils": models, "transformers.trainer": trainer}
sys.meta_path.insert(0, HookFinder(HOOKS))
"""  # runs behind the one of `hf-hotspa run`


@dataclass(frozen=True)
class Case:
    """One training. `given`: the config's keys (axolotl) or the flags (ms-swift) that differ from the usual ones."""

    ranks: int
    strategies: str
    given: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)  # only behind `hf-hotspa run`
    plugin: bool = False  # ours is `examples/axolotl_plugin.py`, without `hf-hotspa run`
    resumes: bool = False  # the door's run continues from its checkpoint of step 2


LORA = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "lora_target_modules": ["q_proj", "v_proj"],
}
EVALUATES = {"save_strategy": "steps", "save_steps": 2, "val_set_size": 0.1, "eval_steps": 2}
PAIRS = {"rl": "dpo", "rl_beta": 0.1, "chat_template": "tokenizer_default"}
AXOLOTL = {
    "sft": Case(2, "dp2:64,tp2:512"),
    "sft, one rank": Case(1, "dp1:64,dp1+rc:512"),
    "sft, four ranks": Case(4, "dp4:64,dp2tp2:128,cp2pp2:512"),
    "multipack": Case(2, "dp2:64,pp2:512", {"sample_packing": True, "pad_to_sequence_len": True, "eval_sample_packing": False}),
    "plugin": Case(2, "", plugin=True),
    "lora": Case(2, "dp2:64,cp2:512", LORA | EVALUATES),
    "dpo": Case(2, "dp2:64,tp2:512", PAIRS),
    "saved and resumed": Case(2, "dp2:64,tp2:512", EVALUATES, resumes=True),
    "recomputed": Case(
        2, "dp2:64,tp2:512", {"gradient_checkpointing": True},
        # what no CPU can do without us
        {"activation_offloading": True, "plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_rope": True,
         "liger_fused_linear_cross_entropy": True, "torch_compile": True, "tensor_parallel_size": 2, "fsdp_version": 2,
         "fsdp_config": {"reshard_after_forward": True, "cpu_ram_efficient_loading": True}},
    ),
}  # fmt: skip
SWIFT_LORA = {
    "tuner_type": "lora",
    "lora_rank": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "target_modules": "all-linear",
}
SWIFT = {
    "sft": Case(2, "dp2:64,tp2:512"),
    "sft, one rank": Case(1, "dp1:64,dp1+rc:512"),
    "sft, four ranks": Case(4, "dp4:64,dp2tp2:128,cp2pp2:512"),
    "sft, batches": Case(2, "dp2:64,pp2:512", {"per_device_train_batch_size": 2}),
    "lora": Case(
        2, "dp2:64,cp2:512", SWIFT_LORA | {"save_strategy": "steps", "save_steps": 2, "gradient_checkpointing": True}
    ),
}
# Of examples/train of ms-swift 4.6: the flags that make each script another one than `full/train.sh`
SWIFT_EXAMPLES: dict[str, dict[str, Any]] = {
    "full/train.sh": {"save_steps": 2, "eval_steps": 2},
    "lora_sft.sh": SWIFT_LORA
    | {"warmup_ratio": 0.05, "dataloader_num_workers": 1, "system": "You are a helpful assistant."},
    "deepspeed/train_zero2.sh": SWIFT_LORA | {"deepspeed": "zero2"},
    "deepspeed/train_zero3.sh": {"deepspeed": "zero3"},
    "full/dft.sh": {"enable_dft_loss": "true"},
    "liger/sft.sh": {"use_liger_kernel": "true"},
    "sequence_parallel/sequence_parallel.sh": {"sequence_parallel_size": 2},
    "base_to_chat/lora2.sh": SWIFT_LORA | {"target_modules": ["all-linear", "embed_tokens", "lm_head"]},
    "qlora/bnb.sh": SWIFT_LORA | {"quant_method": "bnb", "quant_bits": 4},
    "dora/train.sh": SWIFT_LORA | {"use_dora": "true"},
}
# Of examples/ of axolotl 0.19.0
AXOLOTL_EXAMPLES = (
    "llama-3/fft-8b.yaml", "llama-3/fft-8b-liger-fsdp.yaml", "llama-3/lora-1b.yml", "llama-3/lora-1b-kernels.yml",
    "llama-3/lora-1b-sample-packing-sequentially.yml", "llama-3/qlora-1b.yml", "llama-3/lora-1b-deduplicate-sft.yml",
    "llama-3/instruct-lora-8b.yml", "llama-3/lora-8b.yml", "qwen3/32b-qlora.yaml", "qwen3/8b-lora-fused-attn.yaml", "mistral/config.yml",
    "mistral/lora.yml", "phi/phi3-ft-fsdp.yml", "qwen2/dpo.yaml",
)  # fmt: skip


class Runs:
    """The runs of one program in one environment."""

    def __init__(self, name: str, python: Path, folder: Path) -> None:
        self.name, self.python, self.folder = name, python.absolute(), folder
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "site").mkdir(parents=True)
        (folder / "site" / "sitecustomize.py").write_text(SITE)
        self.call("-m", "tests.front_data", str(folder), cwd=ROOT)

    def call(self, *words: str, cwd: Path | None = None) -> str:
        """What a Python of the environment prints."""
        return subprocess.run(
            [self.python, *words], cwd=cwd or self.folder, env=self._environment(), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=900,
        ).stdout  # fmt: skip

    def _environment(self) -> dict[str, str]:
        quiet = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "DO_NOT_TRACK", "AXOLOTL_DO_NOT_TRACK"), "1")
        own = {
            "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true",
            "AXOLOTL_METRIC_NDIGITS": "8", "MODELSCOPE_CACHE": str(self.folder / "cache"),
            "PYTHONPATH": f"{self.folder / 'site'}:{ROOT}:{ROOT / 'examples'}",
        }  # fmt: skip
        return {**os.environ, **quiet, **own}

    def command(self, given: dict[str, Any], ranks: int, output: Path) -> list[str]:
        """The words behind Python."""
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
        if self.name == "axolotl":
            file = self.folder / f"{output.name}.yml"
            file.write_text(yaml.safe_dump(self.config(given, ranks, output)))
            return [*launch, "-m", "axolotl.cli.train", str(file)]
        flags: dict[str, Any] = {
            "model": self.folder / "model", "model_type": "qwen3", "template": "qwen3", "dataset": self.folder / "chats.jsonl",
            "tuner_type": "full", "torch_dtype": "float32", "max_steps": 4, "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 4 // ranks, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "warmup_ratio": 0,
            "logging_steps": 1, "save_strategy": "no", "eval_strategy": "no", "split_dataset_ratio": 0, "output_dir": output,
            "attn_impl": "sdpa", "max_length": 512, "report_to": "none", "check_model": "false", "dataset_num_proc": 1,
            "dataloader_num_workers": 0, "seed": 0, "add_version": "false",
        }  # fmt: skip
        words = [*launch, "-m", "swift.cli.sft"]
        for name, value in (flags | given).items():
            words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        return words

    def config(self, given: dict[str, Any], ranks: int, output: Path) -> dict[str, Any]:
        data = str(self.folder / ("pairs.jsonl" if given.get("rl") else "chats.jsonl"))
        source: dict[str, Any] = {
            "path": data,
            "ds_type": "json",
            "split": "train",
            "type": "chat_template",
            "field_messages": "messages",
        }
        if given.get("rl"):
            source |= {"type": "chat_template.default", "field_chosen": "chosen", "field_rejected": "rejected"}
        else:
            source |= {
                "message_property_mappings": {"role": "role", "content": "content"},
                "roles_to_train": ["assistant"],
            }
        usual = {
            "base_model": str(self.folder / "model"), "tokenizer_config": str(self.folder / "model"), "datasets": [source],
            "chat_template": "tokenizer_default", "dataset_prepared_path": str(output / "prepared"), "output_dir": str(output),
            "sequence_len": 512, "sample_packing": False, "pad_to_sequence_len": False, "micro_batch_size": 1,
            "gradient_accumulation_steps": 4 // ranks, "max_steps": 4, "num_epochs": 1, "optimizer": "adamw_torch",
            "lr_scheduler": "constant", "learning_rate": 1e-3, "bf16": False, "fp16": False, "tf32": False,
            "attn_implementation": "sdpa", "logging_steps": 1, "save_strategy": "no", "save_first_step": False, "val_set_size": 0,
            "seed": 0, "use_cpu": True, "torch_dtype": "float32", "dataset_num_proc": 1, "dataloader_num_workers": 0,
            "dataloader_pin_memory": False,
        }  # fmt: skip
        return usual | given

    def run(self, given: dict[str, Any], ranks: int, label: str, strategies: str | None) -> tuple[list[Any], str, Path]:
        """Losses and norms by step, the output, and the folder of the run."""
        output = self.folder / re.sub(r"\W+", "-", label)
        command = self.command(given, ranks, output)
        if strategies is not None:
            door = ["-m", "hf_hotspa.cli", "run", "--no-report", "--strategies", strategies, "--"]
            command = [*door, str(self.python), *command]
        text = self.call(*command)
        output.mkdir(exist_ok=True)
        (output / "output.txt").write_text(text)
        return [json.loads(line) for line in re.findall(r"LOGGED (\[.*\])", text)], text, output


def difference(ours: list[Any], theirs: list[Any]) -> float:
    """The largest relative difference of two logs; infinite if they do not log the same."""
    if not theirs or [[step, sorted(values)] for step, values in ours] != [
        [step, sorted(values)] for step, values in theirs
    ]:
        return float("inf")
    pairs = ((own[1][k], other[1][k]) for own, other in zip(ours, theirs, strict=True) for k in own[1])
    return max(abs(a - b) / max(abs(b), 1.0) for a, b in pairs)


def compare(runs: Runs, label: str, case: Case) -> str | None:
    """What is wrong with a case, or None."""
    given = dict(case.given)
    stock, text, _ = runs.run(given, case.ranks, f"{label} stock", None)
    if not stock:
        return f"the program alone does not train it: {text[-1500:]}"
    given |= case.more
    if case.plugin:
        given |= {"plugins": ["axolotl_plugin.HotSPaPlugin"]}
    ours, text, output = runs.run(given, case.ranks, f"{label} door", None if case.plugin else case.strategies)
    if (far := difference(ours, stock)) > TOLERANCE:
        return f"differs by {far:.2g}\n  stock {stock}\n  ours  {ours}\n{text[-3000:]}"
    if given.get("gradient_checkpointing") and "+rc" not in text:
        return f"recomputation was lost\n{text[-3000:]}"
    print(f"  {label}: equal to {far:.1g}", flush=True)
    if case.resumes:
        shutil.rmtree(output / "checkpoint-4")
        again, text, output = runs.run(
            given | {"resume_from_checkpoint": str(output / "checkpoint-2")},
            case.ranks,
            f"{label} door",
            "tp2:64,dp2:512",
        )
        if (far := difference([e for e in again if e[0] > 2], [e for e in stock if e[0] > 2])) > TOLERANCE:
            return f"resumed, it differs by {far:.2g}\n{text[-3000:]}"
    return loads(runs, output)


def loads(runs: Runs, output: Path) -> str | None:
    """What is wrong with the saved weights of a run, or None."""
    newest = max(output.rglob("*.safetensors"), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        return None if runs.name == "ms-swift" else f"nothing was saved in {output}"
    said = runs.call("-m", "tests.front_data", "--load", str(newest.parent), str(runs.folder / "model"), cwd=ROOT)
    return None if "LOADED" in said else f"the saved model does not load: {said[-1500:]}"


def example(runs: Runs, label: str, given: dict[str, Any]) -> str | None:
    """What is wrong with an example that has to train, or to be refused by name."""
    ours, text, _ = runs.run(given, 2, f"example {label}", "dp2:128,tp2:4096")
    refused = re.search(r"HSP-\d+[^\n]*", text)
    if not ours and refused is None:
        return f"neither trains nor is refused by name: {text[-3000:]}"
    print(f"  {label}: {f'{len(ours)} logged' if ours else refused[0][:150] if refused else ''}", flush=True)
    return None


_OF_EXAMPLES = {
    "sample_packing", "pad_to_sequence_len", "optimizer", "lr_scheduler", "learning_rate", "save_strategy", "save_first_step",
}  # fmt: skip
_OF_THE_EXAMPLE = {
    "special_tokens", "model_type", "tokenizer_type", "tokens", "load_in_8bit", "flash_attention", "resume_from_checkpoint",
    "trust_remote_code",
}  # fmt: skip
"""Keys of our configs that an example has its own values of; and keys of examples that are of their models."""


def of_axolotl(runs: Runs, archive: Path) -> dict[str, dict[str, Any]]:
    """Example configs of the source distribution, with model, data and steps replaced."""
    usual, found = runs.config({}, 2, runs.folder / "example"), {}
    with tarfile.open(archive) as tar:
        for name in AXOLOTL_EXAMPLES:
            member = tar.extractfile(f"axolotl-{VERSIONS['axolotl']}/examples/{name}")
            assert member is not None
            given = yaml.safe_load(member.read())
            own = runs.config(given, 2, runs.folder / "example") if given.get("rl") else usual
            given = {k: v for k, v in given.items() if k not in _OF_THE_EXAMPLE and not k.startswith("wandb_")}
            given |= {key: own[key] for key in usual.keys() - _OF_EXAMPLES}
            given |= {"sequence_len": 512, "eval_sample_packing": False}
            found[name] = {key: value for key, value in given.items() if value is not None}
    return found


def environment(name: str, folder: Path) -> Path:
    """The Python of a program's environment, which is made if it is missing. This package changes no version in it."""
    python, own = str(folder / name / "bin" / "python"), f"{name}=={VERSIONS[name]}"
    if not Path(python).exists():
        constraints = dict(
            line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
        )
        subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, f"torch=={constraints['torch']}"], check=True)
        subprocess.run([*pip, "--no-deps", own], check=True)
        site = next((folder / name / "lib").glob("python*/site-packages"))
        (program,) = (d for d in distributions(path=[str(site)]) if d.metadata["Name"].replace("_", "-") == name)
        wanted = [line.split(";")[0] for line in program.requires or () if "extra ==" not in line]
        wanted = [line for line in wanted if not re.match(rf"({'|'.join(SMALL)})\b", line)]
        wanted += [f"{more}=={constraints[more]}" for more in MORE] if name == "ms-swift" else []
        subprocess.run([*pip, *wanted, f"torch=={constraints['torch']}"], check=True)
    listed = [python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    before = {d["name"]: d["version"] for d in json.loads(subprocess.check_output(listed))}
    if "hf-hotspa" not in before:
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", str(ROOT)], check=True)
        after = {d["name"]: d["version"] for d in json.loads(subprocess.check_output(listed))}
        if changed := {k: (v, after.get(k)) for k, v in before.items() if after.get(k) != v}:
            raise SystemExit(f"installing hf-hotspa beside {own} changed {changed}")
        print(
            f"installing hf-hotspa beside {own} changed no version; new: {', '.join(sorted(after.keys() - before.keys()))}"
        )
    return Path(python)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="axolotl and ms-swift, with and without `hf-hotspa run`.")
    parser.add_argument("--environments", type=Path, default=ROOT / ".cache" / "front_ends")
    parser.add_argument("--no-examples", action="store_true")
    parser.add_argument("program", nargs="?", choices=list(VERSIONS))
    parser.add_argument("case", nargs="?", help="one case, or one example, by its name")
    options = parser.parse_args(argv)
    failed = {}
    for name in [options.program] if options.program else list(VERSIONS):
        python = environment(name, options.environments)
        runs = Runs(name, python, options.environments / f"{name}-runs")
        print(name, flush=True)
        for label, case in (AXOLOTL if name == "axolotl" else SWIFT).items():
            if options.case in (None, label) and (wrong := compare(runs, label, case)):
                failed[f"{name}, {label}"] = wrong
        examples = SWIFT_EXAMPLES
        if name == "axolotl" and not options.no_examples:
            subprocess.run([python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation",
                            f"axolotl=={VERSIONS[name]}", "-d", runs.folder], check=True)  # fmt: skip
            examples = of_axolotl(runs, runs.folder / f"axolotl-{VERSIONS[name]}.tar.gz")
        for label, given in {} if options.no_examples else examples.items():
            if options.case in (None, label) and (wrong := example(runs, label, given)):
                failed[f"{name}, example {label}"] = wrong
    for label, wrong in failed.items():
        print(f"FAILED {label}: {wrong}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
