"""What a run leaves behind, and how it is shown: the JSONL record, the HTML page, traces, comparisons. No torch."""
