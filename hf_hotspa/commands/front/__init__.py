"""The front door: `hf-hotspa run -- COMMAND` trains the unchanged program's Trainer over a `SwitchedModel`."""
