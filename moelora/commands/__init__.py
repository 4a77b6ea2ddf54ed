"""What `moelora` runs besides `bench`; nothing here is imported with moelora."""
