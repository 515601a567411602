"""Single small files of the Hugging Face Hub, such as the config of a model: from the cache where they are there.

Weights stay where they are. Where the hub cannot be reached that is said at once, without the client's retries.
"""

from pathlib import Path

from hf_hotspa.errors import HotspaConfigError

CONFIG = "config.json"
_TIMEOUT_S = 10


def hub_file(name: str, filename: str = CONFIG) -> Path:
    """The path of a file of a model on the hub, such as `Qwen/Qwen3-0.6B`; downloaded where the cache does not have it.

    Args:
        filename: The file in its repository.

    Raises:
        HotspaConfigError: the name cannot be that of a model, the hub has no such model or does not give it without a
            token, or the hub cannot be reached; `what` says which.
    """
    # here, because presets and local files do without
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        known = try_to_load_from_cache(name, filename)
        if isinstance(known, str):
            return Path(known)
        get_hf_file_metadata(hf_hub_url(name, filename), timeout=_TIMEOUT_S)  # a download would try for half a minute
        return Path(hf_hub_download(name, filename))
    except HFValidationError:
        raise HotspaConfigError(f"{name[:100]!r} cannot be the name of a model on the hub") from None
    except GatedRepoError:
        raise HotspaConfigError(
            f"the hub gives {name!r} to those only who asked for it",
            fix=f"accept its terms on https://huggingface.co/{name}, then `hf auth login`",
        ) from None
    except RepositoryNotFoundError:
        raise HotspaConfigError(
            f"the hub has no model {name!r}, or it is private", fix="check the name; for a private one, `hf auth login`"
        ) from None
    except (OfflineModeIsEnabled, LocalEntryNotFoundError):
        raise _unreachable(name, filename, "HF_HUB_OFFLINE is set", HF_HUB_CACHE) from None
    except EntryNotFoundError:
        raise HotspaConfigError(
            f"{name!r} has no {filename} on the hub", fix="give a model in transformers' format"
        ) from None
    except Exception as error:  # the client's transport has errors of its own
        raise _unreachable(name, filename, f"{type(error).__name__}: {error}", HF_HUB_CACHE) from None


def _unreachable(name: str, filename: str, why: str, cache: str) -> HotspaConfigError:
    what = filename if filename == CONFIG else f"{filename} tokenizer.json"
    return HotspaConfigError(
        f"the hub cannot be asked for {name!r}: {why}",
        where=f"it is not in the cache {cache} either",
        fix=f"on a machine with network: `hf download {name} {what} --local-dir FOLDER`, then give FOLDER",
    )
