"""Text of unknown origin, made safe for a terminal."""


def printable(text: str) -> str:
    """Return text with line breaks, control characters and lone surrogates written as escapes."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)
