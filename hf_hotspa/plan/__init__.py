"""Which bytes move where when a strategy takes over: plans of switches, made and proved without torch."""
