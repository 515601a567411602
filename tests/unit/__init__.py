"""Tests without processes: tables and properties of the torch-free files."""
