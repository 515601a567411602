"""Writes the section of docs/exactness.md: `python -m tests.public_reports`."""

from tests.public_reports import PAGE, page

if __name__ == "__main__":
    PAGE.write_text(page())
