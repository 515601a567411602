"""Pushing to the hub, where the main process alone talks to the network and the others must not wait for it in vain."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import Trainer

from hf_hotspa.errors import HotspaError
from hf_hotspa.runtime.agreement import Agreement


class HubMixin(Trainer):
    """`init_hf_repo` and `push_to_hub` for `HotSPaTrainer`: a failure of the main process is raised by all."""

    hub_model_id: str | None

    if TYPE_CHECKING:

        def _agreement(self) -> Agreement: ...

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """As in the stock Trainer. Collective."""
        self._on_all_ranks(lambda: super(HubMixin, self).init_hf_repo(token, private))
        if self.hub_model_id is None:  # only the main process knows it, and `push_to_hub` asks on every rank
            self.hub_model_id = ""

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """As in the stock Trainer. Collective."""
        return self._on_all_ranks(lambda: super(HubMixin, self).push_to_hub(*args, **kwargs))

    def _on_all_ranks(self, action: Callable[[], Any]) -> Any:
        result, error = None, None
        try:
            result = action()
        except HotspaError as failure:
            error = failure
        except Exception as failure:  # whatever the network or the hub raises
            error = HotspaError(
                f"the hub cannot be reached or refuses: {type(failure).__name__}: {failure}",
                fix="check the network, hub_model_id and hub_token, or train with push_to_hub=False",
            )
        self._agreement().check({}, error, "hub")
        return result
