"""The operators in Python, and how one calls the compiled code."""
