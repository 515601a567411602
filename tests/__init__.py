"""Tests of hf_hotspa. A package, so that rank processes find the functions of test modules by name."""
