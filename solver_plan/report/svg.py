"""Small pieces of SVG: numbers, text, round steps for axes. No kind of problem is known here."""

import math
from html import escape

FONT = "font-family='Helvetica,Arial,sans-serif'"


def number(value: float) -> str:
    """Return a coordinate, short."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", colour: str = "#222") -> str:
    """Return a line of text; the words are escaped."""
    return (
        f"<text x='{number(x)}' y='{number(y)}' font-size='{size}' text-anchor='{anchor}' fill='{colour}' {FONT}>"
        f"{escape(words)}</text>"
    )


def rectangle(x: float, y: float, width: float, height: float, colour: str, tip: str) -> str:
    """Return a rectangle with a tip that a browser shows over it."""
    return (
        f"<rect x='{number(x)}' y='{number(y)}' width='{number(max(width, 0.2))}' height='{number(height)}' "
        f"fill='{colour}'><title>{escape(tip)}</title></rect>"
    )


def line(x1: float, y1: float, x2: float, y2: float, *, colour: str = "#999", dashed: bool = False) -> str:
    """Return a straight line."""
    dash = " stroke-dasharray='4 3'" if dashed else ""
    return f"<line x1='{number(x1)}' y1='{number(y1)}' x2='{number(x2)}' y2='{number(y2)}' stroke='{colour}'{dash}/>"


def polyline(points: list[tuple[float, float]], colour: str, *, dashed: bool = False) -> str:
    """Return a line through points."""
    dash = " stroke-dasharray='6 4'" if dashed else ""
    path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'{dash}/>"


def picture(width: float, height: float, parts: list[str]) -> str:
    """Return a complete SVG document."""
    size = f"width='{number(width)}' height='{number(height)}' viewBox='0 0 {number(width)} {number(height)}'"
    background = f"<rect width='{number(width)}' height='{number(height)}' fill='white'/>"
    return "\n".join([f"<svg xmlns='http://www.w3.org/2000/svg' {size}>", background, *parts, "</svg>"]) + "\n"


def steps(longest: float, about: int = 8) -> list[float]:
    """Return round values from 0 to at most `longest`, about so many."""
    if longest <= 0:
        return [0.0]
    raw = longest / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [step * index for index in range(int(longest / step + 1e-9) + 1)]
