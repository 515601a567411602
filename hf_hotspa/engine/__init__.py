"""The conductor of a mini-batch: phases, switches, the master store."""
