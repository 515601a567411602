"""Reads rows of users' data sets into token ids, labels and lengths."""
