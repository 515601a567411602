"""The commands of `hf-hotspa`."""
