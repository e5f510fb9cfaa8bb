"""What several test files need: fixtures live in `conftest.py` files, functions and classes here."""
