"""Which bytes move where when the strategy changes: plans of switches, made and proved without torch."""
