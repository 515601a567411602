"""A plugin of Axolotl: its trainer for supervised fine-tuning over a switched model. In its YAML, with this folder on PYTHONPATH:

plugins:
  - axolotl_plugin.HotSPaPlugin

Strategies are then chosen by themselves (`hotspa_strategies=auto`).
"""

from typing import Any

from axolotl.integrations.base import BasePlugin  # type: ignore[import-not-found]

from hf_hotspa.trainer import switched


class HotSPaPlugin(BasePlugin):  # type: ignore[misc]
    def get_trainer_cls(self, cfg: Any) -> Any:
        from axolotl.core.trainers import AxolotlTrainer  # type: ignore[import-not-found]

        return None if cfg.rl else switched(AxolotlTrainer)
