"""The output of a run: the JSONL record, the HTML page, traces, comparisons. No torch."""
