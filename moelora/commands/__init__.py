"""What `python -m moelora` runs besides `bench`; nothing here is imported with moelora."""
