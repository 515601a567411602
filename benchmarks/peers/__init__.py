"""Side by side with what people use today: `python benchmarks/side_by_side.py`."""
