"""Writes the section of docs/exactness.md and its table: `python -m tests.public_reports`."""

from tests.public_reports import PAGE, TABLE, page, table

if __name__ == "__main__":
    PAGE.write_text(page())
    TABLE.write_text(table())
