"""`hf-hotspa bench`: exactness, links, and speed beside the stock Trainer, on this machine."""
