"""The switched model: a training loop calls it in place of its model, like DDP's wrapper."""
