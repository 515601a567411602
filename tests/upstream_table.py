"""The signatures of everything upstream that the package overrides or relies upon; `python -m tests.upstream_table`.

Written to `tests/data/upstream_signatures.json`. When an upgrade of transformers, accelerate, peft or torch changes
one of them, `tests/contract/test_upstream.py` fails and names it: read what changed, mend the package, write the file anew.
"""

import importlib
import inspect
import json
from pathlib import Path

from hf_hotspa.trainer.trainer import HotSPaTrainer

FILE = Path(__file__).parent / "data" / "upstream_signatures.json"

RELIED_UPON = (
    "accelerate.data_loader:SeedableRandomSampler.__init__",
    "accelerate.data_loader:skip_first_batches",
    "peft:LoraConfig.__init__",
    "peft:PeftConfig.save_pretrained",
    "peft:PeftModel.save_pretrained",
    "peft:get_peft_model",
    "peft:inject_adapter_in_model",
    "peft.tuners.lora:Linear.forward",
    "torch.distributed:batch_isend_irecv",
    "torch.distributed:P2POp.__init__",
    "torch.distributed.pipelining:PipelineStage.__init__",
    "torch.distributed.pipelining:Schedule1F1B.__init__",
    "torch.distributed.pipelining:ScheduleGPipe.__init__",
    "torch.distributed.pipelining:ScheduleInterleaved1F1B.__init__",
    "transformers:PreTrainedModel.from_pretrained",
    "transformers:Trainer.get_decay_parameter_names",
    "bitsandbytes.optim.optimizer:Optimizer2State.init_state",
    "bitsandbytes.optim.optimizer:Optimizer2State.update_step",
    "bitsandbytes.optim.optimizer:Optimizer8bit.get_config",
    "torchao.optim.adam:_AdamBase._new_buffer",
    "torchao.optim.adam:AdamW4bit._subclass_zeros",
    "torchao.optim.adam:AdamW8bit._subclass_zeros",
    "transformers:Trainer.get_optimizer_cls_and_kwargs",
    "transformers:Trainer._inner_training_loop",
    "transformers:TrainerCallback.on_step_end",
    "transformers.models.mixtral.modeling_mixtral:MixtralExperts.forward",
    "transformers.models.mixtral.modeling_mixtral:load_balancing_loss_func",
    "transformers.trainer_callback:CallbackHandler.call_event",
    "transformers.utils.output_capturing:OutputRecorder.__init__",
)
"""What is called or patched but not overridden, `module:qualified name`."""


def signatures() -> dict[str, str]:
    """`module:name` -> signature, without annotations (which change for style) but with defaults."""
    found = {}
    for cls in HotSPaTrainer.__mro__:
        if not cls.__module__.startswith("hf_hotspa"):
            continue
        for name, member in vars(cls).items():
            upstream = next(
                (b for b in HotSPaTrainer.__mro__ if name in vars(b) and b.__module__.startswith("transformers")), None
            )
            if upstream is not None and callable(member) and not name.startswith("__"):
                found[f"{upstream.__module__}:{upstream.__qualname__}.{name}"] = _signature(vars(upstream)[name])
    for place in RELIED_UPON:
        module, _, path = place.partition(":")
        value: object = importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
        found[place] = _signature(value)
    return dict(sorted(found.items()))


def _signature(value: object) -> str:
    signature = inspect.signature(inspect.unwrap(value))  # type: ignore[arg-type]
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def main() -> None:
    FILE.write_text(json.dumps(signatures(), indent=1) + "\n")
    print(f"{len(signatures())} signatures in {FILE}")


if __name__ == "__main__":
    main()
