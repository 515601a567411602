"""The states of a process's random number generators as plain JSON: Python, numpy, torch, and the CUDA device.

One file a rank. With another number of ranks, rank r restores the states of rank `r mod saved ranks`: training draws
no numbers from them unless a model's code does, so this only has to be defined.
"""

import base64
import random
from typing import Any

import numpy as np
import torch

from hf_hotspa.errors import DamagedCheckpointError


def random_state() -> dict[str, Any]:
    """Returns the states of the generators, JSON-ready."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }
    numpy_state = np.random.get_state(legacy=False)
    state["numpy"] = {
        "generator": numpy_state["bit_generator"],
        "key": numpy_state["state"]["key"].tolist(),
        "position": int(numpy_state["state"]["pos"]),
        "has_gauss": int(numpy_state["has_gauss"]),
        "gauss": float(numpy_state["gauss"]),
    }
    if torch.cuda.is_available():
        state["cuda"] = base64.b64encode(torch.cuda.get_rng_state().numpy().tobytes()).decode()
    return state


def set_random_state(state: dict[str, Any], where: str) -> None:
    """The inverse of `random_state`; a CUDA state is ignored without a device. Raises `DamagedCheckpointError`: `state`
    is not such a state."""
    try:
        python, numpy_state = state["python"], state["numpy"]
        key = np.array(numpy_state["key"], dtype=np.uint32)
        set_generators(
            (python["version"], tuple(python["words"]), python["gauss"]),
            (numpy_state["generator"], key, numpy_state["position"], numpy_state["has_gauss"], numpy_state["gauss"]),
            _bytes(state["torch"]),
            _bytes(state["cuda"]) if "cuda" in state else None,
        )
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise DamagedCheckpointError(
            f"a random number generator cannot be set: {type(error).__name__}: {error}", where=where
        ) from error


def set_generators(
    python: tuple[Any, ...], numpy_state: tuple[Any, ...], torch_state: torch.Tensor, cuda: torch.Tensor | None
) -> None:
    random.setstate(python)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    if torch.cuda.is_available() and cuda is not None:
        torch.cuda.set_rng_state(cuda)


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
