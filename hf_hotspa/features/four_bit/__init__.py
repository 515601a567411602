"""Frozen bases in 4 bits. A package, because its `open_qlora` is in the reference, whose tool reads packages only."""
