"""Sanitize text from files and other programs for a terminal."""


def printable(text: object) -> str:
    r"""`text` on one line: what a terminal would act on (escapes, line ends) as `\x1b`, `\n`."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))
