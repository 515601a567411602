"""The switched model: what a Trainer or a loop of one's own calls in the place of its model, as it calls DDP's wrapper."""
