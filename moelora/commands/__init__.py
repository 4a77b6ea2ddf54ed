"""Commands of `moelora` other than `bench`; not imported with moelora."""
