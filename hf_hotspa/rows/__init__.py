"""Rows of data sets as people have them, read into token ids, labels and lengths."""
